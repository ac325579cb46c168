"""The advice about models on meta and quantized ones, and the test that takes each."""

from __future__ import annotations

from .reasons import OUTSIDE, PAGE

_ADVISED = "model/test_model_advice.py::"
_MADE = f"{_ADVISED}test_a_model_is_made_once_the_advice_is_taken"
_OTHER_CLASS = f"{_ADVISED}test_a_type_that_only_another_auto_class_knows_is_made_by_that_class"
_NUMBERS = "model/test_quantized_meta_model.py::test_numbers_that_no_kernel_reads_are_refused"
_PLANNED = f"{_ADVISED}test_a_quantization_is_planned_once_the_advice_is_taken"
_ENDED = f"{_ADVISED}test_each_finding_of_a_quantization_ends_by_its_fix"
_FOUR_BITS = f"{_ADVISED}test_four_bits_on_meta_once_the_advice_is_taken"
_KEPT = "model/test_kept_codes.py::"
_DEQUANTIZED = "merging/test_merge_saved_as_plain.py::test_the_advice_to_dequantize_makes_a_plain_checkpoint"
_SOUND = "loading/test_load_advice.py::test_a_base_is_sound_once_the_finding_is_mended"

TAKEN: dict[str, dict[str, str]] = {
    "_model/positions.py": {
        "plan for rows of at most": "model/test_positions.py::"
        "test_rows_beyond_the_positions_are_told_and_shorter_ones_are_not"
    },
    "_model/weights_dtype.py": {
        "pass a floating-point torch.dtype": _MADE,
        "Set it to the dtype of the weights": _MADE,
        "pass dtype=, such as": "model/test_weights_dtype.py::test_the_advice_of_an_assumed_dtype_taken",
        "set model_init_kwargs=": "memory/test_trl_trainers.py::test_the_advice_about_a_trainers_dtype_taken",
    },
    "_model/formats/packed_on_disk.py": {
        "download or copy the folder again": "loading/test_packed_folders.py::"
        "test_weights_of_one_damage_are_one_finding_and_its_advice_works",
        "set {} to true": "loading/test_packed_folders.py::"
        "test_a_config_of_the_other_bits_is_refused_and_the_advice_works",
    },
    "_model/formats/four_bit.py": {
        "merge with merge_lora_inplace": "merging/test_merge_packed.py::"
        "test_codes_in_the_order_for_cpus_are_named_and_saved_right"
    },
    "_model/layout/packed_modules.py": {
        "Load the base in 16 bits that it was made from": "loading/test_compressed_bases.py::"
        "test_experts_whose_global_scale_transformers_leaves_out_are_refused",
        'write "{}" as {} into config.json': "loading/test_compressed_bases.py::"
        "test_codes_under_another_status_are_decoded",
        "write the names that the modules have": "loading/test_packed_modules.py::"
        "test_skips_under_older_names_are_those_of_the_headers",
        "Load the base that it was made from": "loading/test_packed_modules.py::"
        "test_experts_in_codes_of_their_own_layers_are_refused_where_a_model_holds_them_together",
    },
    "_model/layout/reading.py": {
        "leave these ties out": "sharding/test_wrap_fsdp_advice.py::"
        "test_a_script_ties_two_values_of_a_folder_in_a_model_that_has_them",
    },
    "_model/layout/ties.py": {
        "set tie_word_embeddings to false": "loading/test_load_advice.py::"
        "test_two_values_of_a_tied_weight_are_one_or_untied",
        "download the weights": "model/test_ties.py::"
        "test_a_head_that_an_index_lists_counts_where_the_shards_are_elsewhere",
    },
    "_model/layout/fit.py": {
        "Delete the one that is left over": _SOUND,
        "Save the model that is inside the wrapper": _SOUND,
        "Save the model without it": "loading/test_wrapped_names.py::test_the_cause_is_told_and_mended",
        "Save the adapter alone": "loading/test_wrapped_names.py::"
        "test_the_tensors_of_a_whole_peft_model_are_told_and_taken_apart",
        "Pass base_kwargs={'key_mapping': {}}": "loading/test_wrapped_names.py::"
        "test_a_prefix_before_the_names_of_a_base_is_told_and_mapped",
        "Save the checkpoint again": _SOUND,
        "correct the number of layers": _SOUND,
    },
    "_model/layout/tensor_contents.py": {
        "download or copy the file again": f"{_ADVISED}test_values_are_checked_again_once_the_file_is_copied_again",
        "check it again when its writer is done": OUTSIDE,
    },
    "_model/layout/source_model.py": {
        "Run one, or pass the folder": "memory/test_compressed_in_memory.py::"
        "test_codes_of_now_are_not_the_memory_of_a_model_and_the_advice_works",
        "Pass model.to({})": "memory/test_memory_advice.py::test_a_call_works_once_the_advice_is_taken",
    },
    "_model/zero3.py": {
        "Pass the folder that it was loaded from": "model/test_zero3.py::"
        "test_no_figure_is_made_of_weights_that_are_split"
    },
    "_model/meta_model.py": {
        "pass auto_class= for another class": "model/test_meta_model.py::"
        "test_a_class_taken_by_the_type_of_the_model_is_a_finding_that_its_name_ends",
        "Pass auto_class=": _OTHER_CLASS,
        "Read it and pass trust_remote_code=True": _OTHER_CLASS,
        "pass for example AutoModelForCausalLM": _MADE,
    },
    "_model/model_config.py": {
        "Pass the model itself": "sharding/test_diffusers.py::test_a_config_of_diffusers_is_named_and_the_advice_works",
        "Correct it, or delete it": _MADE,
        "Correct the config, or pass the class": _MADE,
        "Read it first": f"{_ADVISED}test_code_that_is_read_and_trusted_runs",
        "Leave trust_remote_code out": f"{_ADVISED}"
        "test_code_of_a_repository_that_fails_is_left_out_where_transformers_has_the_model",
        "Copy the .py files of the repository": f"{_ADVISED}"
        "test_code_of_a_repository_that_transformers_lacks_is_told_with_its_release",
        "Install what it imports": OUTSIDE,
        "Set it to the architecture": _MADE,
        "Pass the folder that it was converted from": OUTSIDE,
        "Pass the folder of its target model": OUTSIDE,
        "take the checkpoint that was converted for transformers": "model/test_meta_model.py::"
        "test_sizes_that_a_class_would_ignore_are_refused_until_they_are_where_it_reads_them",
        "Upgrade transformers if a newer one does": OUTSIDE,
    },
    "_model/module_limit.py": {"Correct the counts": f"{_ADVISED}test_counts_that_are_corrected_make_a_model"},
    "_model/formats/auto_round.py": {"Plan the model that it was made of": _PLANNED},
    "_model/formats/awq.py": {
        "Plan the model that it was made of": _PLANNED,
        "write the paths of the modules from the root": "model/test_quantized_meta_model.py::"
        "test_names_in_part_of_awq_are_said_since_transformers_reads_them_otherwise",
    },
    "_model/formats/convertible.py": {
        "Write the path of the blocks": _PLANNED,
        "Write the number with which": _NUMBERS,
    },
    "_model/formats/gptq.py": {"Plan the model that it was made of": _PLANNED},
    "_model/formats/bitsandbytes.py": {
        "load it with from_pretrained": _DEQUANTIZED,
        "Pass llm_int8_has_fp16_weight=False": _PLANNED,
    },
    "_model/formats/card_findings.py": {
        "pass capability= of the card if it is another one": _ENDED,
        "pass capability= to plan for another one": _ENDED,
        "pass the backend to from_pretrained": OUTSIDE,
        "take a checkpoint in fp8": _ENDED,
        "Use {}": _PLANNED,
    },
    "_model/formats/fbgemm.py": {"Pass capability=(9, 0)": _PLANNED},
    "_model/formats/fp8.py": {
        "Name an accelerator in max_memory": _PLANNED,
        "Plan and load it dequantized": _PLANNED,
        "Take config.json from where": "merging/test_merge_lora_checkpoint_quantized.py::"
        "test_a_block_of_another_form_is_named",
    },
    "_model/formats/mxfp4.py": {
        "Plan and load it dequantized": _PLANNED,
        "Leave quantization_config out": _PLANNED,
    },
    "_model/formats/torchao.py": {
        "pass TorchAoConfig(": _PLANNED,
        "Quantize with Int8WeightOnlyConfig": _PLANNED,
        "leave it out": _PLANNED,
        "Pass capability= of the card": _PLANNED,
        "Plan that": _PLANNED,
    },
    "_model/formats/kept_codes.py": {
        "pass dtype=": f"{_KEPT}test_spqr_is_planned_in_the_dtype_in_which_it_loads",
        "Write {}": f"{_KEPT}test_a_setting_is_planned_as_the_advice_writes_it",
        "name a card": f"{_KEPT}test_what_cannot_be_planned_is_refused_by_name",
        "Plan it for generation": f"{_KEPT}test_what_cannot_be_planned_is_refused_by_name",
    },
    "_model/formats/four_bit_on_meta.py": {
        "Load the model with from_pretrained": _FOUR_BITS,
        "load this model with from_pretrained": "memory/test_plan_sizes.py::"
        "test_layers_with_transposed_weights_are_quantized_too",
        "pass bnb_4bit_quant_storage=": _FOUR_BITS,
    },
    "_model/quantized/kbit_preparation.py": {
        "pass one of": "memory/test_quantized_steps.py::test_whose_preparation_a_step_in_4_bits_begins_with_is_a_word",
        "pass prepare_for_kbit=": PAGE.format("planning"),
    },
    "_model/quantized/patterns.py": {"Write the names of modules": _PLANNED},
    "_model/quantized/request.py": {
        "Write the method of the engine": f"{_ADVISED}test_a_method_that_a_config_does_not_name_is_written_into_it",
        "Leave quantization_config out": _PLANNED,
        "pass a config of transformers": _PLANNED,
    },
    "_model/quantized/stand_ins.py": {
        "put it into torch.nn.Sequential": f"{_ADVISED}test_a_single_quantized_layer_is_put_into_a_sequential"
    },
    "_model/quantized/to_plain.py": {
        "load it with from_pretrained": _DEQUANTIZED,
        "take the one that it was made of": OUTSIDE,
        "save it with save_pretrained": _DEQUANTIZED,
    },
    "_model/quantized_meta_model.py": {
        "Pass attn_implementation=": "memory/test_attention_kernels.py::"
        "test_kernels_that_are_newer_than_the_card_are_refused",
        "pass the folder with its weights": "model/test_weights_dtype.py::"
        "test_a_quantized_name_without_a_quantization_is_told",
        "leave room for it with overhead=": _ENDED,
        "leave room for one weight in float32": _ENDED,
        "take the checkpoint in 16 bits": _PLANNED,
        "plan without quantization_config": "memory/test_quantized_steps.py::"
        "test_a_method_that_quantizes_nothing_is_a_finding",
    },
    "_model/size_limit.py": {"Correct its sizes": f"{_ADVISED}test_sizes_that_are_corrected_are_loaded"},
}
