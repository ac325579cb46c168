"""Mixed precision that casts what a class keeps in float32 is found, and the fix computes with it in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fsdp_cases import TOKENS, llama, reference, save
from peft import LoraConfig, get_peft_model
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers import LlamaForCausalLM

from safe_loading import meta_model, wrap_fsdp_meta_safe

CODE = "float32-computed-narrow"


class Careful(LlamaForCausalLM):
    _keep_in_fp32_modules = ["q_proj"]  # noqa: RUF012 - of fp16 alone; a list before transformers 5.1
    _keep_in_fp32_modules_strict = ["norm"]  # noqa: RUF012


def computed_in(model: Any) -> set[torch.dtype]:
    """The dtypes that the norms have where they compute."""
    seen = set()
    norms = [module for name, module in model.named_modules() if name.endswith("norm")]
    for norm in norms:
        norm.register_forward_pre_hook(lambda module, _: seen.add(module.weight.dtype))
        norm.register_forward_hook(lambda _, given, output: output.to(given[0].dtype))  # as classes that keep them do
    model(input_ids=TOKENS).logits.float().sum().backward()
    return seen


@pytest.mark.parametrize("adapted", [False, True])
def test_a_policy_that_casts_what_a_class_keeps_is_told(one_rank: None, tmp_path: Path, adapted: bool) -> None:
    folder = save(reference(lambda: llama(num_hidden_layers=1)), tmp_path)

    def wrapped(kind: Any, dtype: torch.dtype, policy: Any = None, version: Any = 2) -> Any:
        model = meta_model(folder, kind, dtype).train()
        if adapted:
            model = get_peft_model(model, LoraConfig(target_modules=["up_proj"], task_type="CAUSAL_LM"))
        return wrap_fsdp_meta_safe(model, folder, mp_policy=policy, version=version)

    def found(model: Any) -> list[Any]:
        return [finding for finding in model.fsdp_report.findings if finding.code == CODE]

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for dtype in (torch.float32, torch.bfloat16):
        cast = wrapped(Careful, dtype, policy)
        (finding,) = found(cast)
        assert finding.where.endswith("norm.weight")
        assert "Careful keeps 3 parameters in float32" in finding.message
        assert computed_in(cast) == {torch.bfloat16}
    assert "build the model with dtype=torch.bfloat16 and leave mp_policy= out" in finding.fix
    mended = wrapped(Careful, torch.bfloat16)
    assert not found(mended)
    assert computed_in(mended) == {torch.float32}
    assert "keeps 4 parameters" in found(wrapped(Careful, torch.float32, torch.float16))[0].message
    assert found(wrapped(Careful, torch.float32, torch.bfloat16, 1))
    assert not found(wrapped(LlamaForCausalLM, torch.float32, policy))
    assert not found(wrapped(Careful, torch.float32, MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)))
