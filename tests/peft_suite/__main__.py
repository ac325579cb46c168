"""Run peft's own test files with our load, or our merge, in the place of peft's.

::

    python -m tests.peft_suite --load [--merge] [--folder work] [pytest's arguments]

The sdist of the installed peft has its tests. It is fetched with pip, and so are the packages that the tests import and
that are missing here, all into a folder of their own. A case counts when one of the replaced calls ran in it. Those
that fail are run again with peft's own calls: a case that passes with these and fails with ours differs, and is
explained in ``expected.py`` or makes the run fail. The models that the tests take from the hub are tiny stand-ins
(``stand_ins.py``); a case that needs anything else of the hub fails both ways.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from importlib.metadata import version
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

from .record import Comparison, write_record

TESTS = Path(__file__).resolve().parents[1]
# Of the files that load adapters, those that need neither a GPU nor a package that is not installed here.
_OF_LOADING = (
    "custom_models decoder_models encoder_decoder_models feature_extraction_models seq_classifier auto "
    "adaption_prompt arrow boft cartridge cpt frod helpers initialization integrations lora_conversion lora_ga "
    "low_level_api mixed multitask_prompt_tuning osf other poly pvera randlora shadow shira supertuning "
    "target_parameters token_classification_qa trainable_tokens tuners_utils unilora vblora velora vera "
    "xlora bdlora deft lora_variants"
)
_OF_MERGING = (
    "custom_models decoder_models encoder_decoder_models feature_extraction_models seq_classifier initialization "
    "lora_variants target_parameters trainable_tokens tuners_utils mixed bdlora"
)
FILES = {"load": _OF_LOADING.split(), "merge": _OF_MERGING.split()}
# What the tests import, by the name of the module, and does not come with peft.
PACKAGES = {"diffusers": "diffusers", "parameterized": "parameterized", "scipy": "scipy", "PIL": "pillow"}
_SLICE = 0.05  # of the cases: what a process runs, so that a run that is stopped has counts of the slices before
_SECONDS = 1800  # and for how long


def prepared(folder: Path) -> Path:
    """Fetch and make what the run needs, unless ``folder`` has it from another run; return the folder of the tests."""
    from peft_suite.stand_ins import save_all

    tests = folder / "peft_tests"
    if not tests.exists():
        _fetch_tests(folder, tests)
        missing = [package for module, package in PACKAGES.items() if find_spec(module) is None]
        if missing:
            _pip("install", "--no-deps", "--target", str(folder / "packages"), *missing)
        save_all(folder / "hub")
    return tests


def _pip(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", "--quiet", *arguments], check=True)


def _fetch_tests(folder: Path, tests: Path) -> None:
    """Unpack the tests of the installed peft as a package ``peft_tests``."""
    own = ("--no-deps", "--no-binary", ":all:", "--no-build-isolation", "--dest", str(folder))
    _pip("download", *own, f"peft=={version('peft')}")
    with tarfile.open(next(folder.glob("peft-*.tar.gz"))) as archive:
        members = [member for member in archive.getmembers() if "/tests/" in member.name]
        archive.extractall(folder, members, filter="data")
    next(folder.glob("peft-*/tests")).rename(tests)
    # They import one another relatively, and two of them by the name of the folder in peft's repository.
    (tests / "__init__.py").touch()
    for path in tests.glob("*.py"):
        path.write_text(path.read_text().replace("from tests.", "from peft_tests."))
    (folder / "pytest.ini").write_text(
        "[pytest]\nmarkers =\n    single_gpu_tests\n    multi_gpu_tests\n    regression\n"
    )


Outcomes = dict[str, dict[str, Any]]


def run(folder: Path, replaced: Sequence[str], arguments: Sequence[str], name: str) -> tuple[Outcomes, int]:
    """Run tests in a process of their own.

    Returns ``{"outcome", "called", "error"}`` of each that ended, by its id, and 1 if it was cut off.
    """
    results = folder / f"{name}.jsonl"
    results.write_text("")
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, (TESTS, TESTS.parent, folder / "packages"))),
        "HF_HOME": str(folder / "hub"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "PEFT_SUITE_REPLACED": ",".join(replaced),
        "PEFT_SUITE_RESULTS": str(results),
    }
    options = ["-q", "--tb=no", "-p", "peft_suite.plugin", "-p", "no:cacheprovider", "-W", "ignore", "--no-header"]
    command = [sys.executable, "-m", "pytest", *options, *arguments]
    try:
        ended = subprocess.run(command, cwd=folder, env=environment, check=False, timeout=_SECONDS).returncode
    except subprocess.TimeoutExpired:
        ended = -1
    cut_off = int(ended not in (0, 1, 5))  # pytest's codes for a run that came to its end
    if cut_off:
        _say("CUT OFF: what had not run is not counted")
    found = [json.loads(line) for line in results.read_text().splitlines()]
    return {facts.pop("case"): facts for facts in found}, cut_off


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def compare(folder: Path, replaced: Sequence[str], arguments: Sequence[str]) -> Comparison:
    """Run cases with our calls, and those that fail with peft's own; print and return what came of it."""
    ours, cut_off = run(folder, replaced, arguments, "ours")
    failed = [case for case, facts in ours.items() if facts["outcome"] == "failed"]
    plain: Mapping[str, Mapping[str, Any]] = {}
    if failed:
        (folder / "failed.txt").write_text("\n".join(failed))
        plain, _ = run(folder, (), [f"@{folder / 'failed.txt'}"], "plain")
    called = Counter(facts["outcome"] for facts in ours.values() if facts["called"])
    differ = {case: ours[case]["error"] for case in failed if plain.get(case, {}).get("outcome") == "passed"}
    _say(f"{len(ours)} cases ran; {called.total()} called what is replaced: {dict(called)}")
    _say(f"{len(failed) - len(differ)} cases fail with peft's own calls too; {len(differ)} differ")
    for error, count in Counter(facts["error"][:100] for facts in plain.values() if facts["error"]).most_common(8):
        _say(f"{count:5d}  with peft's own calls: {error}")
    return Comparison(len(ours), called, differ, cut_off)


