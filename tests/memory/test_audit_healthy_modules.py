"""Structures of people's modules that train well: an audit says nothing of them."""

from __future__ import annotations

import copy
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from models import SIZES
from peft import (
    LoraConfig,
    PeftConfig,
    PrefixTuningConfig,
    PromptEncoderConfig,
    PromptTuningConfig,
    get_peft_model,
)
from silent_scripts import HIDDEN, LORA, adamw, adapted, base
from test_audit_model import codes
from torch import nn
from torch.nn import functional as F  # noqa: N812  # as everybody calls it
from torch.nn.utils import spectral_norm, weight_norm
from torch.nn.utils.prune import l1_unstructured
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    LlamaPreTrainedModel,
    default_data_collator,
)
from transformers.modeling_outputs import SequenceClassifierOutput

from safe_loading import ArgumentError, Transparent, Workload, audit_model, meta_model, wrap_transparent

STEP = Workload.train(2, 16)


def trainer_with(model: Any, **held: Any) -> Any:
    return types.SimpleNamespace(model=model, args=None, optimizer=None, **held)


def test_an_average_that_a_trainer_updates_is_no_teacher() -> None:
    model = base()
    average = torch.optim.swa_utils.AveragedModel(model)
    assert codes(model, STEP, trainer=trainer_with(model, ema=average)) == {}
    adapter = adapted()
    whole = torch.optim.swa_utils.AveragedModel(adapter)
    found = codes(adapter, STEP, trainer=trainer_with(adapter, ema=whole))
    assert set(found) == {"SL113"}  # the base is in it once more
    small = eval(found["SL113"].fix.removeprefix("keep what is trained alone: ").rstrip("."), {"model": adapter})
    assert codes(adapter, STEP, trainer=trainer_with(adapter, ema=small)) == {}


def test_a_copy_is_the_reference_of_a_model_that_is_trained_whole() -> None:
    model, reference = base(), base().requires_grad_(requires_grad=False)
    assert codes(model, STEP, trainer=trainer_with(model, ref_model=reference)) == {}


def test_the_factors_of_an_embedding_that_a_tied_head_has_too_are_no_output_of_a_step() -> None:
    tied = LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True))
    lora = LoraConfig(target_modules=["embed_tokens", "lm_head"], ensure_weight_tying=True)
    assert "SL112" not in codes(get_peft_model(tied, lora), STEP)


class Preference:
    """A trainer whose reference runs without gradients, as trl's."""

    args = optimizer = None

    def __init__(self, model: Any, reference: Any) -> None:
        self.model, self.ref_model = model, reference

    def compute_loss(self, model: Any, inputs: Any) -> Any:
        with torch.no_grad():
            target = self.ref_model(**inputs).logits
        return model(**inputs).loss + target.mean()


class Decorated(Preference):
    """The same by a decorator."""

    @torch.no_grad()
    def target(self, inputs: Any) -> Any:
        return self.ref_model(**inputs).logits

    def compute_loss(self, model: Any, inputs: Any) -> Any:
        return model(**inputs).loss + self.target(inputs).mean()


class Forgetful(Preference):
    """One that forgot it."""

    def compute_loss(self, model: Any, inputs: Any) -> Any:
        return model(**inputs).loss + self.ref_model(**inputs).logits.mean()


@pytest.mark.parametrize(("kind", "expected"), [(Preference, set()), (Decorated, set()), (Forgetful, {"SL114"})])
def test_a_reference_that_trainers_run_without_gradients_is_healthy(kind: Any, expected: set[str]) -> None:
    model = base()
    assert set(codes(model, STEP, trainer=kind(model, base()))) == expected


def test_an_optimizer_may_have_more_than_the_model() -> None:
    model, critic = base(), nn.Linear(HIDDEN, 1)
    own = torch.optim.Adam(critic.parameters())
    assert codes(model, STEP, trainer=trainer_with(model, critic=critic, critic_optimizer=own)) == {}
    assert codes(model, STEP, optimizer=adamw([*model.parameters(), *critic.parameters()])) == {}
    trainer = trainer_with(model, critic=critic)
    found = codes(model, STEP, trainer=trainer)["SL118"]
    assert (found.where, found.severity) == ("trainer.critic", "warning")
    of_both, _, frozen = found.fix.removeprefix("pass an optimizer of both, ").partition("; or ")
    scope = {"torch": torch, "model": model, "trainer": trainer}
    trainer.optimizer = eval(of_both, scope)
    assert codes(model, STEP, trainer=trainer) == {}
    trainer.optimizer = None
    exec(frozen.partition(" if ")[0], scope)
    assert codes(model, STEP, trainer=trainer) == {}


