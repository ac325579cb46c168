"""The advice about files of checkpoints, and the test that takes each."""

from __future__ import annotations

from .reasons import OUTSIDE

_ADVISED = "checkpoint/test_check_advice.py::"
_MENDED = f"{_ADVISED}test_a_folder_is_sound_once_the_finding_is_mended"
_INDEX = "checkpoint/test_checkpoint_index.py::"
_HUB = "checkpoint/test_checkpoint_hub.py::"

TAKEN: dict[str, dict[str, str]] = {
    "_checkpoint/adapter_config.py": {
        "name the modules in a list": "checkpoint/test_pattern_cost.py::test_the_fix_that_the_fault_names_works",
        "load this adapter with peft itself": OUTSIDE,
        "set megatron_core to": _MENDED,
        "correct the number": _MENDED,
    },
    "_checkpoint/base_config.py": {
        "correct it, or save the model again": _MENDED,
        "write its config into backbone_config": _MENDED,
        "pass attn_implementation=": "checkpoint/test_base_config.py::test_the_fix_is_the_argument_that_it_names",
        "upgrade transformers, or remove quantization_config": _MENDED,
        "name the modules in it": _MENDED,
    },
    "_checkpoint/faults.py": {"download or copy the file again; the download": _MENDED},
    "_checkpoint/files.py": {
        "run `git lfs pull`": _MENDED,
        "put the file itself there, or name the folder": f"{_ADVISED}test_the_folder_of_a_file_is_named",
        "name it relative to the folder": _MENDED,
        "check the path and the disk": OUTSIDE,
        "put the file itself (or a link) there": _MENDED,
        "download the file again (in a Hugging Face cache": _MENDED,
        "check the path, or download or copy": _MENDED,
        "run `chmod u+r`": f"{_ADVISED}test_a_file_may_be_read_after_chmod",
        "download the file again": _MENDED,
    },
    "_checkpoint/header.py": {
        "download or copy the file again, or save it again": _MENDED,
        "convert it to safetensors": _MENDED,
        "download the file again": _MENDED,
        "save the file again": _MENDED,
        "save it in several files": f"{_ADVISED}test_many_tensors_are_read_from_several_files",
        "convert it with that framework": _MENDED,
    },
    "_checkpoint/hub.py": {
        "Pass the name of one": f"{_ADVISED}test_what_a_folder_is_not_is_left_out",
        "Check the path": "loading/test_load_advice.py::test_a_path_that_is_wrong_is_checked",
        "Check the subfolder and the revision": f"{_HUB}test_one_request_per_repository_and_none_when_offline",
        "Download it first": f"{_HUB}test_one_request_per_repository_and_none_when_offline",
        "Leave it out": f"{_ADVISED}test_what_a_folder_is_not_is_left_out",
        "Pass the folder that holds the files": f"{_ADVISED}test_what_a_folder_is_not_is_left_out",
        "Convert it once": f"{_ADVISED}test_a_base_of_pickles_is_saved_once_as_transformers_saves_it",
        "Check the name, the token": f"{_HUB}test_a_hub_that_cannot_be_reached_is_said_with_the_way_to_what_is_cached",
    },
    "_checkpoint/index.py": {
        "download or copy the whole folder again": _MENDED,
        'add "metadata"': _MENDED,
        "load it again when its writer is done": "loading/test_load_peft_on_rank.py::"
        "test_a_base_that_is_written_again_while_it_is_loaded_is_an_error",
        "set it to {}": _MENDED,
        "delete it if it is left over": _MENDED,
        "save or download it again": _MENDED,
        "save or download the index again": _MENDED,
        "save the model again with safetensors": _MENDED,
    },
    "_checkpoint/strict_json.py": {
        "write the file again": _MENDED,
        "check that it is the right file": _MENDED,
    },
    "_checkpoint/weight_files.py": {
        "name a safetensors file or index": _MENDED,
        "delete the one that you do not need": _MENDED,
        "check the path and the variant": _MENDED,
        "convert it once": f"{_INDEX}test_a_pickle_is_refused_with_a_command_that_converts_it",
        "pass the folder that holds the checkpoint": f"{_ADVISED}test_the_folder_of_a_checkpoint_is_passed",
    },
}
