"""The advice of _loading, and the test that takes each."""

from __future__ import annotations

from .reasons import AS_IT_IS, LABEL, OUTSIDE, VALUES

_ADVISED = "loading/test_load_advice.py::"
_LAYOUTS = "loading/test_expert_layouts.py::"
_MENDED = f"{_ADVISED}test_an_adapter_loads_once_it_is_mended"
_SOUND = f"{_ADVISED}test_a_base_is_sound_once_the_finding_is_mended"
_ARGUMENTS = f"{_ADVISED}test_arguments_of_other_names_have_one_here"
_SWAPPED = f"{_ADVISED}test_what_cannot_be_swapped_in_has_a_name_of_its_own"
_STARTS = "loading/test_methods.py::"
_LOADS = "loading/test_load_peft_on_rank.py::"
_ORDER = "loading/test_base_and_adapter.py::test_a_single_argument_is_the_adapter"
_DISK = "merging/test_merge_lora_checkpoint"
_OPTIONS = f"{_DISK}_options.py::"

TAKEN: dict[str, dict[str, str]] = {
    "_loading/adapter_file.py": {
        "save the adapter again; dequantize": _MENDED,
        "take an earlier checkpoint": _MENDED,
        "pass adapter_dtype=torch.bfloat16": f"{_ADVISED}test_factors_of_8_bits_are_cast",
        "pass another adapter_dtype=": f"{_ADVISED}test_values_that_a_dtype_does_not_hold_are_cast_to_another",
        "save it again with save_pretrained of the PeftModel": OUTSIDE,
        "train it again with a method": "memory/test_audit_users_models.py::test_a_method_that_adapts_no_layer",
        "check that the adapter was trained": OUTSIDE,
        "save it again, gathered": OUTSIDE,
        "Load it again when its writer": OUTSIDE,
    },
    "_loading/allocation_limit.py": {
        "Correct its numbers": "loading/test_hostile_configs.py::"
        "test_an_adapter_allocates_in_proportion_to_its_file_and_its_base"
    },
    "_loading/inject.py": {
        ", or set megatron_config to null": f"{_ADVISED}"
        "test_a_package_that_an_adapter_needs_is_told_with_the_field_that_asks_for_it",
        "Load or merge it with transformers 4": OUTSIDE,
        "Make it again over the adapters": f"{_ADVISED}test_a_saved_router_is_made_again_over_its_adapters",
        "Load the base, call resize_token": "loading/test_vocabularies.py::"
        "test_a_trained_row_that_the_base_lacks_is_told",
        "pass the one that it was trained on": f"{_ADVISED}"
        "test_a_config_that_selects_nothing_is_told_by_the_layers_of_its_file",
        "correct {} in adapter_config": f"{_ADVISED}"
        "test_a_config_that_selects_nothing_is_told_by_the_layers_of_its_file",
        "Leave is_trainable=True out": f"{_STARTS}test_a_prompt_whose_encoder_is_in_no_file_is_not_trained",
        "choose another": VALUES,
        "run one, and load the adapter then": "loading/test_compressed_bases.py::"
        "test_a_loaded_base_takes_an_adapter_after_its_first_forward_pass",
        "Use load_adapter_on_rank": f"{_ADVISED}test_the_first_adapter_is_loaded_by_the_other_function",
        "Use load_peft_on_rank": f"{_ADVISED}test_the_first_adapter_is_loaded_by_the_other_function",
        "add one by its own": f"{_ADVISED}test_a_base_of_a_peft_model_and_one_of_transformers_name_the_way_to_the_next_"
        "adapter",
        "pass that one to load_adapter": f"{_ADVISED}test_a_base_of_a_peft_model_and_one_of_transformers_name_the_way_"
        "to_the_next_adapter",
    },
    "_loading/split_base.py": {
        "Load it onto the whole base": "loading/test_load_onto_sharded_base.py::"
        "test_an_adapter_that_reads_the_weights_is_refused_and_loads_before_they_are_sharded",
        "call wrap_fsdp_meta_safe(model)": "loading/test_load_onto_sharded_base.py::"
        "test_the_advice_shards_it_and_its_gradients_are_those_of_all_rows",
        "Load it with PeftModel.from_pretrained": "model/test_zero3.py::"
        "test_an_adapter_that_takes_weights_of_a_split_base_is_left_to_peft",
    },
    "_loading/check_as_load.py": {
        "save it again with `save_pretrained`": _SOUND,
        "pass base_model=": "loading/test_check_as_load.py::"
        "test_an_adapter_is_checked_with_its_base_where_that_is_there",
    },
    "_loading/attach.py": {
        "Load it with a base of its own": "loading/test_load_adapter_on_rank.py::"
        "test_tokens_of_a_module_that_another_adapter_has_a_copy_of_are_refused",
    },
    "_loading/experts.py": {
        "correct r and rank_pattern": "loading/test_experts.py::test_a_rank_that_the_config_contradicts_is_refused",
        ", or save the adapter again": _MENDED,
    },
    "_loading/fused_layouts.py": {
        'write "{}": "{}" into': "loading/test_expert_layouts.py::"
        "test_the_order_in_which_unsloth_packed_experts_is_asked_for",
        "pass the base that the adapter": f"{_LAYOUTS}test_a_base_of_other_sizes_is_refused_and_the_right_one_taken",
        ", or correct r": f"{_LAYOUTS}test_a_rank_of_all_experts_that_the_config_contradicts_is_refused",
        "write the peft_version": f"{_LAYOUTS}test_square_experts_without_a_version_are_refused",
    },
    "_loading/base_arguments.py": {
        "use device=": _ARGUMENTS,
        "use dtype=": _ARGUMENTS,
        "use base_revision=": _ARGUMENTS,
        "use base_subfolder=": _ARGUMENTS,
        "use auto_class=": _ARGUMENTS,
        "use allow_pickle=": f"{_OPTIONS}test_a_pickled_adapter_is_read_when_the_argument_of_the_error_is_passed",
        "leave it out": _ARGUMENTS,
        "leave {} out": AS_IT_IS,
        "pass a floating-point torch.dtype": "loading/test_base_arguments.py::test_dtypes_and_classes_by_name",
        "pass for example transformers.AutoModelForCausalLM": "loading/test_base_arguments.py::"
        "test_dtypes_and_classes_by_name",
        "Pass auto_class=": "loading/test_other_heads.py::"
        "test_a_class_of_another_package_is_named_where_that_of_transformers_has_no_such_layer",
        "Pass the class of the base": "loading/test_base_arguments.py::test_dtypes_and_classes_by_name",
        "Pass the folder of that part of the base alone": (
            "loading/test_base_arguments.py::test_a_tower_is_loaded_and_merged_from_a_folder_of_its_own"
        ),
        "correct or leave out": "loading/test_base_arguments.py::test_a_typo_is_named_with_what_is_near",
        "pass the fields of the config that differ": "loading/test_base_arguments.py::"
        "test_a_config_that_is_passed_is_the_one_of_the_check_and_of_the_load",
        "pass a config of transformers": "loading/test_base_arguments.py::"
        "test_what_transformers_would_ignore_or_knows_no_more_is_answered_with_its_place",
    },
    "_loading/base_model.py": {
        "Pass the base that the adapter was trained on, or auto": f"{_ADVISED}"
        "test_the_class_that_a_base_was_saved_as_is_passed",
    },
    "_loading/load_base.py": {
        "Load it decoded": "loading/test_compressed_decode.py::"
        "test_a_base_that_cannot_stay_packed_is_refused_with_a_load_that_decodes_it",
        "load the base decoded": "loading/test_compressed_decode.py::"
        "test_codes_that_no_name_of_the_config_reaches_are_refused",
        "take the base in 16 bits that it was made from": "loading/test_compressed_decode.py::"
        "test_experts_that_transformers_alone_decodes_wrongly_or_not_at_all",
        "Load the base decoded": "loading/test_compressed_bases.py::"
        "test_packed_layers_are_refused_before_the_base_is_read_and_the_advice_works",
        "Free some, or raise the process's limit": "loading/test_into_place.py::"
        "test_where_the_memory_is_full_that_is_said_nothing_stays_and_a_later_load_is_whole",
        "Ask for what needs none of them": "loading/test_base_arguments.py::"
        "test_a_package_that_the_attention_needs_is_named_and_not_the_config",
        "pass the base that the adapter was trained on, or auto": f"{_ADVISED}"
        "test_the_class_that_a_base_was_saved_as_is_passed",
        "leave device_map= out": "model/test_zero3.py::test_onto_an_accelerator_no_device_map_is_asked_for",
    },
    "_loading/check_checkpoint.py": {"convert it once": f"{_LOADS}test_a_pickle_is_refused_with_a_command_that_works"},
    "_loading/adapter_findings.py": {
        "correct {} to what it was trained with": "checkpoint/test_check_advice.py::"
        "test_a_folder_is_sound_once_the_finding_is_mended",
        "save the adapter again": _MENDED,
        "pass base_model=": f"{_ADVISED}test_a_base_that_no_config_names_is_passed",
    },
    "_loading/folder_findings.py": {
        "save the model that is inside the wrapper": _SOUND,
        "delete the one that is left over": _SOUND,
        "delete those that are not needed": _SOUND,
        "read them before you pass": OUTSIDE,
        "copy the model's config.json here": _SOUND,
        'set "model_type"': _SOUND,
        "keep the adapter in a folder": f"{_ADVISED}test_an_adapter_beside_a_base_gets_a_folder_of_its_own",
    },
    "_loading/choose_class.py": {
        "leave it out, or pass": "loading/test_old_names.py::test_the_error_names_the_class_with_which_all_fits",
        ") name a class that loads the base. Pass": f"{_OPTIONS}test_the_class_that_the_error_asks_for_can_be_passed",
    },
    "_loading/hot_swap.py": {
        "Load it onto a new base": f"{_STARTS}test_a_swap_between_starts_is_refused",
        "Call model.unmerge_adapter()": f"{_ADVISED}test_a_swap_of_another_dtype_and_of_a_merged_adapter",
        "Load it under another name": _SWAPPED,
        "load it under another name": _SWAPPED,
        "pass adapter_dtype=": f"{_ADVISED}test_a_swap_of_another_dtype_and_of_a_merged_adapter",
    },
    "_loading/key_names.py": {
        "keep one of them": _MENDED,
        "pass a mapping of regular": "loading/test_old_names.py::test_a_key_mapping_that_is_none_is_refused",
        "Correct it, or leave": "loading/test_old_names.py::test_a_key_mapping_that_is_none_is_refused",
    },
    "_loading/load.py": {
        "load it under another name": "loading/test_load_adapter_on_rank.py::"
        "test_an_adapter_with_the_name_of_modules_is_told_as_peft_saves_others_without_them",
        "call torch.accelerator.set_device_index": "loading/test_contexts_on_cuda.py::"
        "test_the_device_of_a_rank_is_made_current",
        "Move the adapter's files": f"{_ADVISED}test_an_adapter_beside_a_base_gets_a_folder_of_its_own",
        "add the modules": "loading/test_load_onto_device_map.py::test_what_contradicts_a_map_is_refused",
    },
    "_loading/load_adapter_on_rank.py": {
        "check the arguments": LABEL,
        "load the adapter": LABEL,
        "leave both arguments out": AS_IT_IS,
        "Call model.delete_adapter": "loading/test_mixed_models.py::"
        "test_what_a_mixed_model_cannot_do_is_refused_and_names_what_can",
        "Call model.unmerge_adapter()": "loading/test_load_adapter_on_rank.py::"
        "test_nothing_is_loaded_beside_a_merged_adapter",
        "Choose another name, call model.delete": f"{_ADVISED}test_each_way_out_of_a_name_that_is_taken",
        "Leave device out": AS_IT_IS,
    },
    "_loading/base_and_adapter.py": {
        "pass the base and the adapter": _ORDER,
        "leave one of the three out": _ORDER,
        "pass the adapter for this": _ORDER,
    },
    "_loading/load_peft_on_rank.py": {
        "pass the map of several": "loading/test_base_and_adapter.py::test_a_map_is_no_device",
        "pass a folder or hub id, or a mapping": VALUES,
        "check the arguments": LABEL,
        "check the adapter against its base": LABEL,
        "pass {name: folder": VALUES,
        "Pass its name; for several": "loading/test_base_arguments.py::"
        "test_several_active_adapters_as_the_refusal_says",
        "Leave device out": "loading/test_load_onto_device_map.py::"
        "test_a_base_over_several_devices_gets_each_tensor_beside_its_layer",
        "leave it out": AS_IT_IS,
        "Pass the folder or id of the base": "loading/test_load_onto_device_map.py::"
        "test_a_base_over_several_devices_gets_each_tensor_beside_its_layer",
        "Pass device='{}'": "loading/test_load_on_simulated_devices.py::test_a_base_on_another_device_is_refused",
    },
    "_loading/match.py": {
        "set {} to true in adapter_config.json": _MENDED,
        'write "{}" in its place': "loading/test_other_writers.py::"
        "test_a_lora_of_a_tied_head_under_the_name_of_the_embedding_is_told",
        "remove all tensors of the base": "loading/test_other_writers.py::"
        "test_the_tensors_of_a_whole_model_load_once_those_of_the_base_are_removed",
        "pass strict=False to load it with 0": "loading/test_other_writers.py::"
        "test_biases_of_single_layers_load_once_the_advice_is_taken",
        "pass key_mapping={'\\.lora_down": "loading/test_other_writers.py::test_names_of_kohya_beside_a_config_of_peft",
        "set {} to false in adapter_config.json if": _MENDED,
        "pass the base that the adapter": _MENDED,
        ", or correct r and rank_pattern": _MENDED,
        "Save it again, gathered": "loading/test_load_advice.py::test_the_rows_of_one_rank_are_gathered",
        "load it onto a base of its own": f"{_STARTS}test_projections_that_differ_from_the_shared_ones_are_refused",
        "load the base with dtype=": f"{_LOADS}test_the_check_before_the_load_knows_the_dtype",
        "load the base with dtype={} to keep": "loading/test_saved_module_dtype.py::test_the_advice_keeps_it_as_it_is",
        "add {} to modules_to_save": _MENDED,
        "write {} into the file": "loading/test_other_heads.py::"
        "test_a_lora_inside_a_saved_head_is_told_and_loads_once_it_is_summed",
        "save the adapter again with save_pretrained, or take": _MENDED,
        "load the base yourself, call": f"{_LOADS}test_a_resized_vocabulary_says_how_to_resize",
        "load the base with a head of that many labels": "loading/test_other_heads.py::"
        "test_a_number_of_labels_that_the_adapter_contradicts_is_refused_with_the_right_one",
        "add the module to target_modules": _MENDED,
        ", or save the adapter again": _MENDED,
        "load the base, call attach_head": "wrapping/test_attach_head.py::"
        "test_a_head_of_several_layers_that_was_loaded_without_is_told",
    },
    "_loading/peft_config.py": {
        "upgrade peft": _MENDED,
        "Upgrade peft": OUTSIDE,
        "Write it as": "loading/test_load_advice.py::test_a_method_in_lower_case_or_missing_is_written_as_advised",
        "Pass the base that it was trained on": "loading/test_check_as_load.py::"
        "test_targets_of_another_base_are_named_before_it_is_read",
    },
    "_loading/prompts.py": {
        "Pass the base that it was trained on": "loading/test_prompts.py::"
        "test_a_prefix_of_another_number_of_layers_is_refused",
    },
    "_loading/agreed_sources.py": {
        "look for the folders": LABEL,
        "read the adapter": LABEL,
        "pass the same to all ranks": "loading/test_load_on_ranks.py::"
        "test_some_ranks_or_one_can_load_without_the_others",
        "Pin base_revision=": OUTSIDE,
        "Pin the revision": OUTSIDE,
    },
    "_loading/sources.py": {
        "pass the base that it names": "loading/test_sources.py::test_a_raw_base_in_the_place_of_a_merged_one_is_told",
        "pass the model that was saved without that part": "loading/test_sources.py::"
        "test_a_base_that_has_what_a_start_took_out_of_it_is_told_and_the_rest_is_not",
        "Pass base_model=.": f"{_ADVISED}test_a_base_that_no_config_names_is_passed",
        "pass a folder or a hub id": VALUES,
        "Load that model with {}": "loading/test_other_writers.py::test_a_model_of_another_library_is_passed",
        "Pass base_model= and base_revision=": "loading/test_hostile_configs.py::"
        "test_a_revision_in_an_adapters_config_names_no_path",
    },
    "_loading/starts.py": {
        "convert it to a plain LoRA": f"{_STARTS}test_the_conversion_that_the_error_names_works",
        "load it onto a base of its own": f"{_STARTS}"
        "test_a_start_that_would_change_the_base_again_is_refused_and_undone",
        "Load it onto a base of its own": f"{_STARTS}test_another_replication_of_layers_is_refused",
        "Load it where there is one, and there": f"{_STARTS}test_the_conversion_that_the_error_names_works",
        ", or pass strict=False": f"{_STARTS}test_a_start_that_cannot_be_repeated_is_an_error",
        "load the base again where its own": OUTSIDE,
    },
}
