"""The advice about plans, forecasts and audits, and the test that takes each."""

from __future__ import annotations

from .reasons import LABEL, PAGE, VALUES

_ADVISED = "memory/test_memory_advice.py::"
_PACKED = "memory/test_packed_rows.py::test_rows_that_cannot_be_one_are_refused"
_CALL = f"{_ADVISED}test_a_call_works_once_the_advice_is_taken"
_TRACED = f"{_ADVISED}test_a_step_is_traced_once_the_advice_is_taken"
_EDITED = f"{_ADVISED}test_edits_of_a_map_are_mended"
_PASSED = f"{_ADVISED}test_what_a_workload_does_not_describe_is_passed"
_PART = f"{_ADVISED}test_the_part_is_passed_of_a_model_whose_parts_are_run_one_by_one"
_USERS = "memory/test_audit_users_models.py::"
_HEALTHY = "memory/test_audit_healthy_modules.py::"
_OWN = "memory/test_audit_own_modules.py::"
_MENDED = "memory/test_audit_round_trip.py::test_what_does_not_come_back_is_named_and_mended"
_LOST = "memory/test_silent_troubles.py::test_what_is_lost_is_seen_after_three_steps"
_NUMBERS = "memory/test_audit_numbers.py::"
_SHARED = f"{_OWN}test_a_tie_that_no_checkpoint_knows"
_STRUCTURES = f"{_OWN}test_a_head_that_peft_froze_in_its_wrapper"
_METHODS = "memory/test_forecast_every_method.py::"
_AUDIT = PAGE.format("audit")  # makes nearly each code on purpose, and ends it

