"""A record of a traced step: the parameters that a gradient reaches, and the buffers that the forward pass changes."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator

import torch

from safe_loading._core.walk import hidden_parts


@dataclasses.dataclass
class StepRecord:
    """A step by the names of its parameters and buffers.

    Attributes:
        reached: The parameters to which a gradient came.
        hidden: Those of them that the model holds past torch, by their places: in a list, say.
        changed: The buffers that hold another tensor than before the forward pass, or whose tensor was written to.
    """

    reached: set[str] = dataclasses.field(default_factory=set)
    hidden: set[str] = dataclasses.field(default_factory=set)
    changed: set[str] = dataclasses.field(default_factory=set)


@contextlib.contextmanager
def recorded_step(model: torch.nn.Module) -> Iterator[StepRecord]:
    """Inside, record a step of a model."""
    recorder = _Recorder(model)
    with contextlib.ExitStack() as stack:
        for path, module in model.named_modules():
            stack.enter_context(module.register_forward_pre_hook(functools.partial(recorder.enter, path)))
        stack.callback(recorder.versions.clear)
        yield recorder.record


class _Recorder:
    """Looks at a model's tensors as its first module runs, when they are the fake ones of a trace."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.record = StepRecord()
        self.versions: dict[str, tuple[torch.Tensor, int]] = {}  # of the buffers before the forward pass
        self._model, self._begun = model, False
        self._watched: set[int] = set()

    def enter(self, path: str, module: torch.nn.Module, _: object) -> None:
        """Note that a module runs; in a block without gradients it may be a reference that runs before the model."""
        if not torch.is_grad_enabled():
            return
        if not self._begun:
            self._begin()
        for name, parameter in module.named_parameters(recurse=False):  # an adapter may have been switched on
            self._watch(parameter, f"{path}.{name}".lstrip("."), self.record.reached)

    def _begin(self) -> None:
        self._begun = True
        self.versions.update({name: (buffer, buffer._version) for name, buffer in self._model.named_buffers()})
        for name, parameter in self._model.named_parameters():
            self._watch(parameter, name, self.record.reached)
        for place, part in hidden_parts(self._model).items():
            each = part.named_parameters() if isinstance(part, torch.nn.Module) else [("", part)]
            for name, parameter in each:
                self._watch(parameter, f"{place}.{name}".rstrip("."), self.record.hidden)

    def _watch(self, parameter: torch.Tensor, name: str, into: set[str]) -> None:
        if parameter.requires_grad and id(parameter) not in self._watched:
            self._watched.add(id(parameter))
            parameter.register_post_accumulate_grad_hook(lambda p: self._note(p, name, into))  # type: ignore[no-untyped-call]  # of torch

    def _note(self, parameter: torch.Tensor, name: str, into: set[str]) -> None:
        # one that was frozen after its forward pass gets none
        if parameter.grad is not None and parameter.requires_grad:
            into.add(name)
        for changed, buffer in self._model.named_buffers() if self.versions else ():
            before, version = self.versions.get(changed, (buffer, buffer._version))
            # one of another shape was made for a larger input, such as a mask
            if buffer.shape == before.shape and (buffer is not before or buffer._version != version):
                self.record.changed.add(changed)
        self.versions.clear()