class Momentum(LlamaPreTrainedModel):
    """A contrastive model whose second encoder and queue follow in the forward pass, as in MoCo."""

    accepts_loss_kwargs = False

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.query, self.key = LlamaModel(config), LlamaModel(config)
        self.register_buffer("queue", torch.randn(config.hidden_size, 8))
        self.post_init()
        self.key.load_state_dict(self.query.state_dict())
        self.key.requires_grad_(requires_grad=False)

    def forward(self, input_ids: Any = None, attention_mask: Any = None, labels: Any = None) -> Any:
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask}
        query = self.query(**inputs)[0][:, -1]
        with torch.no_grad():
            for own, other in zip(self.key.parameters(), self.query.parameters(), strict=True):
                own.data = 0.9 * own.data + 0.1 * other.data
            key = self.key(**inputs)[0][:, -1]
        scores = torch.cat([(query * key).sum(-1, keepdim=True), query @ self.queue.clone()], 1)
        self.queue[:, : len(key)] = key.T
        return SequenceClassifierOutput(loss=F.cross_entropy(scores, torch.zeros_like(labels[:, 0])))


class Skipping(LlamaForCausalLM):
    """A model that leaves out layers at random."""

    accepts_loss_kwargs = False

    def forward(self, input_ids: Any = None, attention_mask: Any = None, labels: Any = None) -> Any:
        state = self.model.embed_tokens(input_ids)
        positions = self.model.rotary_emb(state, torch.arange(state.shape[1], device=state.device)[None])
        for layer in self.model.layers:
            if not self.training or torch.rand(()) < 0.5:
                state = layer(state, position_embeddings=positions)
        logits = self.lm_head(self.model.norm(state))
        return SequenceClassifierOutput(loss=F.cross_entropy(logits.flatten(0, 1), labels.flatten()))


class Strict(LlamaPreTrainedModel):
    """A model that takes nothing more than it names."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.encoder, self.out = LlamaModel(config), nn.Linear(config.hidden_size, 3)
        self.mask: Any = None
        self.register_buffer("seen", torch.ones(4, 4), persistent=False)
        self.post_init()

    def forward(self, input_ids: Any = None, attention_mask: Any = None, labels: Any = None) -> Any:
        length = input_ids.shape[1]
        if self.mask is None:  # made once, and then kept
            self.mask = torch.ones(length, device=input_ids.device)
        if self.seen.shape[0] < length:
            self.seen = torch.ones(length, length, device=input_ids.device)
        state = self.encoder(input_ids=input_ids, attention_mask=attention_mask)[0] * self.mask[:, None]
        loss = F.cross_entropy(self.out(state.mean(1)), labels[:, 0] % 3) + 0.0 * self.seen.sum()
        return SequenceClassifierOutput(loss=loss)


class PassesOn(Strict):
    """A class of the same that hands on whatever it gets."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


class Distilled(Transparent):
    """A student whose teacher is held in a list, so that no checkpoint has it."""

    def __call__(self, *args: Any, **inputs: Any) -> Any:
        out = super().__call__(*args, **inputs)
        held: Any = self
        with torch.no_grad():
            target = held.teacher[0](**{name: value for name, value in inputs.items() if name != "labels"}).logits
        out.loss = out.loss + F.mse_loss(out.logits, target)
        return out


def distilled() -> Any:
    model = wrap_transparent(adapted(), Distilled)
    model.teacher = [base()]
    model.accepts_loss_kwargs = False
    return model


@pytest.mark.parametrize(
    "make",
    [lambda: base(Momentum), lambda: base(Skipping), lambda: base(Strict), lambda: base(PassesOn), distilled],
    ids=["momentum", "skipping", "strict", "passes on", "distilled"],
)
def test_nothing_is_found_on_a_healthy_module(make: Any) -> None:
    assert audit_model(make(), STEP, forecast=False, round_trip=True).findings == ()


