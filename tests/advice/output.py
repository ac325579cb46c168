"""The advice of _output, and the test that takes each."""

from __future__ import annotations

from .reasons import OUTSIDE, VALUES

_DISK = "merging/test_merge_lora_checkpoint"
_COMMIT = "output/test_commit.py::"

TAKEN: dict[str, dict[str, str]] = {
    "_output/journal.py": {
        "Wait for it, end it": f"{_COMMIT}test_another_writer_is_named_and_a_dead_one_blocks_nobody"
    },
    "_output/output_folder.py": {
        "use at most": VALUES,
        "name another one": VALUES,
        "Name another path": VALUES,
        "Name a new folder inside it": VALUES,
        "Name a new folder, or pass overwrite": f"{_DISK}.py::test_arguments_and_paths_are_refused",
        ") free; nothing was written. Free": OUTSIDE,
    },
    "_output/stage.py": {"Check the disk": OUTSIDE, "use it in a `with` block": VALUES},
    "_output/stage_folders.py": {
        "Wait for it, or name another output": f"{_COMMIT}"
        "test_on_a_file_system_of_several_machines_each_has_its_stage_and_one_of_them_writes"
    },
}
