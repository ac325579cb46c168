"""What a script has hung on a parameter: its attributes stay with the one that FSDP trains, its hooks are refused."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
from fsdp_cases import llama, on_meta, plain, reference, whole
from torch import nn

from safe_loading import ArgumentError, wrap_fsdp_meta_safe

pytestmark = pytest.mark.usefixtures("one_rank")
VERSIONS: list[Literal[1, 2]] = [1, 2]


def model_with_notes(make: Any) -> Any:
    """Return a model as Mamba and S4 make theirs: their optimizers read attributes of parameters."""
    model = make(lambda: llama(num_hidden_layers=2))
    for name, parameter in model.named_parameters():
        parameter.note = name
    return model


@pytest.mark.parametrize("ignored", [None, ["model.norm"]], ids=["all", "one kept whole"])
@pytest.mark.parametrize("make", [reference, on_meta])
@pytest.mark.parametrize("version", VERSIONS)
def test_attributes_of_parameters_stay(version: Literal[1, 2], make: Any, ignored: Any) -> None:
    state = None if make is reference else reference(lambda: llama(num_hidden_layers=2)).state_dict()
    model = wrap_fsdp_meta_safe(model_with_notes(make), state, version=version, ignored_params=ignored)
    noted = {plain(name): getattr(parameter, "note", None) for name, parameter in model.named_parameters()}
    assert noted == {name: name for name in noted}


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
@pytest.mark.parametrize("version", VERSIONS)
def test_hooks_on_gradients_are_refused_by_name(version: Literal[1, 2], kind: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    frozen: Any = model[0].bias
    frozen.register_hook(lambda grad: grad * 0)
    frozen.requires_grad_(False)
    weight: Any = model[1].weight
    handle = getattr(weight, kind)(lambda of: of * 0)
    with pytest.raises(ArgumentError, match=r"1\.weight has a hook on its gradient") as refused:
        wrap_fsdp_meta_safe(model, version=version)
    assert "0.bias" not in str(refused.value)
    assert model[1].weight is weight
    # the road that it names
    handle.remove()
    wrapped: Any = wrap_fsdp_meta_safe(model, version=version)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=1.0)
    before = [parameter.detach().clone() for parameter in wrapped.parameters()]
    wrapped(torch.ones(2, 4)).sum().backward()
    (trained,) = [each for name, each in wrapped.named_parameters() if plain(name) == "1.weight"]
    trained.grad.mul_(0)
    optimizer.step()
    moved = [not torch.equal(one, other) for one, other in zip(before, wrapped.parameters(), strict=True)]
    assert moved == [True, False, False, True]


@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen since"])
@pytest.mark.parametrize("version", VERSIONS)
def test_gradients_are_refused_by_name(version: Literal[1, 2], frozen: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    one: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    one.load_state_dict(model.state_dict())
    for each in (one, model):
        each[1](torch.ones(2, 4)).sum().backward()
        each[1].requires_grad_(not frozen)
    bias, gradient = model[1].bias, model[1].bias.grad
    with pytest.raises(ArgumentError, match=r"1\.\w+, 1\.\w+ have gradients, which would be lost: call the optimizer"):
        wrap_fsdp_meta_safe(model, version=version)
    assert model[1].bias is bias
    assert bias.grad is gradient
    # the road that it names
    for each in (one, model):
        torch.optim.SGD(each.parameters(), lr=1.0).step()
        each.zero_grad()
    wrapped: Any = wrap_fsdp_meta_safe(model, version=version)
    for each in (one, wrapped):
        optimizer = torch.optim.SGD(each.parameters(), lr=1.0)
        each(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    after = {plain(name): whole(value) for name, value in wrapped.state_dict().items()}
    assert all(torch.equal(after[name], value) for name, value in one.state_dict().items())
