"""The advice in the errors and findings of loading, merging and output, and the test that takes each.

``advices()`` finds them in the source: what follows an imperative verb in a text. The tables are by file, and by the
words that begin the advice. A reason stands in the place of a test where there is nothing to run.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import safe_loading

PACKAGE = Path(safe_loading.__file__).parent
ROOMS = ("_loading", "_merging", "_output")
VERBS = (
    "add ask attach build call cast check choose convert copy correct delete dequantize download drop end free gather "
    "give install keep launch leave load look make merge move name pass pin plan put quantize read remove rename "
    "repair resize run save set start switch take train try unmerge upgrade use wait wrap write"
)
_ADVICE = re.compile(rf"(?:^|[.;:!?)] |, or |\n)({'|'.join(VERBS.split())})\b(?!=)", re.IGNORECASE)

VALUES = "it names what the argument takes, which every call passes"
OUTSIDE = "the repair is outside: another copy of a file, a later call, more room, the same commit on all nodes"
AS_IT_IS = "it leaves things as they are: the adapter stays one, the argument is left out"
LABEL = "no advice: the name of a step, for the ranks that wait for it"
OPEN = "no test takes it yet"
REASONS = (VALUES, OUTSIDE, AS_IT_IS, LABEL, OPEN)

_ADVISED = "loading/test_load_advice.py::"
_MENDED = f"{_ADVISED}test_an_adapter_loads_once_it_is_mended"
_SOUND = f"{_ADVISED}test_a_base_is_sound_once_the_finding_is_mended"
_ARGUMENTS = f"{_ADVISED}test_arguments_of_other_names_have_one_here"
_SWAPPED = f"{_ADVISED}test_what_cannot_be_swapped_in_has_a_name_of_its_own"
_STARTS = "loading/test_methods.py::"
_LOADS = "loading/test_load_peft_on_rank.py::"
_MERGES = "merging/test_merge_advice.py::"
_DISK = "merging/test_merge_lora_checkpoint"
_MEMORY = "merging/test_merge_lora_inplace"
_RANKS = f"{_MEMORY}_ranks.py::"
_OPTIONS = f"{_DISK}_options.py::"
_COMMIT = "output/test_commit.py::"

TAKEN: dict[str, dict[str, str]] = {
    "_loading/adapter_facts.py": {
        "pass adapter_subfolder=": f"{_ADVISED}test_an_adapter_in_a_subfolder_is_named",
        "Convert it once": f"{_LOADS}test_a_pickle_is_refused_with_a_command_that_works",
    },
    "_loading/adapter_values.py": {
        "save the adapter again; dequantize": _MENDED,
        "take an earlier checkpoint": _MENDED,
        "check that the adapter was trained": OUTSIDE,
        "Load it again when its writer": OUTSIDE,
    },
    "_loading/allocation_limit.py": {"Correct its numbers": OPEN},
    "_loading/attach.py": {
        "Leave is_trainable=True out": f"{_STARTS}test_a_prompt_whose_encoder_is_in_no_file_is_not_trained",
        "choose another": VALUES,
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
        "Pass the class of the base": "loading/test_base_arguments.py::test_dtypes_and_classes_by_name",
        "correct or leave out": "loading/test_base_arguments.py::test_a_typo_is_named_with_what_is_near",
    },
    "_loading/base_model.py": {
        "set tie_word_embeddings to false": f"{_ADVISED}test_two_values_of_a_tied_weight_are_one_or_untied",
        ") name a class that loads the base. Pass": f"{_OPTIONS}test_the_class_that_the_error_asks_for_can_be_passed",
        "Pass the base that the adapter was trained on, or auto": f"{_ADVISED}"
        "test_the_class_that_a_base_was_saved_as_is_passed",
        "pass the base that the adapter was trained on, or auto": f"{_ADVISED}"
        "test_the_class_that_a_base_was_saved_as_is_passed",
    },
    "_loading/check_checkpoint.py": {"convert it once": f"{_LOADS}test_a_pickle_is_refused_with_a_command_that_works"},
    "_loading/folder_findings.py": {
        "save the adapter again": _MENDED,
        "save the model that is inside the wrapper": _SOUND,
        "delete the one that is left over": _SOUND,
        "pass base_model=": f"{_ADVISED}test_a_base_that_no_config_names_is_passed",
        "delete those that are not needed": _SOUND,
        "read them before you pass": OUTSIDE,
        "copy the model's config.json here": _SOUND,
        'set "model_type"': _SOUND,
        "keep the adapter in a folder": f"{_ADVISED}test_an_adapter_beside_a_base_gets_a_folder_of_its_own",
    },
    "_loading/hot_swap.py": {
        "Load it onto a new base": f"{_STARTS}test_a_swap_between_starts_is_refused",
        "Call model.unmerge_adapter()": f"{_ADVISED}test_a_swap_of_another_dtype_and_of_a_merged_adapter",
        "Load it under another name": _SWAPPED,
        "load it under another name": _SWAPPED,
        "pass adapter_dtype=": f"{_ADVISED}test_a_swap_of_another_dtype_and_of_a_merged_adapter",
    },
    "_loading/key_names.py": {"keep one of them": _MENDED},
    "_loading/layer_findings.py": {
        "copy or download the whole folder": OUTSIDE,
        "correct config.json": _SOUND,
        "save the model again in": _SOUND,
    },
    "_loading/load.py": {
        "call torch.accelerator.set_device_index": "loading/test_contexts_on_cuda.py::"
        "test_the_device_of_a_rank_is_made_current",
        "Move the adapter's files": f"{_ADVISED}test_an_adapter_beside_a_base_gets_a_folder_of_its_own",
        "add the modules": "loading/test_load_onto_device_map.py::test_what_contradicts_a_map_is_refused",
    },
    "_loading/load_adapter_on_rank.py": {
        "check the arguments": LABEL,
        "load the adapter": LABEL,
        "leave both arguments out": AS_IT_IS,
        "Use load_peft_on_rank": f"{_ADVISED}test_the_first_adapter_is_loaded_by_the_other_function",
        "Call model.delete_adapter": "loading/test_mixed_models.py::"
        "test_what_a_mixed_model_cannot_do_is_refused_and_names_what_can",
        "Choose another name, call model.delete": f"{_ADVISED}test_each_way_out_of_a_name_that_is_taken",
        "Leave device out": AS_IT_IS,
    },
    "_loading/load_peft_on_rank.py": {
        "check the arguments": LABEL,
        "check the adapter against its base": LABEL,
        "pass {name: folder": VALUES,
        "Pass its name; for several": "loading/test_base_arguments.py::"
        "test_several_active_adapters_as_the_refusal_says",
        "Leave device out": "loading/test_load_onto_device_map.py::"
        "test_a_base_over_several_devices_gets_each_tensor_beside_its_layer",
        "leave it out": AS_IT_IS,
        "Use load_adapter_on_rank": f"{_ADVISED}test_the_first_adapter_is_loaded_by_the_other_function",
        "Pass the folder or id of the base": "loading/test_load_onto_device_map.py::"
        "test_a_base_over_several_devices_gets_each_tensor_beside_its_layer",
        "Pass device='{}'": OPEN,
    },
    "_loading/match.py": {
        "pass the base that the adapter": _MENDED,
        ", or correct r and rank_pattern": _MENDED,
        "load it onto a base of its own": f"{_STARTS}test_projections_that_differ_from_the_shared_ones_are_refused",
        "load the base with dtype=": f"{_LOADS}test_the_check_before_the_load_knows_the_dtype",
        "add {} to modules_to_save": _MENDED,
        "save the adapter again with save_pretrained, or take": _MENDED,
        "load the base yourself, call": f"{_LOADS}test_a_resized_vocabulary_says_how_to_resize",
        "add the module to target_modules": _MENDED,
        ", or save the adapter again": _MENDED,
        "load the base, call attach_head": "wrapping/test_attach_head.py::"
        "test_a_head_of_several_layers_that_was_loaded_without_is_told",
    },
    "_loading/peft_config.py": {"upgrade peft": _MENDED, "Upgrade peft": OUTSIDE},
    "_loading/sources.py": {
        "look for the folders": LABEL,
        "read the adapter": LABEL,
        "Pass base_model=.": f"{_ADVISED}test_a_base_that_no_config_names_is_passed",
        "pass a folder or a hub id": VALUES,
        "Pass base_model= and base_revision=": "loading/test_hostile_configs.py::"
        "test_a_revision_in_an_adapters_config_names_no_path",
        "pass the same to all ranks": "loading/test_load_on_ranks.py::"
        "test_some_ranks_or_one_can_load_without_the_others",
        "Pin base_revision=": OUTSIDE,
        "Pin the revision": OUTSIDE,
    },
    "_loading/starts.py": {
        "convert it to a plain LoRA": f"{_STARTS}test_the_conversion_that_the_error_names_works",
        "load it onto a base of its own": f"{_STARTS}"
        "test_a_start_that_would_change_the_base_again_is_refused_and_undone",
        "Load it onto a base of its own": f"{_STARTS}test_another_replication_of_layers_is_refused",
        ", or pass strict=False": f"{_STARTS}test_a_start_that_cannot_be_repeated_is_an_error",
        "load the base again where its own": OUTSIDE,
    },
    "_merging/disk/base.py": {
        "Merge into the base that it was made from, and quantize": f"{_DISK}_quantized.py::"
        "test_bitsandbytes_becomes_what_the_merge_in_memory_makes"
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
    "_merging/disk/output_model.py": {
        "Keep the adapter: load the base": "merging/test_merge_resized_vocabularies.py::"
        "test_what_transformers_cannot_save_is_merged_in_memory_alone",
        "Save the adapter with this module": f"{_DISK}_outputs.py::"
        "test_a_lora_on_a_resized_embedding_needs_both_weights",
        "Load it, merge it": OPEN,
    },
    "_merging/disk/quantized_base.py": {
        "Merge into the base that it was made from, whose": f"{_DISK}_quantized.py::"
        "test_codes_that_nobody_merges_into_have_one_road",
        "Load it with quantization_config=Comp": OPEN,
        "Load it, call merge_lora_inplace(dequantize=True)": OPEN,
    },
    "_merging/disk/sources.py": {
        "pass a folder or hub id, or several": VALUES,
        "pass a list of one number": f"{_OPTIONS}test_weights_multiply_what_adapters_add_as_set_scale_of_peft_does",
        "Name it once": f"{_OPTIONS}test_the_same_adapter_twice_is_refused_and_the_weight_that_is_advised_doubles_it",
    },
    "_merging/disk/write_tensors.py": {
        "Look at the base and at the adapter": f"{_OPTIONS}"
        "test_the_dtype_that_the_error_asks_for_makes_the_merge_possible"
    },
    "_merging/merge_lora_checkpoint.py": {
        "pass a dict of arguments": VALUES,
        'pass "adapter", "base"': f"{_OPTIONS}test_a_trained_tokenizer_wins_unless_the_base_is_chosen",
        "pass at least one byte": VALUES,
        "pass torch.bfloat16, torch.float16": VALUES,
    },
    "_merging/merge_lora_inplace.py": {
        "call unmerge_adapter() before": f"{_MERGES}test_a_dora_is_merged_once_the_others_are_unmerged",
        "pass a number of bytes": VALUES,
        "name each adapter once": VALUES,
        "Pass a peft.PeftModel": f"{_MEMORY}.py::test_a_peft_model_is_what_load_peft_on_rank_returns",
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
    "_merging/weights/lora_layers.py": {
        "Save the adapter, and merge it with merge_lora_checkpoint": f"{_DISK}.py::"
        "test_every_kind_is_bit_for_bit_the_merge_in_memory",
        "Merge before the model is sharded": OUTSIDE,
        "Call .contiguous()": f"{_MERGES}test_a_convolution_of_other_strides_is_merged_once_it_is_contiguous",
        "Leave it out of target_modules": AS_IT_IS,
        "Call model.set_adapter(...) again": f"{_MERGES}"
        "test_attention_whose_parts_have_other_adapters_is_merged_once_they_are_set_again",
        "Keep the adapter, or give it one of zeros": f"{_MERGES}"
        "test_a_layer_that_is_given_a_bias_takes_that_of_an_adapter",
        "Keep the adapter": AS_IT_IS,
        "Merge that one last": f"{_MERGES}test_what_has_a_bias_is_merged_after_a_dora",
        "? Gather it": OPEN,
        "Load the adapter onto the base": f"{_MERGES}test_a_base_of_another_shape_is_refused_and_its_own_is_merged",
    },
    "_merging/weights/merge_plan.py": {
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
        "Dequantize the model first": OPEN,
        "Call this in torch.inference_mode()": f"{_MERGES}test_a_model_of_inference_mode_is_merged_in_it",
        "Load the model without offloading": f"{_MEMORY}_offload.py::test_one_of_two_tied_weights_on_disk_is_refused",
        "Load the weights first": f"{_MERGES}test_weights_on_meta_are_merged_once_they_are_loaded",
    },
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


class Advice(NamedTuple):
    """A text of the package that tells its reader to do something."""

    file: str  # in the package
    line: int
    words: str  # from the verb on; what is filled in stands as {}


def advices(rooms: tuple[str, ...] = ROOMS) -> Iterator[Advice]:
    """Find the texts of these folders in which a sentence begins with an imperative."""
    for room in rooms:
        for path in sorted((PACKAGE / room).rglob("*.py")):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            inner = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
            inner |= {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}  # docstrings
            for node in ast.walk(tree):
                text = "" if id(node) in inner else _text(node)
                found = _ADVICE.search(text) if " " in text else None
                if found:
                    words = text[found.start() :].lstrip(".;:! ")
                    yield Advice(path.relative_to(PACKAGE).as_posix(), getattr(node, "lineno", 0), words)


def _text(node: ast.AST) -> str:
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
    return ""
