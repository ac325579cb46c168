"""One parameter under several names stays one, whatever materialises it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from models import save_llama

from safe_loading import meta_model
from safe_loading._sharding.ties import Tie, record_ties, restore_ties


def test_to_empty_unties_and_the_record_ties_again(tmp_path: Path) -> None:
    model: Any = meta_model(save_llama(tmp_path, tie_word_embeddings=True))
    ties = record_ties(model)
    assert ties == (Tie(("model.embed_tokens.weight", "lm_head.weight")),)
    model.to_empty(device="cpu")
    assert model.lm_head.weight is not model.model.embed_tokens.weight  # the trap
    assert record_ties(model) == ties, "the class still declares it"
    restore_ties(model, ties)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_an_untied_model_has_no_ties(tmp_path: Path) -> None:
    assert record_ties(meta_model(save_llama(tmp_path))) == ()


def plain() -> Any:
    model: Any = torch.nn.Module()
    model.one, model.two, model.three = (torch.nn.Linear(3, 3) for _ in range(3))
    model.two.weight = model.one.weight
    model.three.bias = model.one.bias
    model.two.bias = model.one.bias
    return model


def test_plain_modules_are_tied_by_identity_on_any_device() -> None:
    wanted = (Tie(("one.weight", "two.weight")), Tie(("one.bias", "two.bias", "three.bias")))
    assert record_ties(plain()) == wanted
    with torch.device("meta"):
        model = plain()
    assert record_ties(model) == wanted
    model.to_empty(device="cpu")
    assert record_ties(model) == ()
    restore_ties(model, wanted)
    assert record_ties(model) == wanted
    assert len([*model.parameters()]) == 3


def test_parameters_over_the_same_memory_are_a_tie_and_views_of_a_part_are_not() -> None:
    model: Any = torch.nn.Module()
    model.one, model.two, model.three = (torch.nn.Linear(3, 3, bias=False, device="meta") for _ in range(3))
    model.two.weight = torch.nn.Parameter(model.one.weight.data)
    model.three.weight = torch.nn.Parameter(model.one.weight.data[:2])
    assert record_ties(model) == (Tie(("one.weight", "two.weight")),)


def test_shared_modules_and_buffers_are_ties_and_wrappers_do_not_change_the_names() -> None:
    model: Any = torch.nn.Module()
    model.norm = torch.nn.BatchNorm1d(3)
    model.again = model.norm
    model._orig_mod = torch.nn.Module()
    model._orig_mod.head = torch.nn.Linear(3, 3, bias=False)
    model.tail = torch.nn.Linear(3, 3, bias=False)
    model.tail.weight = model._orig_mod.head.weight
    ties = record_ties(model)
    assert Tie(("norm.running_mean", "again.running_mean")) in ties
    assert Tie(("head.weight", "tail.weight")) in ties
    model.tail.weight = torch.nn.Parameter(torch.ones(3, 3))
    restore_ties(model, ties)
    assert model.tail.weight is model._orig_mod.head.weight
