"""A pass without gradients leaves each unit as it found it: what is made of the parameters afterwards is of shards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from engines import needs
from fsdp_cases import NOTHING, compared, inputs, last_of_two_losses, llama, llava, reference, step
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from torch import nn
from torch.distributed.tensor import DTensor

from safe_loading import assert_optimizer_sharded, wrap_fsdp_meta_safe

pytestmark = [needs("peft", "0.21"), pytest.mark.usefixtures("one_rank")]


def evaluated(model: Any) -> None:
    with torch.no_grad():
        model(**inputs("llama"))


def generated(model: Any) -> None:
    tokens = inputs("llama")["input_ids"]
    model.generate(input_ids=tokens, max_new_tokens=2, do_sample=False, pad_token_id=0)


def plain() -> Any:
    return reference(lambda: llama(num_hidden_layers=2))


def with_lora() -> Any:
    torch.manual_seed(3)
    chosen: Any = {"target_modules": ["q_proj", "embed_tokens"], "modules_to_save": ["lm_head"]}
    return get_peft_model(plain(), LoraConfig(task_type="CAUSAL_LM", r=4, init_lora_weights=False, **chosen))


def with_prompts() -> Any:
    torch.manual_seed(3)
    return get_peft_model(plain(), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4))


@pytest.mark.parametrize("reshard", [None, False], ids=["freed", "kept"])
@pytest.mark.parametrize("before", [evaluated, generated])
@pytest.mark.parametrize("make", [plain, with_lora, with_prompts])
def test_an_optimizer_may_be_made_after_an_evaluation(
    make: Callable[[], Any], before: Callable[[Any], None], reshard: bool | None
) -> None:
    one, model = make(), wrap_fsdp_meta_safe(make(), reshard_after_forward=reshard)
    before(model)
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    assert_optimizer_sharded(torch.optim.SGD([p for p in model.parameters() if p.requires_grad]), model)
    assert last_of_two_losses(model) == last_of_two_losses(one)


def t5() -> Any:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": 24, "d_kv": 6, "d_ff": 30, "num_layers": 2, "num_heads": 4, "vocab_size": 251}
    return T5ForConditionalGeneration, T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0)


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize(("make", "layer"), [(llava, "q_proj"), (t5, "q")])
def test_generate_is_that_of_one_process_before_any_other_pass(make: Callable[[], Any], layer: str, lora: bool) -> None:
    """It encodes images, and the input of a decoder, before the first forward pass of the model."""
    batch = {name: value for name, value in inputs(make.__name__).items() if name != "labels"}

    def made() -> Any:
        model = reference(make).eval()
        return get_peft_model(model, LoraConfig(target_modules=[layer], lora_dropout=0.0)).eval() if lora else model

    def tokens(model: Any) -> Any:
        return model.generate(**batch, max_new_tokens=3, do_sample=False, pad_token_id=0)

    model = wrap_fsdp_meta_safe(made())
    assert torch.equal(tokens(model), tokens(made()))
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())


def test_gradients_are_zeroed_after_an_evaluation() -> None:
    model = wrap_fsdp_meta_safe(plain())
    step(model, inputs("llama"))
    evaluated(model)
    model.zero_grad()
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("reshard", [None, False], ids=["freed", "kept"])
@pytest.mark.parametrize("after", [evaluated, generated])
@pytest.mark.parametrize("interrupted", [evaluated, generated, step])
def test_an_interrupted_pass_changes_nothing_of_the_next(
    interrupted: Callable[..., Any], after: Callable[[Any], None], reshard: bool | None
) -> None:
    model = wrap_fsdp_meta_safe(with_lora(), reshard_after_forward=reshard)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    handle = model.get_base_model().model.layers[1].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        interrupted(model, *([inputs("llama")] if interrupted is step else []))
    handle.remove()
    after(model)
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())


class Scores(nn.Module):
    """Computes a loss from the weight of its head, past the head's forward, and has another pass inside of its step."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = plain()

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        hidden = self.inner.model(input_ids).last_hidden_state
        return nn.functional.linear(hidden, self.inner.lm_head.weight).square().mean()


def test_what_a_backward_pass_needs_stays_where_an_evaluation_comes_between() -> None:
    """As the reference's pass of preference training, with the adapters off, between the two halves of a step."""
    one, model = Scores(), wrap_fsdp_meta_safe(Scores())
    for each in (one, model):
        loss: Any = each(**inputs("llama"))
        with torch.no_grad():
            each(**inputs("llama"))
        loss.backward()
    nothing = torch.zeros(1)
    assert compared(one, model, nothing, nothing) == NOTHING
