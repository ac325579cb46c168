"""The advice of _merging, and the test that takes each."""

from __future__ import annotations

from .reasons import AS_IT_IS, LABEL, OUTSIDE, VALUES

_MERGES = "merging/test_merge_advice.py::"
_SAVED = "merging/test_merge_saved_as_plain.py::"
_DISK = "merging/test_merge_lora_checkpoint"
_MEMORY = "merging/test_merge_lora_inplace"
_RANKS = f"{_MEMORY}_ranks.py::"
_OPTIONS = f"{_DISK}_options.py::"
_CODES = f"{_DISK}_codes.py::"

_VERIFIED = "merging/test_verify_merge.py::"

TAKEN: dict[str, dict[str, str]] = {
    "_merging/disk/compare_changed_files.py": {
        "copy the files of the base or the adapter": "merging/test_verify_merge_mistakes.py::"
        "test_a_file_beside_the_weights_that_changed_is_named",
    },
    "_merging/disk/compare_small_files.py": {
        "write the entries so": f"{_VERIFIED}test_the_files_beside_the_weights",
        "copy {} from the base or the adapter": f"{_VERIFIED}test_the_files_beside_the_weights",
        "copy the adapter's": f"{_VERIFIED}test_the_files_beside_the_weights",
    },
    "_merging/disk/compare_tokenizers.py": {
        "copy the tokenizer of the base or the adapter": "merging/test_verify_merge_tokenizers.py::"
        "test_other_ids_are_named",
    },
    "_merging/disk/compare_verdicts.py": {
        "merge again": f"{_VERIFIED}test_a_stale_shard_is_named",
        "pass the base first and the merged folder last": f"{_VERIFIED}"
        "test_base_and_merge_in_each_other_s_place_are_told",
    },
    "_merging/verify_merge.py": {
        'pass "adapter", "base"': VALUES,
        "Pass the one that the merge wrote": "test_named_alike.py::test_the_folder_of_an_adapter_is_taken_or_named",
        "Pass the folder that it was made from": "merging/test_verify_merge_codes.py::"
        "test_a_folder_in_another_format_than_its_base_is_refused",
    },
    "_merging/disk/base.py": {
        "Merge into the base that it was made from, and quantize": f"{_DISK}_quantized.py::"
        "test_bitsandbytes_becomes_what_the_merge_in_memory_makes",
        "Leave it out; or pass dequantize=True": f"{_CODES}test_a_dtype_is_for_plain_outputs",
    },
    "_merging/disk/changes.py": {
        "Load the model, merge it with merge_lora_inplace": f"{_DISK}_orders.py::"
        "test_an_init_of_rows_that_alternate_with_others_is_refused_with_a_way_that_works"
    },
    "_merging/disk/collect_edits.py": {
        "Load the base, call resize_token_embeddings": "merging/test_merge_resized_vocabularies.py::"
        "test_trained_rows_that_the_base_lacks_need_a_base_that_has_them",
        "Merge one of them": f"{_MERGES}test_of_two_adapters_that_train_one_token_one_is_merged",
    },
    "_merging/disk/find_changes.py": {
        "Give it the weight 1": f"{_OPTIONS}test_what_cannot_be_multiplied_is_refused",
        "Keep the adapter": AS_IT_IS,
        "Load it with load_peft_on_rank, give each layer": f"{_MEMORY}.py::"
        "test_layers_that_are_repeated_are_merged_once_each_has_its_own_weights",
        "Load it with load_peft_on_rank, merge": "merging/test_merge_other_methods.py::"
        "test_what_is_not_merged_on_disk_is_refused_with_the_way_in_memory",
        "Convert it to a plain LoRA": f"{_MERGES}test_an_adapter_of_a_random_start_is_merged_once_it_is_converted",
    },
    "_merging/disk/kept_format.py": {
        "Pass dequantize=True": f"{_CODES}test_what_codes_cannot_take_is_refused_and_a_plain_output_takes_it"
    },
    "_merging/disk/output_model.py": {
        "Keep the adapter: load the base": "merging/test_merge_resized_vocabularies.py::"
        "test_what_transformers_cannot_save_is_merged_in_memory_alone",
        "Save the adapter with this module": f"{_DISK}_outputs.py::"
        "test_a_lora_on_a_resized_embedding_needs_both_weights",
        "Load it, merge it": f"{_MERGES}test_a_base_that_cannot_be_built_on_meta_is_merged_in_memory",
    },
    "_merging/disk/quantized_base.py": {
        "Merge into the base that it was made from, whose": f"{_DISK}_quantized.py::"
        "test_codes_that_nobody_merges_into_have_one_road",
        "Load it, call merge_lora_inplace(dequantize=True)": f"{_SAVED}"
        "test_what_is_dequantized_in_memory_is_saved_as_a_plain_model",
    },
    "_merging/disk/sources.py": {
        "pass a folder or hub id, or several": VALUES,
        "pass a list of one number": f"{_OPTIONS}test_weights_multiply_what_adapters_add_as_set_scale_of_peft_does",
        "Name it once": f"{_OPTIONS}test_the_same_adapter_twice_is_refused_and_the_weight_that_is_advised_doubles_it",
    },
    "_merging/disk/write_codes.py": {"Look at the base and at the adapter": OUTSIDE},
    "_merging/disk/write_tensors.py": {
        "Look at the base and at the adapter": f"{_OPTIONS}"
        "test_the_dtype_that_the_error_asks_for_makes_the_merge_possible"
    },
    "_merging/disk/tokenizer_ids.py": {
        "Pass tokenizer='base'": f"{_OPTIONS}test_a_trained_tokenizer_with_words_beyond_the_rows_is_refused",
        "add {} to eos_token_id in {} of the output": f"{_DISK}_tokenizers.py::"
        "test_an_end_at_which_nothing_stops_is_told_and_can_be_written",
    },
    "_merging/merge_lora_checkpoint.py": {
        'pass "adapter", "base"': f"{_OPTIONS}test_a_trained_tokenizer_wins_unless_the_base_is_chosen",
        "pass at least one byte": VALUES,
        "pass torch.bfloat16, torch.float16": VALUES,
    },
    "_merging/merge_lora_inplace.py": {
        "merge them too, or call unmerge_adapter": "merging/test_merge_lora_inplace.py::"
        "test_an_active_adapter_that_is_not_merged_is_told",
        "call unmerge_adapter() before": f"{_MERGES}test_a_dora_is_merged_once_the_others_are_unmerged",
        "pass a number of bytes": VALUES,
        "name each adapter once": VALUES,
        "Pass a peft.PeftModel": f"{_MEMORY}.py::test_a_peft_model_is_what_load_peft_on_rank_returns",
        "Pass the model in it": "merging/test_merge_hooks.py::test_a_model_in_a_wrapper_of_torch_is_named",
    },
    "_merging/weights/apply.py": {
        "Call it again with the same arguments": f"{_MEMORY}.py::"
        "test_ctrl_c_finishes_the_layer_and_a_second_call_the_rest",
        "Free memory, and call it again": f"{_MEMORY}.py::"
        "test_when_the_memory_runs_out_between_weights_the_rest_can_be_merged_later",
        "load the base anew": OUTSIDE,
    },
    "_merging/weights/check_merge.py": {
        "check the merge": LABEL,
        "Load the model without offloading": f"{_MEMORY}_offload.py::test_one_of_two_tied_weights_on_disk_is_refused",
        "Give each its own before the merge": f"{_MEMORY}.py::"
        "test_layers_that_are_repeated_are_merged_once_each_has_its_own_weights",
        "Save the adapter, and merge it into the unsharded": f"{_RANKS}test_a_shard_becomes_what_one_process_makes",
        "Name one of them in adapter_names": f"{_MERGES}test_of_two_copies_of_a_module_one_is_named",
    },
    "_merging/weights/dequantize.py": {"Keep it as an adapter": AS_IT_IS},
    "_merging/weights/other_tuners.py": {
        "Merge one of them": "merging/test_merge_other_methods.py::"
        "test_adapters_that_peft_runs_otherwise_than_it_merges_them_are_refused",
        "Keep the adapter": AS_IT_IS,
        "save the adapter and merge it with merge_lora_checkpoint": f"{_DISK}.py::"
        "test_every_kind_is_bit_for_bit_the_merge_in_memory",
    },
    "_merging/weights/lora_layers.py": {
        "Write the trained rows into the embedding": "merging/test_merge_tokens_of_ties.py::"
        "test_a_head_with_a_lora_around_trained_tokens_is_refused_with_a_road",
        "Merge before the model is sharded": OUTSIDE,
        "Call .contiguous()": f"{_MERGES}test_a_convolution_of_other_strides_is_merged_once_it_is_contiguous",
        "Leave it out of target_modules": AS_IT_IS,
        "Call model.set_adapter(...) again": f"{_MERGES}"
        "test_attention_whose_parts_have_other_adapters_is_merged_once_they_are_set_again",
        "Keep the adapter, or give it one of zeros": f"{_MERGES}"
        "test_a_layer_that_is_given_a_bias_takes_that_of_an_adapter",
        "Keep the adapter": AS_IT_IS,
        "Merge that one last": f"{_MERGES}test_what_has_a_bias_is_merged_after_a_dora",
        "Merge what ZeRO-3 has spread": f"{_MERGES}test_what_zero_3_has_spread_is_merged_once_it_is_gathered",
        "Load the adapter onto the base": f"{_MERGES}test_a_base_of_another_shape_is_refused_and_its_own_is_merged",
    },
    "_merging/weights/packed_base.py": {
        "merge it into the base that it names": "merging/test_merge_packed.py::"
        "test_an_adapter_of_a_packed_base_is_told_of_the_two_merges",
    },
    "_merging/weights/merge_plan.py": {
        "Put a copy of it": f"{_MEMORY}.py::test_a_module_at_two_places_of_which_one_is_adapted",
        "Keep the adapter": AS_IT_IS,
        "Keep the adapter beside the base": AS_IT_IS,
        "Run a forward pass before the merge": "merging/test_merge_compressed.py::"
        "test_another_method_is_merged_once_a_forward_pass_has_decoded_the_weights",
        "Merge with dequantize=True": f"{_MEMORY}_quantized.py::"
        "test_lora_bias_is_refused_where_peft_forgets_its_scaling",
        "Call model.unmerge_adapter() first": f"{_MERGES}test_a_dora_is_merged_once_the_others_are_unmerged",
        "Load the adapter before the model is dispatched": f"{_MEMORY}_offload.py::"
        "test_an_offloaded_model_becomes_the_same_bits_and_no_file_is_written_through",
    },
    "_merging/weights/offloaded.py": {
        "keep the folder as long": AS_IT_IS,
        "Free some, or load": OUTSIDE,
        "make room and call merge_lora_inplace again": f"{_MEMORY}_offload.py::"
        "test_a_full_disk_keeps_the_layer_and_a_second_call_merges_the_rest",
    },
    "_merging/weights/peft_merge.py": {},
    "_merging/weights/shared_weights.py": {
        "Save the adapter, and merge it with merge_lora_checkpoint": f"{_DISK}_outputs.py::"
        "test_an_adapter_of_one_of_two_tied_weights_unties_them",
        "Give it memory of its own first": f"{_MEMORY}_quantized.py::"
        "test_an_fp8_weight_that_another_module_shares_is_refused_with_a_fix_that_works",
        "Free some": OUTSIDE,
    },
    "_merging/weights/trainable_tokens.py": {
        "Merge one of them": f"{_MERGES}test_of_two_adapters_that_train_one_token_one_is_merged"
    },
    "_merging/weights/variants.py": {
        "Merge into the base before it is quantized": f"{_DISK}_quantized.py::"
        "test_codes_that_nobody_merges_into_have_one_road",
        "Load the model without offloading": f"{_MEMORY}_quantized.py::test_dequantized_and_rounded_once",
        "Leave it out of target_modules": AS_IT_IS,
        "Keep adapter {} as an adapter": AS_IT_IS,
        "Keep the adapter": AS_IT_IS,
    },
    "_merging/weights/writable_tensors.py": {
        "Merge before the model is sharded": OUTSIDE,
        "Dequantize the model first": f"{_MERGES}test_what_is_dequantized_first_is_merged",
        "Call this in torch.inference_mode()": f"{_MERGES}test_a_model_of_inference_mode_is_merged_in_it",
        "Load the model without offloading": f"{_MEMORY}_offload.py::test_one_of_two_tied_weights_on_disk_is_refused",
        "Load the weights first": f"{_MERGES}test_weights_on_meta_are_merged_once_they_are_loaded",
    },
}
