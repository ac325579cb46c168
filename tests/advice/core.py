"""The advice about arguments that all rooms share, and the test that takes each."""

from __future__ import annotations

_ADVISED = "core/test_core_advice.py::"
_READ = f"{_ADVISED}test_an_argument_is_read_once_the_advice_is_taken"
_SEVERAL = "commands/test_commands_predict.py::test_several_cards_are_named_by_their_number"
_CARD = f"{_ADVISED}test_the_memory_of_a_card_and_one_type_of_accelerators"
_JOBS = "memory/test_spread_from_training_args.py"
_ARGS = "core/test_training_args.py::test_what_no_workload_says_is_listed_and_is_read_as_advised"
_PACKED = "memory/test_packed_rows.py::test_rows_that_cannot_be_one_are_refused"
_DECODED = "core/test_workload.py::test_steps_beyond_the_limit_are_a_longer_prompt"
_ENGINES = "core/test_engines.py::test_engines_that_are_new_enough_are_used"

_OTHERS = (
    "loading/test_base_arguments.py::test_what_transformers_would_ignore_or_knows_no_more_is_answered_with_its_place"
)
_NAMES = "core/test_engine_names.py::test_what_may_mean_two_things_is_answered_with_its_place"

_WRAP = "sharding/test_wrap_fsdp_advice.py::test_a_model_is_sharded_once_the_advice_is_taken"

TAKEN: dict[str, dict[str, str]] = {
    "_core/arguments.py": {
        "pass {}, {} or more": _READ,
        "pass a folder, a hub id or one of": _READ,
        "pass major and minor": _READ,
    },
    "_core/cards.py": {"write {}": _READ, ", or give its memory": _CARD, "pass {} with --gpus": _SEVERAL},
    "_core/engines.py": {"Run: pip install": _ENGINES},
    "_core/engine_names.py": {
        "pass a dict of arguments": _NAMES,
        "leave {} out": _NAMES,
        "leave one of the two out": _NAMES,
        "pass base_revision= or": _NAMES,
        "pass base_subfolder= or": _NAMES,
        "use device=, the one": _NAMES,
        "leave it out: ": _NAMES,
        "pass device_map=plan_device_map": "core/test_engine_names.py::test_a_plan_is_a_place_for_a_load",
        "pass the adapter as": "core/test_engine_names.py::test_a_plan_is_a_place_for_a_load",
        "use adapter_dtype=": _NAMES,
        "use adapter_revision=": "loading/test_other_writers.py::test_names_of_peft_have_an_answer",
        "use adapter_subfolder=": "loading/test_other_writers.py::test_names_of_peft_have_an_answer",
        "leave it out; ": _OTHERS,
        "use attn_implementation=": _OTHERS,
        "use token=": _OTHERS,
        "call set_scale(name, factor)": "core/test_engine_names.py::"
        "test_factors_of_a_merge_in_memory_are_set_on_the_layers",
        "leave it out: memory is made here": _WRAP,
        "pass quantization_config=": _NAMES,
        "set it on each unit of FSDP1": _WRAP,
        "use reshard_after_forward=": _WRAP,
        "use mesh=": _WRAP,
    },
    "_core/parse_size.py": {
        "pass a number of bytes": _READ,
        'write "16GB"': "memory/test_plan_shortages.py::test_a_limit_whose_unit_was_forgotten_is_told",
        'pass "{}" for {} bytes': _READ,
        "use the index of an accelerator": _READ,
        "pass {0: ": _READ,
        "name one type": _CARD,
        "name it once": _READ,
    },
    "_core/paths.py": {"pass a path": _READ, "pass the folder that its save_pretrained": _READ},
    "_core/training_args.py": {
        "pass TrainingArguments, or": _ARGS,
        "set it to False": _ARGS,
        "set it to None on a copy": _ARGS,
        "set it on a copy of the arguments": _ARGS,
        "set it to {} on a copy": "core/test_training_args.py::"
        "test_passes_beside_the_steps_that_may_take_more_are_refused",
        "pass sequence_length=": _ARGS,
        "pass the tokens of both": _ARGS,
        "leave it out": f"{_JOBS}::test_settings_of_accelerates_file_that_no_forecast_has",
        "leave it out of a copy": "core/test_training_args.py::"
        "test_the_options_of_checkpointing_are_those_that_the_trainer_passes_on",
    },
    "_core/job_args.py": {
        "pass all of them": f"{_JOBS}::test_groups_of_ranks_that_hold_the_model_each",
        "leave it out": f"{_JOBS}::test_settings_of_accelerates_file_that_no_forecast_has",
        "Leave it out of a copy": f"{_JOBS}::test_settings_of_deepspeeds_that_were_not_held_against_it",
        "pass Spread.fsdp1(": f"{_JOBS}::test_the_variables_of_accelerate_launch",
        'write "zero_optimization"': f"{_JOBS}::test_settings_that_trainer_cannot_read_are_refused",
        "pass hidden_size=": f"{_JOBS}::test_deepspeeds_settings_are_filled_in_as_transformers_does",
    },
    "_core/workload.py": {
        "pass a number, or let {} find it": "core/test_vocabulary.py::test_a_size_that_is_left_open_is_for_a_search",
        "pass Workload.from_training_args": "core/test_training_args.py::"
        "test_a_verb_that_is_given_the_arguments_names_the_call",
        "pass a Workload": "memory/test_memory_advice.py::test_a_call_works_once_the_advice_is_taken",
    },
    "_core/workload_problems.py": {
        "pass context_length={} and decode_steps=": _DECODED,
        "leave labels=False, fused_lm_head=": "memory/test_trl_trainers.py::"
        "test_what_a_loss_of_pairs_was_not_held_against_is_refused",
        "leave labels=False out": "memory/test_fused_lm_head.py::test_what_was_not_held_against_a_run_is_refused",
        "leave it out": _PACKED,
        "pass completion_length= too": "memory/test_grpo_step.py::test_what_is_no_step_of_grpo_is_refused",
        "pass fused_lm_head=True": "memory/test_grpo_step.py::test_what_is_no_step_of_grpo_is_refused",
    },
    "_core/spread.py": {
        "leave out replicas": "memory/test_forecast_flat_shards.py::"
        "test_every_flat_shard_is_in_the_run_that_is_replayed",
        "Leave one of the two out": "memory/test_forecast_flat_shards.py::"
        "test_every_flat_shard_is_in_the_run_that_is_replayed",
    },
}
