"""The advice about wrapping and heads, and the test that takes each."""

from __future__ import annotations

_ADVISED = "wrapping/test_wrap_advice.py::"
_WRAPPED = f"{_ADVISED}test_a_model_is_wrapped_once_the_advice_is_taken"
_HEADS = "wrapping/test_attach_head.py::"
_PREPARED = f"{_ADVISED}test_what_is_prepared_and_wrapped_once_the_advice_is_taken"

TAKEN: dict[str, dict[str, str]] = {
    "_wrapping/attach_head.py": {
        "Pass source=": f"{_ADVISED}test_a_head_whose_values_are_in_the_folder_is_attached_either_way",
        "pass a torch.nn.Module": _WRAPPED,
        "pass a model and the head's name": _WRAPPED,
        "pass a torch.dtype": _WRAPPED,
        "attach it before model.add_adapter": f"{_HEADS}test_a_head_comes_before_the_adapter_that_transformers_puts_in",
        "attach it to that one": f"{_HEADS}test_a_head_that_no_adapter_would_save_is_refused",
        "name the one of the head": f"{_ADVISED}test_the_adapter_of_a_head_is_named",
    },
    "_wrapping/heads.py": {
        "choose another name": _WRAPPED,
        "put it into a module with a forward": _WRAPPED,
        "attach it before": "sharding/test_wrap_fsdp_meta_safe_peft.py::"
        "test_a_head_that_came_later_is_sharded_and_computes",
    },
    "_wrapping/mixin_names.py": {
        "pass the state as keywords": _WRAPPED,
        "write __call__": _WRAPPED,
        "write `class {}(Transparent)`": _WRAPPED,
        "Attach layers of your own with attach_head": _WRAPPED,
        "write it there": _WRAPPED,
        "rename it to __call__": _WRAPPED,
        "call unwrap_transparent first": _WRAPPED,
        "choose another name": _WRAPPED,
        "Call attach_head(model": _WRAPPED,
    },
    "_wrapping/prepare_and_wrap.py": {
        "call wrap_transparent(model": _PREPARED,
        "pass modules by name": _PREPARED,
        "pass gradient_checkpointing=False": _PREPARED,
        "rename one of them": _PREPARED,
    },
    "_wrapping/wrap_order.py": {"wrap the model first": _WRAPPED},
    "_wrapping/wrap_transparent.py": {
        "pass example=": "wrapping/test_wrap_transparent.py::test_what_cannot_be_simulated_is_a_warning",
        "pass a PeftModel or another": _WRAPPED,
    },
}
