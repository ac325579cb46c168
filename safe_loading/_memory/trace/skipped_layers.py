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
    number: int = -1  # of the layer that begins, or of the unit whose gradient is there


class SkippedLayers:
    """The layers of a model that do not run, and the moments at which the others did."""

    def __init__(self, lists: Sequence[RepeatedLayers], ledger: Ledger) -> None:
        self.lists = list(lists)
        self.marks: list[Moment] = []
        self.reached = False  # whether a layer was called
        self.gradients: dict[int, tuple[str, str]] = {}  # of a layer that ran: its prefix, and the parameter inside it
        self.copied: dict[tuple[str, str], int] = {}  # the same of those that did not run
        self._ledger = ledger
        self._others: dict[int, list[weakref.ref[torch.Tensor] | None]] = {}  # of a tuple that a layer returned last
        self._changed: dict[torch.nn.Module, dict[str, Any]] = {}  # what a layer that hands on had in these attributes

    def inner_modules(self) -> set[torch.nn.Module]:
        """Return the modules inside the layers that run in no case."""
        layers = (
            each.layers[number]
            for each in self.lists
            for number in each.skipped_layers()
            if each.by_period is None or number in each.by_period.skipped_layers()
        )
        return {module for layer in layers for module in layer.modules() if module is not layer}

    def install(self) -> None:
        """Note when layers begin, and let the skipped ones hand their input on; the caller's snapshot undoes it."""
        for place, each in enumerate(self.lists):
            for number, layer in enumerate(each.layers):
                layer.register_forward_pre_hook(
                    functools.partial(self._begins, place, number), with_kwargs=True, prepend=True
                )
                layer.register_forward_hook(functools.partial(self._ends, place, number))
            self._skip(place)

    def _skip(self, place: int) -> None:
        """Let the layers of a list that are to be skipped hand on their input, and the others run."""
        skipped = self.lists[place].skipped_layers()
        for number, layer in enumerate(self.lists[place].layers):
            own = vars(layer)
            if number in skipped and layer not in self._changed:
                changes = {"forward": functools.partial(self._hand_on, place), "gradient_checkpointing": False}
                self._changed[layer] = {name: own[name] for name in changes if name in own}
                own |= changes
            elif number not in skipped and layer in self._changed:
                del own["forward"], own["gradient_checkpointing"]
                own |= self._changed.pop(layer)

    def _begins(self, place: int, number: int, _: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.reached = True
        if self._ledger.phase != "forward":
            return  # a checkpoint computes it again
        self.marks.append(Moment(len(self._ledger.events), "layer", place, number))
        each = self.lists[place]
        unit = next((unit for unit, layers in enumerate(each.units) if layers[0] == number), 0)
        node = _hidden(args, kwargs).grad_fn
        if unit and node is not None and unit - 1 not in each.skipped:
            node.register_prehook(functools.partial(self._goes_back, place, unit - 1))

    def _goes_back(self, place: int, unit: int, _: object) -> None:
        self.marks.append(Moment(len(self._ledger.events), "gradient", place, unit))

    def _ends(self, place: int, number: int, _: object, __: object, output: object) -> None:
        if not isinstance(output, tuple):
            return
        # not kept alive: the model holds what it passes on to the next layer
        self._others[place] = [None if each is None else weakref.ref(each) for each in output[1:]]
        by_period = self.lists[place].by_period
        if by_period is not None and any(self._others[place]) and number < min(self.lists[place].skipped_layers()):
            # what layers of one kind pass to those of another one goes further than to the next of those that run
            self.lists[place] = by_period
            self._skip(place)

    def _hand_on(self, place: int, *args: Any, **kwargs: Any) -> Any:
        hidden, others = _hidden(args, kwargs), self._others.get(place)
        return hidden if others is None else (hidden, *(each if each is None else each() for each in others))

    def note(self, kind: Literal["forward", "backward", "end"]) -> None:
        """Note that a pass begins, or that the backward pass has ended."""
        self.marks.append(Moment(len(self._ledger.events), kind))

    def bring_gradients(self) -> None:
        """Give the parameters of skipped layers gradients like those of the layer that stands for them."""
        for each in self.lists:
            skipped = each.skipped_layers()
            for number, layer in enumerate(each.layers):
                for name, parameter in layer.named_parameters() if number not in skipped else ():
                    if parameter.grad is not None:
                        index = self._ledger.index_of(parameter.grad)
                        self.gradients[-1 if index is None else index] = (each.prefix(number), name)
            for number, template in skipped.items():
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
