"""Fake tensors of tensors on meta, made at a fifth of the cost of torch's own constructor, which checks each anew.

A traced step makes tens of thousands of them: a Llama of 405B parameters 37 000.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from safe_loading._core.thread_patches import do_nothing


class FakeTensorMaker:
    """Makes the fake tensors of one mode. Torch makes the first on each device; the others get its attributes."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self.mode = mode
        # the mode refers weakly to each tensor that it makes, with which no tensor of a module can be swapped for
        # another: that is what torch does with fake ones where a forward calls `to` of a module
        converter: Any = mode.fake_tensor_converter
        converter.set_tensor_memo = do_nothing
        self._attributes: dict[torch.device, dict[str, object]] = {}
        unsafe = getattr(mode, "_allow_unsafe_data_ptr_access", True)
        guards = torch._C._set_warn_deprecated_on_mutable_data_ptr, torch._C._set_throw_on_mutable_data_ptr
        self._guard = guards[0] if unsafe else guards[1]

    def fake(self, meta: torch.Tensor, device: torch.device) -> FakeTensor:
        """Return a fake tensor on a fake device that shares the storage of a tensor on meta."""
        attributes = self._attributes.get(device)
        if attributes is None:
            first = FakeTensor(self.mode, meta, device)
            self._attributes[device] = dict(vars(first))
            return first
        fake: FakeTensor = torch.Tensor._make_subclass(
            FakeTensor, meta, False, dispatch_device=True, device_for_backend_keys=device
        )
        self._guard(fake)
        vars(fake).update(attributes)
        return fake
