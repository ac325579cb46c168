"""The columns of docs/methods.md on loading: the load, training after it, a later adapter, a hot swap."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from loaded_models import TOKENS, two_steps
from method_table import Bench, Cell, Column
from peft import PeftModel
from peft.utils.hotswap import hotswap_adapter

from safe_loading import AdapterError, load_adapter_on_rank, load_peft_on_rank

Tensors = dict[str, torch.Tensor]


def load(method: str, bench: Bench) -> str:
    """The tensors and the logits after a load, against peft's own load."""
    adapter = bench.adapter(method)
    ours, plain = load_peft_on_rank(bench.base, adapter), two_steps(adapter, bench.base)
    assert not ours.training
    _same(_tensors(ours), _tensors(plain))
    _same(_logits(ours), _logits(plain))
    return Cell.EXACT


def train(method: str, bench: Bench) -> str:
    """What is trained, and every tensor after three steps, against peft's own load."""
    adapter = bench.adapter(method)
    truth = two_steps(adapter, bench.base)
    plain = _unless(ValueError, lambda: two_steps(adapter, bench.base, is_trainable=True))
    ours = _unless(AdapterError, lambda: load_peft_on_rank(bench.base, adapter, is_trainable=True))
    if ours is None:
        assert plain is None, "peft can"
        return Cell.NEITHER
    # The finished adapter is what training goes on from.
    _same(_logits(ours.eval()), _logits(truth))
    if plain is None:
        before = _tensors(ours)
        after = _after_three_steps(ours)
        assert any(not torch.equal(after[name], before[name]) for name in before), "nothing was trained"
        return Cell.ONLY_HERE
    assert _trained(ours) == _trained(plain)
    _same_noise(ours, plain)
    _same(_after_three_steps(ours), _after_three_steps(plain))
    return Cell.EXACT


def later(method: str, bench: Bench) -> str:
    """The logits of both of two adapters, each against those of peft's load of it alone."""
    first, second = bench.adapter(method), bench.adapter(method, seed=2)
    truth = _logits(two_steps(first, bench.base)), _logits(two_steps(second, bench.base))

    def both(model: PeftModel) -> tuple[torch.Tensor, torch.Tensor]:
        before = _logits(model)
        model.set_adapter("second")
        return before, _logits(model)

    def with_peft() -> PeftModel:
        model = two_steps(first, bench.base)
        model.load_adapter(str(second), "second", autocast_adapter_dtype=False)
        return model

    def with_ours() -> PeftModel:
        model = load_peft_on_rank(bench.base, first)
        load_adapter_on_rank(model, second, "second")
        return model

    plain, ours = _unless(ValueError, with_peft), _unless(AdapterError, with_ours)
    if ours is None:
        assert plain is None, "peft can"
        return Cell.NEITHER
    _same(both(ours), truth)
    return Cell.EXACT if plain is not None and _equal(both(plain), truth) else Cell.ONLY_HERE


def hot_swap(method: str, bench: Bench) -> str:
    """The logits after a hot swap, against peft's load of the second adapter alone."""
    first, second = bench.adapter(method), bench.adapter(method, seed=2)
    truth = _logits(two_steps(second, bench.base))

    def with_peft() -> PeftModel:
        model = two_steps(first, bench.base)
        hotswap_adapter(model, str(second), "default")
        return model

    def with_ours() -> PeftModel:
        model = load_peft_on_rank(bench.base, first)
        load_adapter_on_rank(model, second, "default", hotswap=True)
        return model

    plain, ours = _unless((ValueError, KeyError, AttributeError), with_peft), _unless(AdapterError, with_ours)
    if ours is None:
        assert plain is None, "peft can"
        return Cell.NEITHER
    _same(_logits(ours), truth)
    return Cell.EXACT if plain is not None and _equal(_logits(plain), truth) else Cell.ONLY_HERE


COLUMNS: Mapping[str, Column] = {"load": load, "train": train, "later adapter": later, "hot swap": hot_swap}


def _unless(errors: Any, make: Callable[[], PeftModel]) -> PeftModel | None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return make()
        except errors:
            return None


def _logits(model: PeftModel) -> torch.Tensor:
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)  # MonteCLoRA and PVeRA may sample
        return model(input_ids=TOKENS, **_extra_inputs(model)).logits


def _extra_inputs(model: PeftModel) -> dict[str, torch.Tensor]:
    config = model.active_peft_config
    several = any(hasattr(config, name) for name in ("num_tasks", "n_tasks"))
    return {"task_ids": torch.zeros(len(TOKENS), dtype=torch.long)} if several else {}


def _tensors(model: torch.nn.Module) -> Tensors:
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return {name: tensor.detach().clone() for name, tensor in named}


def _trained(model: torch.nn.Module) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def _after_three_steps(model: PeftModel) -> Tensors:
    model.train()
    optimizer = torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad], lr=1e-2)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        for _ in range(3):
            model(input_ids=TOKENS, labels=TOKENS, **_extra_inputs(model)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return _tensors(model)


def _same_noise(ours: torch.nn.Module, plain: torch.nn.Module) -> None:
    """Give both the random numbers that MonteCLoRA draws when it is built; the others draw theirs in the forward."""
    for one, other in zip(ours.modules(), plain.modules(), strict=True):
        if hasattr(other, "sampler"):
            one.sampler.buffer = other.sampler.buffer


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def _same(one: Any, other: Any) -> None:
    """Assert that tensors, pairs or mappings of them are equal bit by bit."""
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        different = [name for name in one if not torch.equal(one[name], other[name])]
        assert not different, different
    else:
        assert _equal(one, other)
