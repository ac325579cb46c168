"""load_adapter_on_rank onto a PeftMixedModel: adapters of several methods, active at the same time."""

from __future__ import annotations

from pathlib import Path

import peft
import pytest
import torch
from adapter_methods import METHODS, save_trained
from loaded_models import logits, state
from transformers import AutoModelForCausalLM

from safe_loading import AdapterError, load_adapter_on_rank, load_peft_on_rank


@pytest.fixture(scope="module")
def loha(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_trained(METHODS["LoHa"], tiny_llama, tmp_path_factory.mktemp("loha") / "adapter")


def _mixed(base: Path, adapter: Path) -> peft.PeftMixedModel:
    return peft.PeftMixedModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), str(adapter), "first")


def test_adapters_of_two_methods_are_active_at_a_time(tiny_llama: Path, tiny_adapter: Path, loha: Path) -> None:
    ours, plain = _mixed(tiny_llama, tiny_adapter), _mixed(tiny_llama, tiny_adapter)
    trained = [parameter.requires_grad for parameter in plain.parameters()]
    assert load_adapter_on_rank(ours, loha, "second").ok
    plain.load_adapter(str(loha), "second")
    assert ours.active_adapters == plain.active_adapters == ["first"]
    assert torch.equal(logits(ours), logits(plain))
    before = [parameter.requires_grad for name, parameter in ours.named_parameters() if ".second" not in name]
    assert before == trained
    for model in (ours, plain):
        model.set_adapter(["first", "second"])
    assert torch.equal(logits(ours), logits(plain))


def test_what_a_mixed_model_cannot_do_is_refused_and_names_what_can(
    tiny_llama: Path, tiny_adapter: Path, loha: Path, tmp_path: Path
) -> None:
    model = _mixed(tiny_llama, tiny_adapter)
    prompts = save_trained(METHODS["Prompt tuning"], tiny_llama, tmp_path / "prompts")
    before, outputs = state(model), logits(model)
    with pytest.raises(AdapterError, match="not compatible with the `PeftMixedModel`"):
        load_adapter_on_rank(model, prompts, "prompts")
    with pytest.raises(AdapterError, match="Use load_adapter_on_rank"):
        load_peft_on_rank(model, loha)
    with pytest.raises(AdapterError, match=r"Call model\.delete_adapter\('first'\)"):
        load_adapter_on_rank(model, tiny_adapter, "first", hotswap=True)
    assert state(model) == before
    assert torch.equal(logits(model), outputs)
    # the advice
    load_adapter_on_rank(model, loha, "second")
    model.set_adapter("second")
    model.delete_adapter("first")
    load_adapter_on_rank(model, tiny_adapter, "first")
    model.set_adapter("first")
    assert torch.equal(logits(model), outputs)