def test_what_a_trainer_passes_and_a_model_refuses() -> None:
    model: Any = base(PassesOn)
    found = codes(model, STEP, trainer=trainer_with(model))["SL126"]
    assert "num_items_in_batch" in found.message
    assert found.fix.startswith("set model.accepts_loss_kwargs = False")
    model.accepts_loss_kwargs = False
    assert codes(model, STEP, trainer=trainer_with(model)) == {}
    adapter = get_peft_model(base(Strict), LoraConfig(**{**LORA, "task_type": "TOKEN_CLS"}))
    assert codes(adapter, STEP)["SL126"].fix.startswith("let the forward take the argument, or **kwargs")
    adapter = get_peft_model(base(Tolerant), LoraConfig(**{**LORA, "task_type": "TOKEN_CLS"}))
    assert "SL126" not in codes(adapter, STEP)


class Tolerant(Strict):
    """The same, as the advice says."""

    def forward(self, input_ids: Any = None, attention_mask: Any = None, labels: Any = None, **_: Any) -> Any:
        return super().forward(input_ids, attention_mask, labels)


def test_a_part_of_ones_own_that_was_never_trained() -> None:
    model: Any = base(Tolerant)
    model.out.requires_grad_(requires_grad=False)
    found = codes(model, STEP)["SL135"]
    assert found.where == "out"
    exec(found.fix.removeprefix("call ").rstrip("."), {"model": model})
    assert "SL135" not in codes(model, STEP)
    model.out.requires_grad_(requires_grad=False)
    model.average = nn.Linear(HIDDEN, 3).requires_grad_(requires_grad=False)
    model.average.load_state_dict(model.out.requires_grad_(requires_grad=True).state_dict())
    assert "SL135" not in codes(model, STEP)  # it follows a trained part


def test_each_of_several_optimizers_may_have_a_part() -> None:
    model = base()
    inside = [p for p in model.model.layers.parameters() if p.ndim == 2]
    own = {id(p) for p in inside}
    others = torch.optim.AdamW([p for p in model.parameters() if id(p) not in own])
    assert "SL118" in codes(model, STEP, optimizer=others)
    both = [torch.optim.SGD(inside, lr=1e-2), others]
    assert codes(model, STEP, optimizer=both) == {}
    both[0].param_groups[0]["lr"] = 0.0
    assert "whose lr is 0" in codes(model, STEP, optimizer=both)["SL118"].message
    model.model.layers[0].mlp.up_proj.weight = nn.Parameter(
        inside[0].new_ones(model.model.layers[0].mlp.up_proj.weight.shape)
    )
    assert codes(model, STEP, optimizer=both)["SL118"].severity == "error"
    with pytest.raises(ArgumentError, match="several in a list"):
        codes(model, STEP, optimizer=[others, 3])


def test_a_head_that_its_checkpoint_holds_was_trained(tmp_path: Path) -> None:
    def adapted_from(folder: Path) -> Any:
        made = BertForSequenceClassification.from_pretrained(folder)
        return get_peft_model(made, LoraConfig(r=2, target_modules=["query"])).train()

    sizes: dict[str, Any] = {
        "hidden_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 64,
    }
    config = BertConfig(**sizes, vocab_size=99, num_labels=3)
    BertForSequenceClassification(config).save_pretrained(tmp_path / "classifier")
    BertModel(config).save_pretrained(tmp_path / "encoder")
    assert "SL135" not in codes(adapted_from(tmp_path / "classifier"), STEP)
    assert codes(adapted_from(tmp_path / "encoder"), STEP)["SL135"].where == "classifier"


class Logs(Transparent):
    """A model that keeps its last loss, which it needs no graph for."""

    def __call__(self, *args: Any, **inputs: Any) -> Any:
        out = super().__call__(*args, **inputs)
        held: Any = self
        held.last_loss = out.loss.detach()
        return out


