"""The installed engines against the versions that were declared and tested. Imports none of them."""

from __future__ import annotations

import dataclasses
import sys
from importlib import metadata

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

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
    """One package that this one stands on.

    Attributes:
        name: Its name.
        installed: Its version; ``None`` when it is not installed.
        declared: The versions that this package declares to work with, such as ``">=2.11"``.
        tested: The version that the tests ran with.
    """

    name: str
    installed: str | None
    declared: str
    tested: str


@dataclasses.dataclass(frozen=True)
class _Known:
    """What goes wrong with some versions of an engine when it is called without this package."""

    engine: str
    versions: str
    message: str
    fix: str


_KNOWN = (
    _Known(
        "safetensors",
        "==0.8.*",
        "its save_file writes files that only their owner can read (mode 0600), whatever the umask is",
        "chmod what others must read; merge_lora_checkpoint follows the umask",
    ),
    _Known(
        "transformers",
        "==5.23.*",
        "from_pretrained follows `../` and absolute paths in an index out of the checkpoint's folder",
        "run `python -m safe_loading check DIR` on folders that you did not make; our own loads refuse them",
    ),
    _Known(
        "accelerate",
        "==1.15.*",
        "load_checkpoint_in_model follows `../` and absolute paths in an index out of the checkpoint's folder",
        "run `python -m safe_loading check DIR` on folders that you did not make; our own loads refuse them",
    ),
)


def read_engines() -> tuple[Engine, ...]:
    """Return the engines, as they are installed."""
    declared = _declared()
    return tuple(Engine(name, _installed(name), declared.get(name, ""), tested) for name, tested in TESTED.items())


def judge_engines(engines: tuple[Engine, ...]) -> list[Finding]:
    """Return what is missing, too old, newer than what was tested, or known to be wrong.

    Args:
        engines: What :func:`read_engines` returned.
    """
    return [finding for engine in engines for finding in _judge(engine)]


def _judge(engine: Engine) -> list[Finding]:
    name, wanted = engine.name, f"{engine.name}{engine.declared}"
    if engine.installed is None:
        return [Finding("engine-missing", "error", name, "is not installed.", f"pip install '{wanted}'")]
    installed = Version(engine.installed)
    findings = []
    if not SpecifierSet(engine.declared).contains(installed, prereleases=True):
        message = f"{installed} is installed, {engine.declared} is needed."
        findings.append(Finding("engine-too-old", "error", name, message, f"pip install '{wanted}'"))
    elif installed.release[:2] > Version(engine.tested).release[:2]:
        message = f"{installed} is installed, newer than the tested {engine.tested}."
        fix = "if something fails, compare with the tested versions of constraints.txt."
        findings.append(Finding("engine-untested", "info", name, message, fix))
    known = [known for known in _KNOWN if known.engine == name and SpecifierSet(known.versions).contains(installed)]
    where = f"{name} {installed}"
    return findings + [Finding("engine-known", "info", where, f"{one.message}.", f"{one.fix}.") for one in known]


def _declared() -> dict[str, str]:
    """Return the specifier of each dependency, from this package's own metadata."""
    try:
        lines = metadata.requires("safe-loading") or []
    except metadata.PackageNotFoundError:  # run from a checkout that was never installed
        return {}
    requirements = [Requirement(line) for line in lines]
    plain = [requirement for requirement in requirements if requirement.marker is None]
    return {requirement.name.replace("-", "_"): str(requirement.specifier) for requirement in plain}


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def python_version() -> str:
    """Return the version of this Python, as ``3.11.7``."""
    return ".".join(map(str, sys.version_info[:3]))
