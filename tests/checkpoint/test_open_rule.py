"""Every file of a checkpoint is opened by ``open_regular`` or ``try_open``; what else the package opens is listed here.

The rule and its reasons are in ``safe_loading/_checkpoint/files.py``. A new call that opens a file fails this test: use
``open_regular`` instead. Only if the file is not part of a checkpoint, add the call to ``OTHER_FILES`` with the reason.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import safe_loading

PACKAGE = Path(safe_loading.__file__).parent
OPENS = {"open", "read_text", "read_bytes", "safe_open", "load_file", "fromfile", "from_file"}
READS_OPEN_FILE = {"_loading/adapter_values.py read_tensors": "torch.load of what open_regular opened"}

THE_RULE = {"_checkpoint/files.py try_open", *READS_OPEN_FILE}
# {"file function": what it opens}
OTHER_FILES = {
    "__main__.py main": "/dev/null, in the place of a pipe that was closed",
    "_checkpoint/hub.py _cached_snapshot": "a reference of the hub's cache, which huggingface_hub wrote",
    "_checkpoint/hub.py _write_reference": "the same",
    "_demo/torchrun.py run_ranks": "what the demo's own ranks wrote",
    "_memory/plan/free_memory.py free_host": "/proc/meminfo",
    "_merging/disk/resume.py _is_header": "a file of the stage, which this package wrote",
    "_merging/disk/resume.py is_whole": "the same",
    "_merging/weights/offloaded.py _from_safetensors": "weights that accelerate has opened and offloaded already",
    "_merging/weights/offloaded.py _mapped": "the same",
    "_output/journal.py __init__": "the journal of a stage, which this package wrote",
    "_output/journal.py _read": "the journal and the lock of a stage",
    "_output/journal.py take_lock": "the lock of a stage",
    "_output/stage.py _sync_folder": "a folder of the output, to sync it",
    "_output/stage.py create": "a new file of the output, to write it",
    "_output/stage_folders.py _delete": "the lock of a stage",
    "_output/stage_folders.py _machine": "/etc/machine-id",
    "_output/stage_folders.py file_system_of": "/proc/self/mountinfo",
    "_ranks/machine.py _boot_id": "/proc/sys/kernel/random/boot_id",
    "_ranks/machine.py _start_time": "/proc/PID/stat",
    "_sharding/peak_memory.py _now": "/proc/self/statm",
}
# Files of a checkpoint that still have to be opened by the rule. Delete each line with its call.
TO_MOVE = {
    "_merging/disk/output_config.py config_bytes",
    "_merging/disk/output_plan.py _laid_out",
    "_merging/disk/output_plan.py plan_index",
    "_merging/disk/quantized_base.py _read",
    "_merging/disk/small_files.py _has_template",
    "_merging/disk/small_files.py _with_tokenizer",
    "_merging/disk/stream.py opened",
}


def opening_calls(tree: ast.Module) -> Iterator[str]:
    """Yield, for each call that opens a file, the name of the function that it is in."""
    functions = [node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name in OPENS or ast.unparse(node.func) == "torch.load":
            inside = [f for f in functions if f.lineno <= node.lineno <= (f.end_lineno or f.lineno)]
            yield max(inside, key=lambda f: f.lineno).name if inside else "<module>"


def test_every_file_of_a_checkpoint_is_opened_by_the_rule() -> None:
    calls = {
        f"{path.relative_to(PACKAGE).as_posix()} {function}"
        for path in PACKAGE.rglob("*.py")
        for function in opening_calls(ast.parse(path.read_text(encoding="utf-8")))
    }
    assert calls - THE_RULE - OTHER_FILES.keys() - TO_MOVE == set(), "open these with open_regular"
    assert (THE_RULE | OTHER_FILES.keys() | TO_MOVE) - calls == set(), "these open no file any more: delete their lines"


def test_the_check_can_fail() -> None:
    source = "import os\nx = open('a')\ndef f():\n    def g():\n        os.open('b', 0)\n    Path('c').read_text()\n"
    assert sorted(opening_calls(ast.parse(source))) == ["<module>", "f", "g"]
