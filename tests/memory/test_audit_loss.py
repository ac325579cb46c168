"""What the audit finds in a loss over several micro-batches, compared with the gradients of the real Trainer."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from models import SIZES as THREE_LAYERS
from test_audit_model import Wrapper
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from wrapped_models import AuxLoss, Count, llama, peft_llama

from safe_loading import Transparent, Workload, audit_model, wrap_transparent

STEP = Workload.train(1, 8)
SIZES = {**THREE_LAYERS, "num_hidden_layers": 1}
LENGTHS = (8, 3, 5, 2, 7, 4, 6, 8)
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


class Dropping(Wrapper):
    """A wrapper that takes the number of tokens and drops it."""

    def forward(self, input_ids: Any, attention_mask: Any = None, labels: Any = None, **kwargs: Any) -> Any:
        return super().forward(input_ids, attention_mask, labels)


class Passing(Wrapper):
    """A wrapper that passes every argument on."""

    def forward(self, input_ids: Any, attention_mask: Any = None, labels: Any = None, **kwargs: Any) -> Any:
        return self.model(input_ids=input_ids, attention_mask=attention_mask, labels=labels, **kwargs)


class DroppingMixin(Transparent):
    """User code that copies its arguments, and passes three of them on."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        moved = {name: value.clone() if torch.is_tensor(value) else value for name, value in kwargs.items()}
        return super().__call__(**{name: moved.get(name) for name in ("input_ids", "attention_mask", "labels")})


class OwnLoss(LlamaForCausalLM):
    """A loss of its own, divided as the Trainer expects: by a Python number here, not by the tensor."""

    def forward(self, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:
        count = kwargs.pop("num_items_in_batch", None)
        out = super().forward(input_ids, **kwargs)
        total = nn.functional.cross_entropy(out.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
        out.loss = total / (labels[:, 1:] != -100).sum() if count is None else total / int(count.sum())
        return out


class Forgetful(LlamaForCausalLM):
    """The mean over its own tokens, whatever the Trainer passes."""

    def forward(self, input_ids: Any = None, labels: Any = None, num_items_in_batch: Any = None, **kwargs: Any) -> Any:
        return super().forward(input_ids, labels=labels, **kwargs)


def ragged(row: int) -> list[int]:
    return [row + 1] * LENGTHS[row] + [-100] * (8 - LENGTHS[row])


def row_class(row: int) -> int:
    return row % 3


def _causal() -> Any:
    return llama(num_hidden_layers=1)


def _adapted() -> Any:
    return peft_llama(_causal())


def _classifier() -> Any:
    return LlamaForSequenceClassification(LlamaConfig(**SIZES, num_labels=3, pad_token_id=0))


def _t5() -> Any:
    sizes = {"d_model": 32, "d_ff": 64, "num_layers": 1, "num_heads": 4, "d_kv": 8, "dropout_rate": 0.0}
    return T5ForConditionalGeneration(T5Config(**sizes, vocab_size=101, decoder_start_token_id=0))


def _bert() -> Any:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    return BertForMaskedLM(BertConfig(**sizes, **NO_DROPOUT, vocab_size=101))


# by case: model, labels of a row, severity with several micro-batches, and severity without a trainer
CASES: dict[str, tuple[Callable[[], Any], Callable[[int], Any], str | None, str | None]] = {
    "causal": (_causal, ragged, None, None),
    "peft": (_adapted, ragged, None, None),
    "transparent": (lambda: wrap_transparent(_adapted(), Count), ragged, None, None),
    "transparent with a term": (lambda: wrap_transparent(_causal(), AuxLoss, coefficient=0.0), ragged, None, None),
    "a wrapper that passes all on": (lambda: Passing(_adapted()), ragged, None, None),
    "own loss": (lambda: OwnLoss(LlamaConfig(**SIZES)), ragged, None, None),
    "forgetful": (lambda: Forgetful(LlamaConfig(**SIZES)), ragged, "error", "warning"),
    "a wrapper with names": (lambda: Wrapper(_adapted()), ragged, "error", "error"),
    "a wrapper that drops": (lambda: Dropping(_adapted()), ragged, "error", "warning"),
    "a mixin that drops": (lambda: wrap_transparent(_adapted(), DroppingMixin), ragged, "error", "warning"),
    # heads of transformers itself: none divides by the number that the Trainer passes because of their **kwargs
    "masked": (_bert, ragged, "error", None),
    "classifier": (_classifier, row_class, "error", None),
    "encoder-decoder": (_t5, ragged, "error", None),
    # as the bare classifier, whose rows all weigh the same
    "a wrapper with names, of a classifier": (lambda: Wrapper(_classifier()), row_class, None, None),
}


# run through the Trainer in every test run; the others are slow
WITH_TRAINER = {
    "causal",
    "transparent with a term",
    "own loss",
    "forgetful",
    "a wrapper with names",
    "a mixin that drops",
    "classifier",
    "a wrapper with names, of a classifier",
}


class Gradients(TrainerCallback):
    """Keeps the gradients that the optimizer is about to use."""

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: nn.Module, **kwargs: Any) -> None:
        self.kept = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def trainer_of(model: Any, labels: Callable[[int], Any], folder: Path, steps: int, kind: Any = Trainer) -> Any:
    options = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=8 // steps,
        gradient_accumulation_steps=steps,
        max_steps=1,
        max_grad_norm=0.0,
        optim="sgd",
        report_to=[],
        use_cpu=True,
        save_strategy="no",
        disable_tqdm=True,
    )
    rows: Any = [{"input_ids": [row + 1] * 8, "labels": labels(row)} for row in range(8)]
    return kind(copy.deepcopy(model), options, train_dataset=rows)


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[] if case in WITH_TRAINER else [pytest.mark.slow]) for case in CASES]
)
def test_the_finding_is_there_when_the_gradients_of_micro_batches_are_wrong(case: str, tmp_path: Path) -> None:
    make, labels, found, _ = CASES[case]
    torch.manual_seed(0)
    model, gradients = make(), []
    for steps in (1, 4):
        trainer = trainer_of(model, labels, tmp_path, steps)
        trainer.add_callback(kept := Gradients())
        trainer.train()
        gradients.append(kept.kept)
        if steps > 1 or found:
            findings = audit_model(trainer.model, trainer=trainer).findings
            assert [f.severity for f in findings if f.code == "SL119"] == ([found] if found and steps > 1 else [])
    assert torch.allclose(*gradients, rtol=1e-3, atol=1e-6) is (found is None)


