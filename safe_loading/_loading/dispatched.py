"""Adapters on layers that accelerate dispatched to a device of their own, to which the inputs must come."""

from __future__ import annotations

from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from peft import PeftModel
from peft.utils import AuxiliaryTrainingWrapper

from safe_loading._model.peft_layers import base_of, is_tuner_layer
from safe_loading._ranks.rank_devices import RankDevices


def bring_inputs(model: PeftModel, devices: RankDevices) -> None:
    """Let the layers of adapters that stand in the device map themselves move their inputs to their device.

    accelerate's hook is on what was there at the dispatch, which is inside the adapter's layer now, and the factors
    would get the inputs on the device of the layer before. Modules further down are inside a block that has the hook.
    """
    base = base_of(model)
    for path, device in devices.by_module.items():
        module = base.get_submodule(path)
        if (is_tuner_layer(module) or isinstance(module, AuxiliaryTrainingWrapper)) and not hasattr(module, "_hf_hook"):
            add_hook_to_module(module, AlignDevicesHook(execution_device=device))
