"""The advice about files of checkpoints, and the test that takes each."""

from __future__ import annotations

from .reasons import OUTSIDE

_ADVISED = "checkpoint/test_check_advice.py::"
_MENDED = f"{_ADVISED}test_a_folder_is_sound_once_the_finding_is_mended"
_HASHES = "checkpoint/test_published_hashes.py::"
_SIGNER = "checkpoint/test_signer.py::"
_INDEX = "checkpoint/test_checkpoint_index.py::"
_OTHER = "checkpoint/test_other_things.py::"
_TRAINER = "checkpoint/test_trainer_folder.py::"
_KINDS = "test_named_alike.py::"
_WRITERS = "loading/test_other_writers.py::"
_HUB = "checkpoint/test_checkpoint_hub.py::"

TAKEN: dict[str, dict[str, str]] = {
    "_checkpoint/mlx.py": {
        "write the scale that it was trained": "loading/test_mlx.py::"
        "test_a_scale_of_an_unknown_release_is_written_as_it_was",
        "copy adapters.safetensors again": "loading/test_mlx.py::test_a_dora_without_magnitudes_is_named",
    },
    "_checkpoint/adapter_folder.py": {
        "pass adapter_subfolder=": "loading/test_load_advice.py::test_an_adapter_in_a_subfolder_is_named",
        "Copy or download it": "loading/test_load_advice.py::test_weights_that_are_not_there_are_copied",
        "Convert it once": "loading/test_load_peft_on_rank.py::test_a_pickle_is_refused_with_a_command_that_works",
    },
    "_checkpoint/adapter_config.py": {
        'take "experts" out of target_modules': "loading/test_transposed_experts.py::"
        "test_fused_experts_whose_module_is_named_load_once_their_parameters_are",
        'add "peft_type"': "loading/test_load_advice.py::test_a_method_in_lower_case_or_missing_is_written_as_advised",
        "load it with the library adapters": OUTSIDE,
        "load it with ms-swift": OUTSIDE,
        "add what it was trained for": "loading/test_prompts.py::"
        "test_a_prompt_without_a_task_is_refused_and_loads_with_it",
        "name the modules in a list": "checkpoint/test_pattern_cost.py::test_the_fix_that_the_fault_names_works",
        "load this adapter with peft itself": OUTSIDE,
        "set megatron_core to": _MENDED,
        "correct the number": _MENDED,
    },
    "_checkpoint/adapter_patterns.py": {
        "put {} before {} in the file": "loading/test_load_advice.py::"
        "test_patterns_that_were_sorted_are_put_into_the_order_of_the_training",
        "put {} before {} in rank_pattern": "loading/test_load_advice.py::"
        "test_ranks_that_were_sorted_are_put_into_the_order_of_the_training",
    },
    "_checkpoint/left_over.py": {
        "delete {} from config.json": "loading/test_left_over_quantization.py::"
        "test_every_verb_refuses_it_and_takes_the_weights_once_it_is_deleted"
    },
    "_checkpoint/modelopt.py": {
        "take the checkpoint in 16 bits that it was made of": "checkpoint/test_modelopt.py::"
        "test_plain_weights_are_planned_as_they_are"
    },
    "_checkpoint/unread_codes.py": {
        "pass the folder, whose headers show its weights": "checkpoint/test_unread_codes.py::"
        "test_a_config_without_its_folder_is_refused_and_the_advice_plans_it",
        "take the checkpoint in 16 bits that it was made of": "checkpoint/test_unread_codes.py::"
        "test_plain_weights_are_planned_as_they_are",
        "rename the entry to quantization_config": "checkpoint/test_unread_codes.py::"
        "test_an_entry_that_is_renamed_is_read",
        'add "quantization_config": ': "checkpoint/test_unread_codes.py::"
        "test_the_entry_that_is_advised_plans_the_codes",
    },
    "_checkpoint/base_config.py": {
        "write null without quotes": "loading/test_packed_folders.py::"
        "test_skips_that_are_no_list_of_names_are_refused_and_the_advice_works",
        "correct it, or save the model again": _MENDED,
        "write its config into backbone_config": _MENDED,
        "pass attn_implementation=": "checkpoint/test_base_config.py::test_the_fix_is_the_argument_that_it_names",
        "upgrade transformers, or remove quantization_config": _MENDED,
        "name the modules in it": _MENDED,
    },
    "_checkpoint/faults.py": {"download or copy the file again; the download": _MENDED},
    "_checkpoint/published_hashes.py": {
        "download the file again": f"{_HASHES}test_check_says_how_many_files_were_compared",
        "check the snapshot in the cache": f"{_HASHES}test_check_says_how_many_files_were_compared",
        "pass the public key": f"{_SIGNER}test_the_key_that_signed_is_said",
        "look at them, or remove": f"{_HASHES}test_files_that_nobody_published_are_named",
    },
    "_checkpoint/sha256sums.py": {
        "write it again with `sha256sum`": "checkpoint/test_sha256sums.py::"
        "test_a_list_of_another_form_is_an_error_until_it_is_written_again",
    },
    "_checkpoint/signer.py": {
        "Pass the path of {}": f"{_SIGNER}test_what_is_no_key_is_refused_before_anything_is_read",
        "Run: pip install 'safe-loading[signing]'": OUTSIDE,
        "remove them, or have the model signed again": f"{_SIGNER}"
        "test_files_that_nobody_signed_are_errors_until_they_are_removed_or_signed",
        "download the folder with its {}": f"{_SIGNER}test_a_changed_payload_is_an_error_though_its_hashes_fit",
    },
    "_checkpoint/signing_manifest.py": {
        ", or remove {}": f"{_HASHES}test_a_manifest_of_another_kind_is_an_error",
    },
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
        "run DeepSpeed's `zero_to_fp32.py`": OUTSIDE,
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
    "_checkpoint/other_things.py": {
        "pass {}{}": "loading/test_other_writers.py::test_adapters_in_folders_of_one_that_holds_none_are_named",
        "pass {}, the latest": f"{_OTHER}test_the_latest_checkpoint_of_a_trainer_is_passed",
        "pass its id": f"{_OTHER}test_the_id_in_an_address_is_passed",
        "pass a folder that transformers saved": f"{_OTHER}test_one_file_is_not_its_folder",
        "copy the {} there": f"{_KINDS}test_the_weights_of_mlx_are_read_beside_their_config",
        "pass its folder": f"{_OTHER}test_one_file_is_not_its_folder",
        "load it there, with load_lora_weights": OUTSIDE,
        "convert it with build_lora_adapter": OUTSIDE,
        "Pass that of its base": f"{_WRITERS}test_what_is_no_model_is_named_where_one_is_planned",
        "Pass the folder of a model": "model/test_model_advice.py::test_a_model_is_made_once_the_advice_is_taken",
    },
    "_checkpoint/strict_json.py": {
        "write the file again": _MENDED,
        "save it as UTF-8": _MENDED,
        "check that it is the right file": _MENDED,
    },
    "_checkpoint/trained_beside.py": {
        "load this folder with SentenceTransformer": OUTSIDE,
        "put their values into the base": "loading/test_other_writers.py::"
        "test_weights_beside_an_adapter_are_told_and_run_once_the_base_has_them",
    },
    "_checkpoint/tokenizer_ids.py": {
        "take the base's tokenizer": OUTSIDE,
        "put the tokenizer here": "loading/test_check_as_load.py::"
        "test_a_tokenizer_with_words_beyond_the_rows_is_an_error",
    },
    "_checkpoint/trainer_folder.py": {
        "pass resume_from_checkpoint=": f"{_TRAINER}test_a_trainer_resumes_from_the_one_that_is_named",
        "delete it, and train from the start": f"{_TRAINER}test_of_a_run_without_a_whole_one_the_training_starts_anew",
    },
    "_checkpoint/weight_files.py": {
        "merge these shards with verl": OUTSIDE,
        "convert this model of LitGPT": OUTSIDE,
        "take the files in the format of transformers": OUTSIDE,
        "convert this checkpoint of Megatron": OUTSIDE,
        "run `python zero_to_fp32.py . OUTPUT --safe_serialization`": OUTSIDE,
        "merge these shards with `accelerate merge-weights FOLDER OUTPUT`": "checkpoint/test_checkpoint_index.py::"
        "test_shards_of_torch_are_merged_as_the_advice_says",
        "name a safetensors file or index": _MENDED,
        "delete the one that you do not need": _MENDED,
        "check the path and the variant": _MENDED,
        "pass a folder that transformers saved": f"{_OTHER}test_gguf_files_beside_a_config_are_named",
        "convert it once": f"{_INDEX}test_a_pickle_is_refused_with_a_command_that_converts_it",
        "pass the folder that holds the checkpoint": f"{_ADVISED}test_the_folder_of_a_checkpoint_is_passed",
    },
}