@pytest.mark.parametrize("case", CASES)
def test_the_finding_without_a_trainer(case: str) -> None:
    make, _, _, found = CASES[case]
    report = audit_model(make(), STEP, forecast=False)
    assert "step" in report.checked
    assert [f.severity for f in report.findings if f.code == "SL119"] == ([found] if found else [])


def test_the_size_of_the_error_and_the_fix() -> None:
    model, step = _classifier(), STEP.replace(gradient_accumulation_steps=4)
    [finding] = audit_model(model, step, forecast=False).findings
    assert "4 times too large" in finding.message
    assert "accepts_loss_kwargs = False" in finding.fix
    model.accepts_loss_kwargs = False
    assert audit_model(model, step, forecast=False).ok


class Ranking(Wrapper):
    """A cross-encoder: a loss over the scores of rows, in which no token counts."""

    def forward(self, input_ids: Any, attention_mask: Any = None, labels: Any = None) -> Any:
        out = self.model(input_ids=input_ids, attention_mask=attention_mask)
        out.loss = nn.functional.logsigmoid(out.logits[:, -1, 5]).neg().mean()
        return out


def test_a_wrapper_with_a_loss_of_its_own_loses_no_number_of_tokens(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, gradients = Ranking(_adapted()), []
    for steps in (1, 4):
        trainer = trainer_of(model, ragged, tmp_path, steps)
        trainer.add_callback(kept := Gradients())
        trainer.train()
        gradients.append(kept.kept)
    assert torch.allclose(*gradients, rtol=1e-3, atol=1e-6)
    for given in ({}, {"trainer": trainer}):
        assert "SL119" not in {f.code for f in audit_model(trainer.model, STEP, **given, forecast=False).findings}
    assert not trainer.model.model._forward_pre_hooks


class Delegating(Trainer):
    """Adds to the loss that the Trainer reads."""

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return 2 * super().compute_loss(*args, **kwargs)


class FromLogits(Trainer):
    """A loss of its own, as trl's trainers have."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        return model(**inputs).logits.square().mean()


@pytest.mark.parametrize(("kind", "expected"), [(Delegating, {"SL119"}), (FromLogits, {"SL125"})])
def test_a_trainer_of_ones_own(kind: type[Trainer], expected: set[str], tmp_path: Path) -> None:
    class Both(AuxLoss, DroppingMixin):
        pass

    trainer = trainer_of(wrap_transparent(_adapted(), Both), ragged, tmp_path, 4, kind)
    found = {f.code for f in audit_model(trainer.model, trainer=trainer).findings}
    assert found & {"SL119", "SL125"} == expected


def test_a_trainer_that_divides_itself(tmp_path: Path) -> None:
    trainer = trainer_of(wrap_transparent(_adapted(), DroppingMixin), ragged, tmp_path, 4)
    for name, value in (
        ("model_accepts_loss_kwargs", False),
        ("loss_is_scaled_for_ga", False),
        ("compute_loss_func", lambda out, labels, num_items_in_batch: out.logits.sum() / num_items_in_batch),
    ):
        with mock.patch.object(trainer, name, value):
            assert "SL119" not in {f.code for f in audit_model(trainer.model, trainer=trainer).findings}
