"""The advice of _output, and the test that takes each."""

from __future__ import annotations

from .reasons import OUTSIDE, VALUES

_DISK = "merging/test_merge_lora_checkpoint"
_ATTACKS = "output/test_stage_attacks.py::"
_COMMIT = "output/test_commit.py::"

TAKEN: dict[str, dict[str, str]] = {
    "_output/journal.py": {
        "Wait for it, end it": f"{_COMMIT}test_another_writer_is_named_and_a_dead_one_blocks_nobody",
        "Delete it, or name": f"{_ATTACKS}test_a_lock_that_is_no_file_of_its_own_is_refused_by_name",
    },
    "_output/output_folder.py": {
        "use at most": VALUES,
        "name another one": VALUES,
        "Name another path": VALUES,
        "Name a new folder inside it": VALUES,
        "Name a new folder, or pass overwrite": f"{_DISK}.py::test_arguments_and_paths_are_refused",
        ") free; nothing was written. Free": OUTSIDE,
    },
    "_output/stage.py": {
        "Check the disk": OUTSIDE,
        "use it in a `with` block": VALUES,
        "Call it again, where nobody": f"{_ATTACKS}test_a_finished_file_that_became_a_link_is_never_committed",
    },
    "_output/stage_folders.py": {
        "delete it, or name another output": f"{_ATTACKS}"
        "test_a_stage_that_is_a_link_is_refused_by_name_and_nothing_behind_it_is_touched",
        "Wait for it, or name another output": f"{_COMMIT}"
        "test_on_a_file_system_of_several_machines_each_has_its_stage_and_one_of_them_writes",
    },
}
