"""Names without what wrappers and peft put into them, and the modules around a name."""

from __future__ import annotations

import pytest
import torch
from peft import PeftType
from torch import nn
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper
from torch.distributed.fsdp import _common_utils

from safe_loading._core.names import (
    WRAPPER_PARTS,
    ancestors,
    canonical,
    method_name,
    nearest,
    with_stars,
    without_peft_prefix,
)


@pytest.mark.parametrize(
    ("name", "bare"),
    [
        ("weight", "weight"),
        ("layers.0._checkpoint_wrapped_module.mlp._orig_mod.weight", "layers.0.mlp.weight"),
        ("_fsdp_wrapped_module.layers.1._fsdp_wrapped_module.bias", "layers.1.bias"),
        ("my_module.weight", "my_module.weight"),  # a name that only contains the letters
        ("module.weight", "module.weight"),  # a child may be called so
        ("_orig_mod", ""),
    ],
)
def test_wrappers_are_taken_out_of_names(name: str, bare: str) -> None:
    assert canonical(name) == bare


def test_the_parts_are_those_of_the_engines() -> None:
    inner = nn.Linear(2, 2)
    compiled = torch.compile(nn.Sequential(inner), backend="eager")
    engines = {
        _common_utils.FSDP_WRAPPED_MODULE,
        checkpoint_wrapper._CHECKPOINT_WRAPPED_MODULE,
        next(name for name, _ in compiled.named_children()),  # type: ignore[attr-defined]  # an OptimizedModule
    }
    assert engines == WRAPPER_PARTS


def test_the_prefix_of_peft_is_taken_off_once_and_only_in_front() -> None:
    assert without_peft_prefix("base_model.model.lm_head") == "lm_head"
    assert without_peft_prefix("base_model.model.base_model.model.x") == "base_model.model.x"
    assert without_peft_prefix("model.base_model.model.x") == "model.base_model.model.x"


@pytest.mark.parametrize("peft_type", [PeftType.LORA, "LORA"])
def test_a_method_has_one_name_in_an_object_and_in_a_file(peft_type: object) -> None:
    assert method_name(peft_type) == "LORA"


def test_ancestors_begin_with_the_name_and_end_with_the_root() -> None:
    assert [*ancestors("a.b.c")] == ["a.b.c", "a.b", "a", ""]
    assert [*ancestors("")] == [""]


def test_the_nearest_is_the_name_itself_or_the_innermost_around_it() -> None:
    assert nearest("a.b.c", {"a", "a.b.c"}) == "a.b.c"
    assert nearest("a.b.c", {"a", "", "a.bb"}) == "a"
    assert nearest("a.b.c", {""}) == ""
    assert nearest("a.b.c", {"b"}) is None


def test_layers_of_a_kind_have_one_name() -> None:
    assert with_stars("model.layers.12.experts.3.w1.weight") == "model.layers.*.experts.*.w1.weight"
    assert with_stars("h0.weight_v2") == "h0.weight_v2"