def slices(share: float) -> list[str]:
    """Cut a share of the cases into slices that a process each runs."""
    ends = [min(share, count * _SLICE) for count in range(1 + math.ceil(round(share / _SLICE, 6)))]
    return [f"{first},{end}" for first, end in pairwise(ends)]


def main() -> int:
    """Run the files, print what differs by reason, and return whether something differs without one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--load", action="store_true", help="load_peft_on_rank, load_adapter_on_rank and hot swaps")
    parser.add_argument("--merge", action="store_true", help="merge_lora_inplace")
    parser.add_argument("--folder", type=Path, help="work there, and leave what was fetched for the next run")
    parser.add_argument("--files", nargs="+", help="the files, without test_ and .py; default: all that fit")
    parser.add_argument("--share", type=float, default=1, help="which share of the cases runs (default: 1)")
    parser.add_argument("--seed", default="", help="which cases are in the share: they are chosen by their ids and it")
    parser.add_argument("--record", action="store_true", help="write the counts into record.json and docs/methods.md")
    parser.add_argument("--json", type=Path, help="write {case: error} of what differs to this file")
    args, rest = parser.parse_known_args()
    halves = [name for name in FILES if getattr(args, name)]
    if not halves:
        parser.error("pass --load, --merge or both")
    sys.path.insert(0, str(TESTS))
    found = Comparison()
    with ExitStack() as stack:
        folder = (args.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        tests = prepared(folder)
        os.environ["PEFT_SUITE_SEED"] = args.seed
        names = args.files or list(dict.fromkeys(name for half in halves for name in FILES[half]))
        paths = [str(path.relative_to(folder)) for name in names if (path := tests / f"test_{name}.py").exists()]
        for part in slices(args.share):
            os.environ["PEFT_SUITE_SLICE"] = part
            found += compare(folder, halves, [*paths, *rest])
            if args.record:
                write_record("+".join(halves), found, float(part.partition(",")[2]), args.seed)
    if args.json:
        args.json.write_text(json.dumps(found.differ, indent=1))
    for reason, count in found.by_reason().most_common():
        _say(f"{count:5d}  {reason or 'NO REASON'}")
    for case, error in found.unexplained().items():
        _say(f"NO REASON  {case}: {error}")
    return int(bool(found.unexplained()))


if __name__ == "__main__":
    sys.exit(main())
