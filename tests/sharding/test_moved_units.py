"""Adapters around units of FSDP2 that peft takes off after the wrap: the base computes and trains as in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engines import needs
from fsdp_cases import NOTHING, differences, inputs, llama, reference, step
from peft import LoraConfig, get_peft_model
from torch.distributed.fsdp import FSDPModule

from safe_loading import wrap_fsdp_meta_safe

pytestmark = [needs("peft", "0.21"), pytest.mark.usefixtures("one_rank")]

ADAPTERS: dict[str, dict[str, Any]] = {
    "embeddings": {"target_modules": ["embed_tokens", "q_proj"]},
    "head": {"target_modules": ["lm_head", "q_proj"]},
    "both": {"target_modules": ["embed_tokens", "lm_head"]},
    "copies": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
    "DoRA": {"target_modules": ["embed_tokens", "q_proj"], "use_dora": True},
}


def adapted(**options: Any) -> Any:
    torch.manual_seed(3)
    return get_peft_model(
        reference(lambda: llama(num_hidden_layers=2)),
        LoraConfig(task_type="CAUSAL_LM", **{"r": 4, "init_lora_weights": False, **options}),
    )


# peft merges DoRA by assigning weights that never reach the shards, which is refused
METHODS = [(name, method) for name in ADAPTERS for method in ("merge_and_unload", "unload")]
METHODS.remove(("DoRA", "merge_and_unload"))


@pytest.mark.parametrize("before", ["nothing", "a step", "a pass", "a pass of kept units"])
@pytest.mark.parametrize(("name", "method"), METHODS)
def test_a_base_without_its_adapters_is_that_of_one_process(name: str, method: str, before: str) -> None:
    one = adapted(**ADAPTERS[name])
    kept = False if before == "a pass of kept units" else None
    model = wrap_fsdp_meta_safe(adapted(**ADAPTERS[name]), reshard_after_forward=kept)
    if before == "a step":
        step(one, inputs("llama")), step(model, inputs("llama"))
        model.zero_grad()
    elif before != "nothing":  # whose backward pass never comes, so that units stay gathered
        model(**inputs("llama"))
    one, model = (getattr(each, method)().requires_grad_(True) for each in (one, model))
    embeddings = model.get_input_embeddings()
    assert isinstance(embeddings, FSDPModule)
    for each in (one, model):
        each.zero_grad()
    assert differences(one, model, inputs("llama")) == NOTHING
    with torch.no_grad():
        model(**inputs("llama"))
    assert type(embeddings.weight).__name__ == "DTensor"  # freed after the forward pass, as before
