"""What people lost without a word, by the threads of the trackers: found before the training, and nothing else found.

A seeded sample is audited, and a smaller one trained and loaded again, by default; every script and every method of
peft with ``-m ''``.
"""

from __future__ import annotations

import random
import types
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import silent_losses  # noqa: F401  # enters its scripts
import silent_modules  # noqa: F401  # enters its scripts
import silent_numbers  # noqa: F401  # enters its scripts
import silent_untrained  # noqa: F401  # enters its scripts
import torch
from adapter_methods import METHODS
from peft import PeftModel, get_peft_model
from silent_scripts import SILENT, TOKENS, TROUBLES, Script, adamw, adapted, base, trained
from torch import nn
from transformers import AutoModelForCausalLM

from safe_loading import Workload, audit_model

STEPS = 3


def sampled(names: Iterable[str], count: int) -> list[Any]:
    """All names, of which some run by default."""
    own = sorted(names)
    some = random.Random(35).sample(own, count)
    return [pytest.param(name, marks=[] if name in some else pytest.mark.slow) for name in own]


# An adapter of these methods is healthy, and an audit says so much of it.
KNOWN = {
    "FRoD": {"SL126"},  # no trace follows sparse tensors
    "SHiRA": {"SL126"},
    "MonteCLoRA": {"SL126"},  # it draws on a GPU
    "Shadow": {"SL121"},  # its last layer has an update that nothing reads
}


@pytest.fixture(autouse=True)
def quietly() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def inputs_of(script: Script) -> dict[str, torch.Tensor]:
    inputs = {"input_ids": TOKENS, "attention_mask": torch.ones_like(TOKENS), "labels": TOKENS}
    inputs |= script.inputs
    if script.inputs.get("input_ids") is not None:
        inputs["labels"] = inputs["input_ids"]
    return {name: value for name, value in inputs.items() if value is not None}


def happens(script: Script, folder: Path) -> set[str]:
    """Train for three steps, save and load, and return the troubles that were seen."""
    model, inputs = script.model, inputs_of(script)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = script.optimizer or adamw(trained(model))
    for step in range(STEPS):
        loss = model(**inputs).loss
        (
            loss if loss.requires_grad else loss.requires_grad_()
        ).backward()  # as trainers do whose step switches adapters
        optimizer.step()
        script.after_a_step(step)
        optimizer.zero_grad()
    after = dict(model.named_parameters())
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    wanted = {name for name in before if any(part in name for part in script.trains)}
    assert wanted
    troubles = script.also()
    troubles |= {"untrained"} if wanted - moved else set()
    troubles |= {"moved"} if any(part in name for part in script.keeps for name in moved) else set()
    return troubles | ({"lost"} if not torch.allclose(*_losses(script, model, inputs, folder), atol=1e-5) else set())


def _losses(script: Script, model: Any, inputs: dict[str, Any], folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss of the model, and that of the one that is loaded from what it saved."""
    saved = folder / "saved"
    saved.mkdir()
    (script.save or model.save_pretrained)(saved)
    if script.again is not None:
        again = script.again(saved)
    elif isinstance(model, PeftModel):
        again = PeftModel.from_pretrained(base(), saved)
    else:
        again = type(model).from_pretrained(saved, dtype=torch.float32)
    with torch.no_grad():
        return model.eval()(**inputs).loss, again.eval()(**inputs).loss


def found(script: Script) -> dict[str, str]:
    trainer = None
    if script.arguments is not None or script.trainer is not None:
        arguments = types.SimpleNamespace(**(script.arguments or {}))
        trainer = types.SimpleNamespace(model=script.model, args=arguments, optimizer=None, **(script.trainer or {}))
    workload = Workload.train(2, 16, gradient_checkpointing=script.recomputes)
    inputs = {name: value for name, value in script.inputs.items() if value is not None}
    options: dict[str, Any] = {"inputs": inputs or None, "round_trip": script.round_trip, "forecast": False}
    report = audit_model(script.model, workload, trainer, script.optimizer, **options)
    return {finding.code: finding.severity for finding in report.findings}


def warned(script: Script) -> set[str]:
    return {code for code, severity in found(script).items() if severity != "info"}


@pytest.mark.parametrize("name", sampled(TROUBLES, 16))
def test_a_trouble_is_found_before_the_training_and_its_healthy_twin_is_not(name: str, tmp_path: Path) -> None:
    trouble = TROUBLES[name]
    (tmp_path / "right").mkdir()
    if trouble.code is not None:
        assert trouble.code in found(trouble.make(False, tmp_path))
    else:
        assert warned(trouble.make(False, tmp_path)) == set()
    assert warned(trouble.make(True, tmp_path / "right")) == set()


@pytest.mark.parametrize("name", sampled(TROUBLES, 8))
def test_what_is_lost_is_seen_after_three_steps(name: str, tmp_path: Path) -> None:
    trouble = TROUBLES[name]
    (tmp_path / "right").mkdir()
    assert happens(trouble.make(False, tmp_path), tmp_path) == set(filter(None, trouble.seen.split(", ")))
    assert happens(trouble.make(True, tmp_path / "right"), tmp_path / "right") == set()


def test_each_trouble_that_is_not_found_has_its_reason() -> None:
    assert set(SILENT) == {name for name, trouble in TROUBLES.items() if trouble.code is None and trouble.seen}


@pytest.mark.parametrize("method", sampled(METHODS, 12))
def test_nothing_is_found_on_a_healthy_adapter_of_any_method(method: str, tmp_path: Path) -> None:
    assert healthy(method, tmp_path) == KNOWN.get(method, set())


@pytest.mark.parametrize("method", ["LoRA", "LoRA, trainable tokens", "Trainable tokens", "IA3"])
def test_nothing_is_found_where_embeddings_and_head_are_tied(method: str, tmp_path: Path) -> None:
    assert healthy(method, tmp_path, tie_word_embeddings=True) == set()


@pytest.mark.parametrize("saved", [["lm_head"], ["embed_tokens"], ["embed_tokens", "lm_head"]])
def test_a_copy_of_a_tied_part_is_told_with_the_field_that_ties_it(saved: list[str]) -> None:
    def told(**config: bool) -> dict[str, str | None]:
        model: Any = adapted(base(tie_word_embeddings=True), modules_to_save=list(saved), **config)
        report = audit_model(model, Workload.train(2, 16), forecast=False)
        return {finding.code: finding.fix for finding in report.findings}

    assert told() == {"SL111": "LoraConfig(ensure_weight_tying=True) trains one copy for both."}
    assert told(ensure_weight_tying=True) == {}


@pytest.mark.parametrize("method", ["LoRA, trainable tokens", "AdaLoRA", "KaSA", "Adaption prompt"])
def test_the_tensors_of_a_method_are_not_taken_for_the_base(method: str, tmp_path: Path) -> None:
    assert healthy(method, tmp_path) == set()


def healthy(method: str, folder: Path, **config: Any) -> set[str]:
    base(**config).save_pretrained(folder)
    with torch.random.fork_rng(devices=[]):
        plain: Any = AutoModelForCausalLM.from_pretrained(folder)
        model: nn.Module = get_peft_model(plain, METHODS[method].make()).train()
        report = audit_model(model, Workload.train(2, 16), forecast=False, round_trip=True)
    return {finding.code for finding in report.findings} - {"SL108"}  # it is saved in float32
