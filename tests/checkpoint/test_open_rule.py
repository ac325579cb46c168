"""Every file of a checkpoint is opened by ``open_regular`` or ``try_open``; what else the package opens is listed here.

The rule and its reasons are in ``safe_loading/_checkpoint/files.py``. A new call that opens a file fails this test: use
``open_regular`` instead. Only if the file is not part of a checkpoint, list it in ``OTHER_FILES`` with the reason.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import safe_loading

PACKAGE = Path(safe_loading.__file__).parent
OPENS = {"open", "read_text", "read_bytes", "safe_open", "load_file", "fromfile", "from_file"}

THE_RULE = {"_checkpoint/files.py": 1, "_loading/adapter_file.py": 1}  # torch.load of what open_regular opened
# {file: (calls, what they open)}
OTHER_FILES = {
    "__main__.py": (1, "/dev/null, in the place of a pipe that was closed"),
    "_checkpoint/signer.py": (1, "a key that the user names, which may be anywhere"),
    "_checkpoint/hub.py": (2, "references of the hub's cache, which huggingface_hub wrote"),
    "_commands/explain.py": (1, "the explanations, which this package ships"),
    "_core/job_args.py": (1, "DeepSpeed's settings, in the file that a trainer's arguments name"),
    "_demo/torchrun.py": (1, "what the demo's own ranks wrote"),
    "_memory/plan/device_memory.py": (4, "/proc/meminfo, and three files of this process's control group"),
    "_merging/weights/offloaded.py": (2, "weights that accelerate has opened and offloaded already"),
    "_output/journal.py": (1, "the lock and the journal of a stage, which this package wrote"),
    "_output/stage.py": (2, "new files of the output, and its folders to sync them"),
    "_output/stage_folders.py": (2, "/etc/machine-id and /proc/self/mountinfo"),
    "_ranks/machine.py": (2, "/proc/sys/kernel/random/boot_id and /proc/PID/stat"),
    "_sharding/peak_memory.py": (1, "/proc/self/statm"),
}


def opening_calls(tree: ast.Module) -> Iterator[ast.Call]:
    """Yield each call that opens a file by its path."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name in OPENS or ast.unparse(node.func) == "torch.load":
                yield node


def test_every_file_of_a_checkpoint_is_opened_by_the_rule() -> None:
    calls = Counter(
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        for _ in opening_calls(ast.parse(path.read_text(encoding="utf-8")))
    )
    assert calls == {**THE_RULE, **{file: count for file, (count, _) in OTHER_FILES.items()}}


def test_the_check_can_fail() -> None:
    source = "import os\nx = open('a')\ndef f():\n    os.open('b', 0)\n    Path('c').read_text()\n    opener('d')\n"
    assert len(list(opening_calls(ast.parse(source)))) == 3
