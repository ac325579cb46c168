"""The installed engines against the versions that were declared and tested. Imports none of them."""

from __future__ import annotations

import dataclasses
import sys

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from safe_loading._core.engines import declared_engines, installed_version
from safe_loading._core.report import Finding

# constraints.txt says the same; tests/commands/test_doctor.py compares.
TESTED = {
    "torch": "2.13.0",
    "transformers": "5.23.0",
    "peft": "0.21.2",
    "accelerate": "1.15.0",
    "safetensors": "0.8.0",
    "huggingface_hub": "2.4.0",
}


@dataclasses.dataclass(frozen=True)
class Engine:
    """One package that this one depends on."""

    name: str
    installed: str | None  # None if it is not
    declared: str  # what this package requires, such as ">=2.11"
    tested: str


@dataclasses.dataclass(frozen=True)
class _KnownProblem:
    """A fault of some versions of an engine when it is called directly."""

    engine: str
    versions: str
    message: str
    fix: str


_KNOWN_PROBLEMS = (
    _KnownProblem(
        "safetensors",
        "==0.8.*",
        "its save_file ignores the umask and writes files that only their owner can read (mode 0600)",
        "chmod the files that others must read; merge_lora_checkpoint follows the umask",
    ),
    _KnownProblem(
        "transformers",
        "==5.23.*",
        "from_pretrained follows `../` and absolute paths in an index out of the checkpoint's folder",
        "run `python -m safe_loading check DIR` on folders from others; this package's own loaders refuse such paths",
    ),
    _KnownProblem(
        "accelerate",
        "==1.15.*",
        "load_checkpoint_in_model follows `../` and absolute paths in an index out of the checkpoint's folder",
        "run `python -m safe_loading check DIR` on folders from others; this package's own loaders refuse such paths",
    ),
)


@dataclasses.dataclass(frozen=True)
class Advisory:
    """A published fault of some versions of an engine, which a later version mends."""

    engine: str
    mended_in: str  # the first version without it
    source: str  # where it is published, and the change that mends it
    message: str


# docs/doctor.md has the same table; tests/commands/test_doctor.py compares.
ADVISORIES = (
    Advisory(
        "transformers",
        "5.3",
        "CVE-2026-4372, GHSA-29pf-2h5f-8g72",
        "a config.json with _attn_implementation_internal runs code of the hub in from_pretrained, without "
        "trust_remote_code",
    ),
    Advisory(
        "transformers",
        "5.5",
        "CVE-2026-5241, huggingface/transformers#45122",
        "a config.json of LightGlue turns trust_remote_code on for the models inside, though it was passed as False "
        "(told of 5.2.0)",
    ),
    Advisory(
        "transformers",
        "5.10",
        "CVE-2026-9856, GHSA-xrqw-3rrv-vx5w, huggingface/transformers#46191",
        "save_pretrained of a tokenizer or processor writes chat templates outside the folder, where their names are "
        "paths",
    ),
    Advisory(
        "torch",
        "2.10",
        "CVE-2026-24747",
        "torch.load of a pickle from others corrupts memory and may run its code, in spite of weights_only=True",
    ),
    Advisory(
        "accelerate",
        "1.15",
        "huggingface/accelerate#4206",
        "Trainer with FSDP2, LoRA and FULL_STATE_DICT saves the first rank's part of each factor alone in "
        "pytorch_model_fsdp.bin",
    ),
)


def read_engines() -> tuple[Engine, ...]:
    """Return the engines with their installed, required and tested versions."""
    declared = declared_engines()
    return tuple(
        Engine(name, installed_version(name), declared.get(name, ""), tested) for name, tested in TESTED.items()
    )


def judge_engines(engines: tuple[Engine, ...]) -> list[Finding]:
    """Return findings about engines that are missing, too old, untested, or known to have a problem.

    Published faults come from `ADVISORIES`, others that were found here from the table above it.
    """
    return [finding for engine in engines for finding in _findings(engine)]


def _findings(engine: Engine) -> list[Finding]:
    name, requirement = engine.name, f"{engine.name}{engine.declared}"
    if engine.installed is None:
        return [Finding("engine-missing", "error", name, "is not installed.", f"pip install '{requirement}'")]
    installed = Version(engine.installed)
    findings = []
    if not SpecifierSet(engine.declared).contains(installed, prereleases=True):
        message = f"{installed} is installed, but {engine.declared} is required."
        findings.append(Finding("engine-too-old", "error", name, message, f"pip install '{requirement}'"))
    elif installed.release[:2] > Version(engine.tested).release[:2]:
        message = f"{installed} is installed, newer than the tested {engine.tested}."
        fix = "if something fails, try the tested versions of constraints.txt."
        findings.append(Finding("engine-untested", "info", name, message, fix))
    where = f"{name} {installed}"
    findings += [
        Finding(
            "engine-advisory",
            "warning",
            where,
            f"{advisory.message} ({advisory.source}).",
            f"pip install '{name}>={advisory.mended_in}'",
        )
        for advisory in ADVISORIES
        if advisory.engine == name and installed < Version(advisory.mended_in)
    ]
    return findings + [
        Finding("engine-known", "info", where, f"{problem.message}.", f"{problem.fix}.")
        for problem in _KNOWN_PROBLEMS
        if problem.engine == name and SpecifierSet(problem.versions).contains(installed)
    ]


def python_version() -> str:
    """Return the version of this Python, as ``3.11.7``."""
    return ".".join(map(str, sys.version_info[:3]))
