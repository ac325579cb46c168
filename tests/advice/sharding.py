"""The advice about sharding, and the test that takes each."""

from __future__ import annotations

from .reasons import LABEL, OUTSIDE

_ADVISED = "sharding/test_wrap_fsdp_advice.py::"
_SHARDED = f"{_ADVISED}test_a_model_is_sharded_once_the_advice_is_taken"
_THREADS = "sharding/test_wrap_fsdp_threads.py::"
_OPTIMIZER = f"{_ADVISED}test_an_optimizer_is_made_after_the_wrap"
_WRAP = "sharding/test_wrap_fsdp_meta_safe"
_PEFT = f"{_WRAP}_peft.py::test_an_adapter_starts_and_trains_as_in_one_process"
_PREPARE = "sharding/test_load_at_prepare_advice.py::test_the_advice_is_right"
_PARTS = "sharding/test_tensor_parallel.py::"
_ROADS = f"{_PARTS}test_the_roads_are_right"
_AFTER = f"{_WRAP}_afterwards.py::"

TAKEN: dict[str, dict[str, str]] = {
    "_sharding/accelerate_findings.py": {
        "pass version={}": "sharding/test_accelerate_findings.py::test_what_accelerate_was_told_is_compared",
        "pass mp_policy=": "sharding/test_accelerate_findings.py::test_a_report_has_what_is_found_and_the_fix_is_right",
    },
    "_sharding/accelerate_settings.py": {"load this model outside of it": _PREPARE, "Use FSDP2 with": _PREPARE},
    "_sharding/adapter_methods.py": {
        "Train it on one device": f"{_THREADS}"
        "test_the_lora_of_a_tied_head_cannot_be_trained_apart_from_that_of_the_embeddings",
        "Train a LoraConfig": "memory/test_forecast_every_method.py::"
        "test_adalora_of_a_task_cannot_run_on_shards_and_the_roads_can",
        "Save the adapter with save_pretrained": f"{_AFTER}"
        "test_merges_that_would_be_lost_are_refused_and_the_road_is_right",
        "Use version=2": _SHARDED,
    },
    "_sharding/added_after_wrap.py": {
        "Attach this adapter first": _PEFT,
        "Attach the adapter first": _PEFT,
        "attach it first": _PEFT,
        "Attach to these before the first forward pass": _PEFT,
        "leave this call out": f"{_ADVISED}test_a_model_that_is_wrapped_is_not_wrapped_again",
    },
    "_sharding/agree.py": {
        "name what differs": LABEL,
        "Build it the same way on every rank": f"{_WRAP}.py::test_everything_equals_one_process",
    },
    "_sharding/assert_optimizer_sharded.py": {"pass a torch optimizer": _OPTIMIZER, "Make it after": _OPTIMIZER},
    "_sharding/buffers.py": {
        "Give {} a method reset_buffers()": "sharding/test_sharding_buffers.py::test_both_remedies_of_the_error_work",
        "Load the two with load_peft_on_rank": f"{_THREADS}"
        "test_trained_rows_of_a_folder_are_wrapped_over_a_base_with_weights",
    },
    "_sharding/checkpoint_folder.py": {"copy the same files": OUTSIDE},
    "_sharding/open_source.py": {
        "Pass the checkpoint that the model was built from": "sharding/test_open_source.py::"
        "test_new_parameters_are_named_by_the_caller",
        "Load the folder on every rank": "sharding/test_packed_under_fsdp.py::"
        "test_a_packed_folder_is_loaded_and_then_wrapped",
    },
    "_sharding/checks.py": {
        "make the optimizer after": _OPTIMIZER,
        "wrap the {}, so that both are in it": f"{_ADVISED}test_a_model_is_wrapped_with_all_that_shares_its_weights",
        "build the model with dtype={}": "sharding/test_kept_precision.py::"
        "test_a_policy_that_casts_what_a_class_keeps_is_told",
    },
    "_sharding/four_bit.py": {
        "Pass the folder of the checkpoint": "sharding/test_four_bit.py::"
        "test_codes_statistics_and_a_step_are_those_of_a_base_that_was_loaded_whole"
    },
    "_sharding/fsdp1.py": {
        "pass a bool or a CPUOffload": _SHARDED,
        "call .contiguous()": _SHARDED,
        "load the base with {}": f"{_WRAP}_fsdp1.py::test_four_bit_weights_kept_in_bytes_are_refused_with_the_way_out",
    },
    "_sharding/fsdp2.py": {
        "pass MixedPrecisionPolicy(": _SHARDED,
        "pass a bool or an OffloadPolicy": _SHARDED,
        "pass it in ignored_params=": _SHARDED,
        "call .contiguous()": _SHARDED,
        "wrap the plain model": f"{_PARTS}test_what_transformers_has_split_is_refused_and_the_road_is_right",
    },
    "_sharding/fsdp_units.py": {
        "wrap names what the model does not have": LABEL,
        "wrap names containers": _SHARDED,
        "cast them, or pass {}auto_wrap_policy=": _SHARDED,
        "pass classes, names or patterns": _SHARDED,
        "pass classes, or names of classes": _SHARDED,
    },
    "_sharding/later_values.py": {"Attach an adapter whose values come from the base": _PREPARE},
    "_sharding/load_at_prepare.py": {
        "pass 'off', 'structure' or 'bytes'": _SHARDED,
        "Put the call that makes the model": "sharding/test_load_at_prepare_block.py::"
        "test_a_block_around_the_wrong_lines_is_told",
    },
    "_sharding/mesh.py": {
        "pass (shards,)": _SHARDED,
        "Use version=2": f"{_WRAP}.py::test_replicas_are_sent_their_part_once",
        "Make them the same": "sharding/test_load_at_prepare_advice.py::test_a_mesh_and_a_device_are_made_the_same",
        "pass a DeviceMesh": _SHARDED,
        "Leave {} out, and FSDP shards them": _ROADS,
        "take version=2": _ROADS,
        "Make it with init_device_mesh": _ROADS,
        "make it with init_device_mesh": _ROADS,
    },
    "_sharding/new_values.py": {
        "Load them on rank 0": "sharding/test_unsaved_parameters.py::"
        "test_an_adapter_inside_a_users_module_is_read_from_its_folder",
        "Attach it to a base with weights": _PEFT,
        "Load the two with load_peft_on_rank": "sharding/test_wrap_fsdp_advice.py::"
        "test_an_adapter_that_changed_its_base_is_wrapped_with_it",
    },
    "_sharding/parameters.py": {
        "pass modules, parameters": _SHARDED,
        "make them one parameter": f"{_THREADS}test_parameters_that_share_their_memory_are_made_one",
        "remove the hook": "sharding/test_parameter_notes.py::test_hooks_on_gradients_are_refused_by_name",
        "call the optimizer's step()": "sharding/test_parameter_notes.py::test_gradients_are_refused_by_name",
    },
    "_sharding/prepare.py": {
        "launch with `accelerate launch": "sharding/test_launched_scripts.py::"
        "test_the_script_of_the_tutorial_gives_what_it_gives_without_the_line",
        "call prepare once for each": _PREPARE,
        "use its auto_wrap_policy": "sharding/test_load_at_prepare.py::test_a_sample_of_trainers_equals_its_plain_runs",
    },
    "_sharding/run.py": {
        "make the device mesh": LABEL,
        "read the headers": LABEL,
        "make room for the shards": LABEL,
        "read the weights": LABEL,
        "check the wrapped model": LABEL,
        "run the same lines on every rank": "sharding/test_later_values.py::test_what_a_script_does_to_weights_is_kept",
    },
    "_sharding/saving.py": {
        "call save_pretrained": LABEL,
        "gather the weights": LABEL,
        "write the gathered model": LABEL,
        "pass rank == {}": f"{_ADVISED}test_the_rank_that_writes_is_passed_or_left_out",
    },
    "_sharding/split_at_prepare.py": {
        "Pass ParallelismConfig(tp_size={})": "sharding/test_load_at_prepare_in_parts.py::"
        "test_trainers_train_parts_as_the_whole"
    },
    "_sharding/setup.py": {
        "Load the base in 4 bits": "sharding/test_packed_under_fsdp.py::"
        "test_eight_bits_are_refused_with_a_road_that_works",
        "Make it with meta_model": "model/test_zero3.py::test_weights_that_are_split_are_not_sharded",
        "Start the ranks with torchrun": f"{_ADVISED}test_a_process_group_is_made_first",
        "pass a torch.nn.Module": _SHARDED,
        "pass a folder, a hub id, a state dict": _SHARDED,
        "pass 'off', 'structure' or 'bytes'": _SHARDED,
        "pass 'source', 'model' or None": f"{_ADVISED}test_it_is_said_whose_values_win",
        "pass a function": _SHARDED,
        "attach it first": _PEFT,
        "read the adapter with PeftModel.from_pretrained": f"{_WRAP}_peft.py::"
        "test_of_an_adapter_that_came_later_rank_0_sends_the_parts",
        "pass a bool, a number of ranks": _SHARDED,
        "Wrap with the base's folder": f"{_AFTER}test_a_checkpoint_of_shards_is_no_source_and_the_road_is_right",
        "pass a folder or hub id": _SHARDED,
        "Attach it first, then wrap": _ROADS,
    },
    "_sharding/tensor_parallel.py": {
        "Leave 'tp' out of the mesh": _ROADS,
        "leave ignored_params= out": _ROADS,
        "attach LoRA alone": _ROADS,
        "set it to 0": _ROADS,
    },
    "_sharding/value_sources.py": {
        "pass its full_tensor()": _SHARDED,
        "build the model in the dtype": f"{_ADVISED}test_the_dtype_of_the_checkpoint_rounds_nothing",
        "set it on rank 0": _SHARDED,
        "Build the model with it": _SHARDED,
        "pass init_new=": _SHARDED,
        "Give them their values on rank 0": "sharding/test_checkpoint_folder.py::"
        "test_a_model_of_the_folder_that_is_unlike_the_first_is_not_begun_anew",
    },
    "_sharding/weightless.py": {
        "Leave them out": _PREPARE,
        "Make this call outside of it": _PREPARE,
        "load them outside of it": _PREPARE,
    },
    "_sharding/wrap_fsdp_meta_safe.py": {"check the arguments": LABEL},
}
