"""A trace that runs a few of its equal layers: the others hand their input on, and get gradients as those that ran."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch

from .ledger import Ledger
from .repeated_layers import RepeatedLayers
from .trained_parameters import TrainedParameters


class Moment(NamedTuple):
    """A moment of a trace, by the number of events before it."""

    at: int
    kind: Literal["forward", "layer", "backward", "gradient", "end"]  # of a pass, or of a layer's forward or backward
    layers: int = -1  # the place of the layer's list
    number: int = -1


class SkippedLayers:
    """The layers of a model that do not run, and the moments at which the others did."""

    def __init__(self, lists: Sequence[RepeatedLayers], ledger: Ledger) -> None:
        self.lists = lists
        self.marks: list[Moment] = []
        self.gradients: dict[int, tuple[str, str]] = {}  # of a layer that ran: its prefix, and the parameter inside it
        self.copied: dict[tuple[str, str], int] = {}  # the same of those that did not run
        self._ledger = ledger
        self._others: dict[int, list[weakref.ref[torch.Tensor] | None]] = {}  # of a tuple that a layer returned last

    def inner_modules(self) -> set[torch.nn.Module]:
        """Return the modules inside the layers that do not run."""
        layers = (each.layers[number] for each in self.lists for number in each.skipped)
        return {module for layer in layers for module in layer.modules() if module is not layer}

    def install(self) -> None:
        """Note when layers begin, and let the skipped ones hand their input on; the caller's snapshot undoes it."""
        for place, each in enumerate(self.lists):
            for number, layer in enumerate(each.layers):
                layer.register_forward_pre_hook(
                    functools.partial(self._begins, place, number), with_kwargs=True, prepend=True
                )
                if number in each.skipped:
                    vars(layer)["forward"] = functools.partial(self._hand_on, place)
                    vars(layer)["gradient_checkpointing"] = False
                else:
                    layer.register_forward_hook(functools.partial(self._ends, place))

    def _begins(self, place: int, number: int, _: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._ledger.phase != "forward":
            return  # a checkpoint computes it again
        self.marks.append(Moment(len(self._ledger.events), "layer", place, number))
        node = _hidden(args, kwargs).grad_fn
        if number and node is not None and number - 1 not in self.lists[place].skipped:
            before = functools.partial(self._goes_back, place, number - 1)
            node.register_prehook(before)

    def _goes_back(self, place: int, number: int, _: object) -> None:
        self.marks.append(Moment(len(self._ledger.events), "gradient", place, number))

    def _ends(self, place: int, _: object, __: object, output: object) -> None:
        if isinstance(output, tuple):  # not kept alive: the model holds what it passes on to the next layer
            self._others[place] = [None if each is None else weakref.ref(each) for each in output[1:]]

    def _hand_on(self, place: int, *args: Any, **kwargs: Any) -> Any:
        hidden, others = _hidden(args, kwargs), self._others.get(place)
        return hidden if others is None else (hidden, *(each if each is None else each() for each in others))

    def note(self, kind: Literal["forward", "backward", "end"]) -> None:
        """Note that a pass begins, or that the backward pass has ended."""
        self.marks.append(Moment(len(self._ledger.events), kind))

    def bring_gradients(self) -> None:
        """Give the parameters of skipped layers gradients like those of the layer that stands for them."""
        for each in self.lists:
            for number in each.run:
                for name, parameter in each.layers[number].named_parameters():
                    if parameter.grad is not None:
                        index = self._ledger.index_of(parameter.grad)
                        self.gradients[-1 if index is None else index] = (each.prefix(number), name)
            for number, template in each.skipped.items():
                like = dict(each.layers[template].named_parameters())
                for name, parameter in each.layers[number].named_parameters():
                    gradient = like[name].grad
                    if gradient is not None and parameter.grad is None:
                        parameter.grad = torch.empty_like(gradient)
                        index = self._ledger.index_of(parameter.grad)
                        self.copied[each.prefix(number), name] = -1 if index is None else index


class GradientsOfSkipped(TrainedParameters):
    """The parameters of a step on one device, some of whose layers do not run."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter], skipped: SkippedLayers) -> None:
        super().__init__(parameters)
        self._skipped = skipped

    def begin_micro_batch(self, last: bool) -> None:
        """Note the beginning of a forward pass."""
        self._skipped.note("forward")

    def begin_backward(self, last: bool) -> None:
        """Note the beginning of the backward pass."""
        self._skipped.note("backward")

    def bring_gradients(self, ledger: Ledger) -> None:
        """Note the end of the backward pass, and give skipped layers their gradients."""
        self._skipped.note("end")
        self._skipped.bring_gradients()


def _hidden(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    hidden = args[0] if args else kwargs["hidden_states"]
    if not isinstance(hidden, torch.Tensor):
        raise TypeError("the first argument of a layer is no tensor")
    return hidden
