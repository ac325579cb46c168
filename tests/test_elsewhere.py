"""What does not need Linux: every module is imported, and a checkpoint is checked, on any system.

On Linux the calls that Windows lacks are taken away first.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from faults.checkpoints import write_model

CODE = """
import importlib, os, pkgutil, sys
import peft, torch, transformers  # which may use what is taken away
if sys.platform == "linux":
    for name in ("fcntl", "resource", "pwd", "grp", "termios"):
        sys.modules[name] = None
    for name in ("preadv", "pread", "pwrite", "copy_file_range", "posix_fadvise", "statvfs", "getuid", "fork",
                 "sched_getaffinity", "O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC", "O_DIRECTORY"):
        delattr(os, name)
import safe_loading
for module in pkgutil.walk_packages(safe_loading.__path__, "safe_loading."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
from safe_loading.__main__ import main
print(main(["check", "--headers", sys.argv[1]]), main(["explain", "truncated"]))
plan = safe_loading.plan_device_map(transformers.LlamaConfig(
    hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=64), {0: "1GB"})
print(plan.ok)
"""


def test_every_module_is_imported_and_a_folder_is_checked_without_what_linux_has(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", {"model.safetensors": {"a": 4}})
    command = [sys.executable, "-c", CODE, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    *_, statuses, planned = done.stdout.splitlines()
    assert (statuses, planned) == ("0 0", "True")
