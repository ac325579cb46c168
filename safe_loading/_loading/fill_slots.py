"""Copying tensors from the host into their slots on the device, each moved once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import torch

from safe_loading._core.report import Finding, one_for_all_layers
from safe_loading._model.snapshot import Snapshot
from safe_loading._ranks.rank_devices import RankDevices

from .slots import AdapterSlot, named_tensors


def fill_slots(
    slots: Mapping[str, AdapterSlot],
    values: Mapping[str, torch.Tensor],
    devices: RankDevices,
    dtype: torch.dtype | None,
    *,
    copy: bool = True,
) -> None:
    """Put each value into its slot, on the slot's device, in its own dtype, or in ``dtype`` if that is not None.

    A saved module keeps the dtype of its slot, unless ``copy`` is off: then values stay as they are, to be read only.

    Slots that share storage (adapters tied to one another) still share it afterwards, unless their values differ:
    peft casts the factors of a 16-bit base one by one, which ends the tie, so they may have been trained apart. A slot
    without a value keeps its initial value, in the dtype of the others, since a layer computes with both its factors.
    """
    # The dtype of what is on file stands for the whole adapter; what peft made has the dtype of the base.
    own_dtypes = (value.dtype for key, value in values.items() if slots[key].dtype is None)
    common = dtype or next((own for own in own_dtypes if own.is_floating_point), None)
    groups: dict[int, list[AdapterSlot]] = defaultdict(list)
    for slot in slots.values():
        groups[slot.storage].append(slot)
    for group in groups.values():
        device, own = devices.of(group[0].key), (group[0].dtype if copy else None) or dtype
        with_value = [slot for slot in group if slot.key in values]
        if not with_value:
            for slot in group:
                if common is not None and slot.gets_dtype_of_adapter:
                    _set(slot, _as_in_slot(slot, slot.tensor.detach().to(common)))
        elif len({id(slot.tensor) for slot in group}) == 1:
            # One tensor under several names stays one tensor.
            tensor = _as_in_slot(group[0], _moved(values[with_value[0].key], device, own, copy=copy))
            for slot in group:
                _set(slot, tensor)
        elif len(with_value) < len(group) or _same_in_shared_storage(with_value, values):
            _fill_shared_storage(group, values, device, own)
        else:
            for slot in with_value:
                _set(slot, _as_in_slot(slot, _moved(values[slot.key], device, own, copy=copy)))


def _same_in_shared_storage(slots: Sequence[AdapterSlot], values: Mapping[str, torch.Tensor]) -> bool:
    """Return whether slots that share storage have the same values for it."""
    storage = torch.empty(_elements(slots), dtype=values[slots[0].key].dtype, device="cpu")
    # Write all of them, then read all of them back: a tied factor may be the transpose of the other (an embedding's
    # lora_embedding_A and the head's lora_A), and only in the storage can the two be compared.
    for slot in slots:
        _view_like(slot.tensor, storage).copy_(values[slot.key])
    return all(torch.equal(_view_like(s.tensor, storage), values[s.key].to("cpu", storage.dtype)) for s in slots)


def _fill_shared_storage(
    group: Sequence[AdapterSlot], values: Mapping[str, torch.Tensor], device: torch.device, dtype: torch.dtype | None
) -> None:
    first = next(values[slot.key] for slot in group if slot.key in values)
    storage = torch.empty(_elements(group), dtype=dtype or first.dtype, device=device)
    for slot in group:
        view = _view_like(slot.tensor, storage)
        if slot.key in values:
            view.copy_(values[slot.key])
        _set(slot, _as_in_slot(slot, view))


def _view_like(tensor: torch.Tensor, storage: torch.Tensor) -> torch.Tensor:
    return storage.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def _elements(slots: Iterable[AdapterSlot]) -> int:
    """Return how many elements of one storage the slots' tensors reach over."""
    return max(_end(slot.tensor) for slot in slots)


def _end(tensor: torch.Tensor) -> int:
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return int(tensor.storage_offset()) + last + 1


def _moved(value: torch.Tensor, device: torch.device, dtype: torch.dtype | None, *, copy: bool) -> torch.Tensor:
    if dtype is not None and value.is_floating_point():
        value = value.to(dtype)
    if device.type == "cpu":
        # A copy, because the adapter's tensors may go into several models, each of which changes its own.
        return value.clone(memory_format=torch.contiguous_format) if copy else value.contiguous()
    return value.to(device).contiguous()


def _as_in_slot(slot: AdapterSlot, value: torch.Tensor) -> torch.Tensor:
    if not slot.is_parameter:
        return value
    return torch.nn.Parameter(value, requires_grad=slot.tensor.requires_grad and value.is_floating_point())


def _set(slot: AdapterSlot, value: torch.Tensor) -> None:
    if isinstance(value, torch.nn.Parameter):
        initialized = slot.owner._parameters[slot.name]
        if initialized is None or initialized.is_meta:
            slot.owner._parameters[slot.name] = value
            return
        # The same object: peft may have hung hooks on it (OSF's projection of gradients), or hold it elsewhere.
        initialized.data = value.data
        initialized.requires_grad_(value.requires_grad)
    else:
        slot.owner._buffers[slot.name] = value


def overwrite_base(
    model: torch.nn.Module, values: Mapping[str, torch.Tensor], where: str, undo: Iterable[Snapshot]
) -> list[Finding]:
    """Copy the base's weights of an adapter file into the base, in place for its ties; ``undo`` keeps the old ones."""
    if not values:
        return []
    tensors = named_tensors(model)
    findings = []
    for key, value in values.items():
        tensor = tensors[key]
        converted = value.to(tensor)  # which rounds nothing: match_tensors has checked that
        if torch.equal(converted, tensor):
            continue
        for snapshot in undo:
            snapshot.keep(tensor)
        with torch.no_grad():
            tensor.copy_(converted)
        message = (
            "the file contains this weight of the base with other values than the base's own, so the base's was "
            "overwritten, as peft does (save_embedding_layers, bias)."
        )
        findings.append(Finding("base-weight-replaced", "info", f"{where}: {key}", message, "", value.nbytes))
    return one_for_all_layers(findings)
