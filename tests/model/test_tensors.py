"""The inventory of a model's tensors."""

from __future__ import annotations

import torch
from torch import nn

from safe_loading._model.tensors import all_names, inventory, tensor_places


class Shared(nn.Module):
    """A tied weight, a module in two places, and buffers of either kind."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 3)
        self.block = nn.BatchNorm1d(3)
        self.again = self.block
        self.head = nn.Linear(3, 4, bias=False)
        self.head.weight = self.embed.weight
        self.nothing = None
        self.register_buffer("table", torch.zeros(2), persistent=False)


def test_every_tensor_is_listed_once_with_all_its_names() -> None:
    model = Shared()
    by_name = {tensor.name: tensor for tensor in inventory(model)}
    assert by_name["embed.weight"].names == ("embed.weight", "head.weight")
    assert by_name["block.running_mean"].names == ("block.running_mean", "again.running_mean")
    assert {name for tensor in by_name.values() for name in tensor.names} == {
        name for named in (model.named_parameters, model.named_buffers) for name, _ in named(remove_duplicate=False)
    }
    assert [tensor.name for tensor in by_name.values() if not tensor.is_buffer] == [
        n for n, _ in model.named_parameters()
    ]
    assert [tensor.name for tensor in by_name.values() if tensor.is_buffer] == [n for n, _ in model.named_buffers()]
    assert all_names(model)["again.bias"] == ("block.bias", "again.bias")


def test_what_is_persistent_is_what_a_state_dict_contains() -> None:
    model = Shared()
    assert [place.name for place in tensor_places(model) if place.persistent] == list(model.state_dict())
    assert [tensor.name for tensor in inventory(model) if not tensor.persistent] == ["table"]


def test_a_buffer_is_persistent_when_one_of_its_names_is() -> None:
    model = nn.Module()
    kept, hidden = nn.Module(), nn.Module()
    table = torch.zeros(2)
    hidden.register_buffer("table", table, persistent=False)
    kept.register_buffer("table", table)
    model.add_module("hidden", hidden)
    model.add_module("kept", kept)
    (tensor,) = inventory(model)
    assert tensor.persistent
    assert [place.persistent for place in tensor_places(model)] == [False, True]


def test_a_tensor_is_put_in_all_its_places() -> None:
    model = Shared()
    values = {tensor.name: tensor for tensor in inventory(model)}
    new = nn.Parameter(torch.ones(4, 3))
    values["embed.weight"].put(new)
    assert model.embed.weight is new
    assert model.head.weight is new
    mean = torch.ones(3)
    values["block.running_mean"].put(mean)
    assert model.again.running_mean is mean


def test_a_module_in_two_places_is_walked_once_on_request() -> None:
    names = [place.name for place in tensor_places(Shared(), repeats=False)]
    assert "block.weight" in names
    assert "again.weight" not in names


def test_a_parameter_that_is_a_buffer_too_is_listed_as_each() -> None:
    model = nn.Linear(2, 2, bias=False)
    model.register_buffer("copy", model.weight)
    assert [(tensor.name, tensor.is_buffer) for tensor in inventory(model)] == [("weight", False), ("copy", True)]
