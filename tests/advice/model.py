"""The advice about models on meta and quantized ones, and the test that takes each."""

from __future__ import annotations

from .reasons import OUTSIDE

_ADVISED = "model/test_model_advice.py::"
_MADE = f"{_ADVISED}test_a_model_is_made_once_the_advice_is_taken"
_PLANNED = f"{_ADVISED}test_a_quantization_is_planned_once_the_advice_is_taken"
_ENDED = f"{_ADVISED}test_each_finding_of_a_quantization_ends_by_its_fix"
_FOUR_BITS = f"{_ADVISED}test_four_bits_on_meta_once_the_advice_is_taken"
_SOUND = "loading/test_load_advice.py::test_a_base_is_sound_once_the_finding_is_mended"

TAKEN: dict[str, dict[str, str]] = {
    "_model/layout/fit.py": {
        "Delete the one that is left over": _SOUND,
        "Save the model that is inside the wrapper": _SOUND,
        "Save the checkpoint again": _SOUND,
        "correct the number of layers": _SOUND,
    },
    "_model/layout/tensor_contents.py": {
        "download or copy the file again": f"{_ADVISED}test_values_are_checked_again_once_the_file_is_copied_again",
        "check it again when its writer is done": OUTSIDE,
    },
    "_model/meta_model.py": {
        "Pass auto_class=": _MADE,
        "Read it and pass trust_remote_code=True": _MADE,
        "pass a floating-point torch.dtype": _MADE,
        "pass for example AutoModelForCausalLM": _MADE,
        "Set it to the dtype of the weights": _MADE,
    },
    "_model/model_config.py": {
        "Pass the folder of a model": _MADE,
        "Correct it, or delete it": _MADE,
        "Correct the config, or pass the class": _MADE,
        "Read it first": f"{_ADVISED}test_code_that_is_read_and_trusted_runs",
        "Set it to the architecture": _MADE,
    },
    "_model/module_limit.py": {"Correct the counts": f"{_ADVISED}test_counts_that_are_corrected_make_a_model"},
    "_model/quantized/engine_formats.py": {
        "pass capability= of the card if it is another one": _ENDED,
        "pass capability= to plan for another one": _ENDED,
        "Name an accelerator in max_memory": _PLANNED,
        "Plan and load it dequantized": _PLANNED,
        "Leave quantization_config out": _PLANNED,
        "Pass capability=(9, 0)": _PLANNED,
        "Use {}": _PLANNED,
    },
    "_model/quantized/four_bit_on_meta.py": {
        "Load the model with from_pretrained": _FOUR_BITS,
        "load this model with from_pretrained": "memory/test_plan_sizes.py::"
        "test_layers_with_transposed_weights_are_quantized_too",
        "pass bnb_4bit_quant_storage=": _FOUR_BITS,
    },
    "_model/quantized/packed_formats.py": {
        "pass the backend to from_pretrained": OUTSIDE,
        "pass TorchAoConfig(": _PLANNED,
        "Plan the model that it was made of": _PLANNED,
        "Quantize with Int8WeightOnlyConfig": _PLANNED,
        "leave it out": _PLANNED,
        "Pass capability= of the card": _PLANNED,
    },
    "_model/quantized/patterns.py": {"Write the names of modules": _PLANNED},
    "_model/quantized/request.py": {
        "Leave quantization_config out": _PLANNED,
        "pass a config of transformers": _PLANNED,
    },
    "_model/quantized/stand_ins.py": {
        "put it into torch.nn.Sequential": f"{_ADVISED}test_a_single_quantized_layer_is_put_into_a_sequential"
    },
    "_model/quantized/to_plain.py": {
        "load it with from_pretrained": "merging/test_merge_saved_as_plain.py::"
        "test_the_advice_to_dequantize_makes_a_plain_checkpoint",
        "take the one that it was made of": OUTSIDE,
        "save it with save_pretrained": "merging/test_merge_saved_as_plain.py::"
        "test_the_advice_to_dequantize_makes_a_plain_checkpoint",
    },
    "_model/quantized_meta_model.py": {
        "take a checkpoint in fp8": _ENDED,
        "leave room for it with overhead=": _ENDED,
        "leave room for one weight in float32": _ENDED,
        "take the checkpoint in 16 bits": _PLANNED,
        "plan without quantization_config": "memory/test_quantized_steps.py::"
        "test_a_method_that_quantizes_nothing_is_a_finding",
    },
    "_model/size_limit.py": {"Correct its sizes": f"{_ADVISED}test_sizes_that_are_corrected_are_loaded"},
}