_OVER_RANKS = "memory/test_reference_over_ranks.py::test_what_was_not_held_against_ranks_is_refused"
TAKEN: dict[str, dict[str, str]] = {
    "_memory/audit/device_checks.py": {
        "attach before FSDP shards": "memory/test_audit_model.py::test_one_unit_of_fsdp",
        "add the missing modules": _AUDIT,
        "start a process for each GPU": _AUDIT,
        "call torch.cuda.set_device": "loading/test_contexts_on_cuda.py::test_a_rank_that_trains_has_one_context",
    },
    "_memory/audit/dtypes_and_ties.py": {
        "load it with from_pretrained(quantization_config=": _AUDIT,
        "load it with dtype=": _AUDIT,
        "call model.tie_weights()": _AUDIT,
        ", or cast them back": _AUDIT,
        "leave prepare_model_for_kbit_training out": f"{_USERS}test_what_peft_casts_of_a_quantized_base",
        "leave them out of modules_to_save": f"{_USERS}test_a_copy_of_tied_weights_is_told_as_its_method_has_it",
    },
    "_memory/audit/kept_memory.py": {
        "keep what is trained alone": f"{_HEALTHY}test_an_average_that_a_trainer_updates_is_no_teacher",
        "pass ref_model=None": _AUDIT,
        "keep loss.detach()": _AUDIT,
    },
    "_memory/audit/running_statistics.py": {
        "name the layers in modules_to_save": _AUDIT,
        "name their modules in modules_to_save": _LOST,
    },
    "_memory/audit/loss.py": {
        "add **kwargs": _AUDIT,
        "pass **kwargs on": "memory/test_audit_loss.py::test_the_size_of_the_error_and_the_fix",
        ", or add the term in compute_loss": _AUDIT,
    },
    "_memory/audit/modes.py": {
        "take the eval() of trained parts": _AUDIT,
    },
    "_memory/audit/base_values.py": {
        "save the base as it is": f"{_NUMBERS}test_a_base_that_was_changed_is_saved_and_loaded_again",
    },
    "_memory/audit/optimizer_steps.py": {
        "give the group its own lr": _LOST,
        "load what is trained in float32": _LOST,
        "cast what is trained back to float32": "loading/test_packed_folders.py::"
        "test_factors_that_trl_rounded_are_cast_back_after_the_trainer_is_made",
        "write the scale into the config": _LOST,
        "make the first values anew": f"{_NUMBERS}test_factors_are_made_anew",
    },
    "_memory/audit/packed_rows.py": {
        "pass position_ids": f"{_NUMBERS}test_lengths_of_rows_are_not_read_without_flash_attention",
        "leave attention_mask out": _LOST,
    },
    "_memory/audit/positions.py": {"load with from_pretrained": f"{_NUMBERS}test_frequencies_are_loaded_right"},
    "_memory/audit/round_trip.py": {
        "end what it names": _MENDED,
        "use get_peft_model": _MENDED,
        "name their modules in modules_to_save": _MENDED,
        ") leave names out": _MENDED,
        "keep one dtype in the model": _MENDED,
        "write first values": _MENDED,
        "pass one with weights": _MENDED,
        "run it in one process": _MENDED,
        "pass the trainer that saves it": "memory/test_audit_round_trip.py::"
        "test_the_trainer_saves_and_loads_a_wrapper_whole",
    },
    "_memory/audit/shared_names.py": {
        "keep the second name out": _AUDIT,
        "wrap the model with wrap_transparent": _SHARED,
        "name the tie in the class": _SHARED,
    },
    "_memory/audit/step_checks.py": {
        "set model.accepts_loss_kwargs": f"{_HEALTHY}test_what_a_trainer_passes_and_a_model_refuses",
        "call model.train()": _AUDIT,
        "pass what the model needs": _AUDIT,
        "load the adapter with is_trainable=True": "memory/test_audit_model.py::"
        "test_a_step_that_trains_nothing_is_mended_by_what_trains",
        "use gradient_checkpointing_kwargs=": "memory/test_audit_model.py::"
        "test_what_layers_in_8_bits_keep_under_checkpointing",
        "look for self.last_output": _AUDIT,
        "pass inputs= with {}": f"{_USERS}test_a_tower_without_pictures_is_told_with_what_it_needs",
        "take a method that adapts": f"{_USERS}test_a_method_that_adapts_no_layer",
    },
    "_memory/audit/training.py": {
        "use target_modules='all-linear'": _AUDIT,
        "name their modules in modules_to_save": _AUDIT,
        "load the adapter with is_trainable=True": _AUDIT,
        "write them into a file of your own": "memory/test_audit_own_modules.py::"
        "test_what_an_x_lora_leaves_out_of_its_files_is_told_and_its_resting_loras_are_not",
        "give each adapter a base": "memory/test_audit_own_modules.py::"
        "test_adapters_that_peft_cannot_save_beside_one_another_are_named",
        "attach them to the model": _AUDIT,
        "pass an optimizer of both": f"{_HEALTHY}test_an_optimizer_may_have_more_than_the_model",
        "make the optimizer after": _AUDIT,
        ", or name them in modules_to_save": _AUDIT,
    },
    "_memory/audit/unmatched.py": {
        "leave the {} out": _AUDIT,
        "give each module one key": "memory/test_audit_users_models.py::"
        "test_patterns_whose_order_is_lost_are_told_before_they_are_saved",
    },
    "_memory/audit/untrained.py": {
        "call model.base_model.{}": _LOST,
        "train the one that was loaded": _AUDIT,
        "name the task": _AUDIT,
        "name it in modules_to_save": _LOST,
        "call model.{}.requires_grad_": f"{_HEALTHY}test_a_part_of_ones_own_that_was_never_trained",
        "attach it with attach_head": _STRUCTURES,
        "cast them": "memory/test_audit_model.py::test_float16_weights_that_the_scaler_refuses",
    },
    "_memory/audit/wrappers.py": {
        "save the {}": _AUDIT,
        "train() raises AttributeError": LABEL,
        "move it yourself": f"{_USERS}test_a_trainable_teacher_in_a_wrapper_is_told_as_one",
        "make one model of all": f"{_OWN}test_two_models_of_different_classes_become_one",
        "put the wrapper's code": "memory/test_audit_wrappers.py::test_one_finding_for_each_wrapper_at_any_depth",
    },
    "_memory/audit_model.py": {"pass a torch optimizer": VALUES},
    "_memory/forecast/report.py": {
        "Call predict_memory here": "memory/test_forecast_suggestions.py::test_a_forecast_keeps_no_model_alive"
    },
    "_memory/trace/flat_sharded_step.py": {
        "Pass use_orig_params=True": "memory/test_forecast_flat_shards.py::"
        "test_flat_parameters_are_trained_whole_or_not_at_all",
    },
    "_memory/trace/read_adapter.py": {
        "Pass the base, and this adapter": f"{_ADVISED}test_an_adapter_that_names_no_base_is_put_into_the_workload",
    },
    "_memory/fewest_ranks.py": {
        "pass a Spread": VALUES,
        "Pass Spread.ddp": "memory/test_fewest_ranks.py::test_what_shards_nothing_is_refused",
        "Switch gradient checkpointing on": "memory/test_fewest_ranks.py::test_what_no_number_takes_is_made_to_fit",
    },
    "_memory/audit/trainer_evaluation.py": {
        "pass preprocess_logits_for_metrics= or": "memory/test_trainer_settings.py::"
        "test_the_evaluation_is_that_of_the_trainer",
    },
    "_memory/trace/evaluation.py": {
        ", or leave it out": "memory/test_trainer_settings.py::test_what_was_not_held_against_a_run_is_refused",
    },
    "_memory/trace/fused_lm_head.py": {
        "pass inputs= with labels": "memory/test_trainer_settings.py::"
        "test_prompts_without_labels_take_less_of_a_fused_head",
    },
    "_memory/forecast/idle_parts.py": {"pass inputs= if": "memory/test_idle_parts.py::test_with_images_the_tower_runs"},
    "_memory/forecast/vllm_share.py": {"pass a part of the card": VALUES},
    "_memory/largest_micro_batch.py": {
        "Pass Workload.train": _CALL,
        ", or train an adapter": f"{_ADVISED}test_a_row_that_is_too_much_is_made_to_fit",
    },
    "_memory/trace/two_ends.py": {
        "Pass {}": "memory/test_two_ends.py::test_a_prompt_that_an_encoder_reads_takes_steps",
    },
    "_memory/trace/reference_pass.py": {
        "Pass reference='model'": "memory/test_reference_pass.py::"
        "test_what_cannot_be_forecast_is_refused_with_what_can",
    },
    "_memory/trace/over_ranks.py": {"Pass {}": _OVER_RANKS},
    "_memory/largest_workload.py": {"pass for example Workload.generate": VALUES},
    "_memory/plan/device_map_plan.py": {
        "plan again with plan_device_map": _CALL,
        "call plan.verify() to count it again": "memory/test_plan_device_map_merges.py::"
        "test_a_map_that_was_edited_is_counted_anew",
    },
    "_memory/plan/device_memory.py": {"Pass the limits": f"{_ADVISED}test_free_memory_that_cannot_be_read_is_passed"},
    "_memory/plan/map_findings.py": {
        "keep the modules that it reads together": "memory/test_plan_device_map_merges.py::"
        "test_a_cache_that_the_model_moves_is_a_finding_with_its_bytes",
        "name it in the map": _EDITED,
        "write {}, or remove the key": "memory/test_plan_maps.py::"
        "test_a_key_that_names_nothing_fails_the_check_where_something_has_no_place",
        "remove the key": _EDITED,
    },
    "_memory/plan/pipeline_stages.py": {
        "Plan without offload=": "memory/test_plan_stages.py::test_what_is_no_pipeline_is_refused_and_the_advice_works"
    },
    "_memory/plan/planner.py": {
        "put the modules that it reads on one device": "memory/test_plan_device_map_merges.py::"
        "test_a_map_that_was_edited_is_counted_anew",
        "plan anew": _EDITED,
        "leave room for them": f"{_ADVISED}test_room_for_a_step_that_cannot_be_traced_is_left",
    },
    "_memory/plan_device_map.py": {
        "name it in nodes": _CALL,
        "add {0": _CALL,
        "pass a list of class names": _CALL,
        "pass the cards of each node": _CALL,
        "name one of these": _CALL,
        "name it in max_memory": _CALL,
        "name it once": _CALL,
    },
    "_memory/predict_memory.py": {
        "pass a number, or let fewest_ranks": "core/test_vocabulary.py::test_a_size_that_is_left_open_is_for_a_search",
        "Pass it as it is before it is sharded": "memory/test_forecast_spread.py::test_the_forecast_of_a_job",
        'pass "to" or "device_map"': _CALL,
        "pass a Spread": _CALL,
    },
    "_memory/smallest_limits.py": {"pass how many there are": VALUES},
    "_memory/trace/attached_adapter.py": {
        "Pass {}({}), with values of yours": f"{_METHODS}test_a_config_without_what_peft_needs_is_completed_as_advised"
    },
    "_memory/trace/function_mode.py": {"call .cpu()": _TRACED, "call .detach()": _TRACED},
    "_memory/trace/inputs.py": {
        "leave one of the two out": _PACKED,
        "leave it out": _PACKED,
        "Pass the tokens": _CALL,
        "Pass them, for example inputs={'input_features'": _PASSED,
        "Pass them, for example inputs={'pixel_values'": _PASSED,
    },
    "_memory/trace/step_tensors.py": {"pass tensors by argument name": _CALL},
    "_memory/trace/forward_pass.py": {
        "Pass a peft config with inference_mode=False": f"{_METHODS}test_a_step_that_trains_nothing_is_refused",
    },
    "_memory/trace/run_training.py": {
        "pass a subclass": "memory/test_optimizers_of_a_step.py::"
        "test_an_optimizer_that_needs_more_is_refused_and_its_subclass_is_run",
    },
    "_memory/trace/trace_error.py": {
        "Make each tensor where those are": f"{_OWN}test_a_tensor_made_on_the_host",
        "Leave it as it is: exclude_modules=": "memory/test_trace_inputs.py::"
        "test_a_router_that_peft_cannot_adapt_is_named_and_left_out_as_advised",
        "Use an operation with a fixed output shape": _TRACED,
        "Pass what else the model needs": _PASSED,
        "Pass the part that the step runs": _PART,
        "set model.config.pad_token_id": "memory/test_trace_inputs.py::"
        "test_a_classifier_of_several_rows_has_a_padding_token_as_everybody_sets_it",
    },
    "_memory/trace/zero_step.py": {"pass param_dtype=": "memory/test_forecast_zero.py::test_what_is_refused"},
    "_memory/trace/trace_step.py": {
        "Pass the whole length": "memory/test_two_ends.py::test_where_the_ends_are_not_known_they_are_refused",
        "Switch it on in the model itself": f"{_ADVISED}test_checkpointing_is_switched_on_in_the_model_itself",
    },
}