class Recurrent(nn.Module):
    """A network that begins each row where the last one ended."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(64, 8), nn.Linear(8, 64)
        self.cell = nn.LSTM(8, 8, batch_first=True)
        self.state: Any = None

    def forward(self, input_ids: Any, labels: Any = None) -> Any:
        states, last = self.cell(self.embed(input_ids), self.state)
        self.state = tuple(part.detach() for part in last)
        return {"loss": F.cross_entropy(self.out(states).flatten(0, 1), labels.flatten())}


def test_what_each_step_replaces_is_no_leak() -> None:
    assert codes(wrap_transparent(base(), Logs), STEP) == {}
    assert {found.severity for found in codes(Recurrent(), STEP).values()} <= {"info"}


@pytest.mark.parametrize("computed", [weight_norm, spectral_norm, lambda layer: l1_unstructured(layer, "weight", 0.5)])
def test_a_weight_that_torch_computes_before_each_pass_is_not_kept(computed: Any) -> None:
    model = nn.Sequential(computed(nn.Linear(8, 8)), nn.Linear(8, 1))
    inputs = {"input": torch.randn(2, 8)}
    model(**inputs).sum().backward()
    assert codes(model, STEP, inputs=inputs) == {}


class Chooses(LlamaPreTrainedModel):
    """A head for each task, chosen by the batch, or by the labels that it has."""

    def __init__(self, heads: int = 2) -> None:
        super().__init__(LlamaConfig(**SIZES))
        self.model = LlamaModel(self.config)
        self.heads = nn.ModuleList([nn.Linear(HIDDEN, 2) for _ in range(heads)])

    def forward(
        self, input_ids: Any, attention_mask: Any = None, task: Any = None, labels: Any = None, others: Any = None
    ) -> Any:
        hidden = self.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state[:, -1]
        head = int(task[0]) if task is not None else int(others is not None)
        logits = self.heads[head](hidden)
        return SequenceClassifierOutput(loss=F.cross_entropy(logits, labels if others is None else others))


def row(**more: Any) -> dict[str, Any]:
    return {"input_ids": [5, 6, 7], "attention_mask": [1, 1, 1], **more}


def test_a_head_that_other_batches_choose_is_trained() -> None:
    labels = torch.zeros(2, dtype=torch.long)
    first = {"task": torch.zeros(2, dtype=torch.long), "labels": labels}
    assert codes(Chooses(), STEP, inputs=first) == {}
    assert codes(Chooses(12), STEP, inputs=first) == {}
    detached = Chooses()
    detached.heads[1].register_forward_hook(lambda _, __, output: output.detach())
    assert codes(detached, STEP, inputs=first)["SL121"].where == "heads.1.bias, heads.1.weight"

    def told(data: Any, collator: Any = default_data_collator) -> set[str]:
        model = Chooses()
        return set(
            codes(model, STEP, inputs=first, trainer=trainer_with(model, train_dataset=data, data_collator=collator))
        )

    both = [row(task=number, labels=0) for number in (0, 1)]
    assert told(both) == set()
    assert told([row(labels=0), row(others=1)]) == set()
    assert told([row(task=place // 30, labels=place % 2, idx=place) for place in range(60)]) == set()
    assert told(both[:1] * 9) == {"SL121"}  # no row chooses the other one
    # what cannot be read says nothing, and then the values of the inputs do
    assert told(iter(both)) == set()
    assert told([["no columns"]]) == set()
    assert told(both, collator=lambda rows: 1 / 0) == set()
    assert told(both, collator=lambda rows: (torch.rand(2), default_data_collator(rows))[1]) == set()


class Alternates(Chooses):
    """Two heads that take turns from step to step."""

    steps = 0

    def forward(self, input_ids: Any, attention_mask: Any = None, labels: Any = None) -> Any:  # type: ignore[override]
        self.steps += 1
        turn = torch.full_like(input_ids[:, 0], self.steps % 2)
        return super().forward(input_ids, attention_mask, turn, labels[:, 0])


def test_heads_that_take_turns_are_trained() -> None:
    model = Alternates()
    assert codes(model, STEP) == {}
    assert model.steps == 0


WITHOUT_VALUES: dict[str, PeftConfig] = {
    "prompt": PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
    "prefix": PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
    "encoder": PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=3, encoder_hidden_size=16),
    "saved head": PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3, modules_to_save=["lm_head"]),
    "mica": LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights="mica"),
}


@pytest.mark.parametrize("name", WITHOUT_VALUES)
def test_an_adapter_on_a_model_without_values_is_saved_as_on_one_with_them(name: str) -> None:
    config = LlamaConfig(**SIZES, dtype="bfloat16")
    step = Workload.train(2, 16, adapter=copy.deepcopy(WITHOUT_VALUES[name]))
    assert audit_model(config, step).findings == ()
    if name != "mica":  # which peft itself computes of values
        assert codes(get_peft_model(meta_model(config), copy.deepcopy(WITHOUT_VALUES[name])), STEP) == {}
