"""Weights that accelerate keeps in the host's memory or on disk: brought into reach for a merge, and put back."""

from __future__ import annotations

import atexit
import dataclasses
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate.hooks import AlignDevicesHook, SequentialHook
from accelerate.utils import OffloadedWeightsLoader, PrefixedDataset
from accelerate.utils.modeling import named_module_tensors
from safetensors import safe_open
from safetensors.torch import save_file

from safe_loading._core.report import Finding, format_bytes
from safe_loading.errors import MergeError

from .writable_tensors import tuner_layers

_OURS = "merged_copy"  # marks an entry of an offload index whose file was written here


@dataclasses.dataclass(eq=False)
class _Place:
    """One offloaded tensor.

    Attributes:
        module: The module that holds it.
        name: Its name there.
        meta: What stands there while it is not used.
        loader: accelerate's loader when it lies on disk; None when the store is a tensor in memory.
        key: Its name in the loader.
    """

    module: torch.nn.Module
    name: str
    meta: torch.Tensor
    loader: Any = None
    key: str = ""


class Offloaded:
    """Context manager: inside, offloaded tensors stand in their modules, as accelerate's stores hold them.

    What a hook keeps in memory is the store's own tensor, so it is merged in place. What lies on disk is mapped
    privately: nothing is ever written to a checkpoint or to the caller's offload folder. :meth:`settle` writes what
    changed to new files, and lets the loader read those.

    Args:
        model: The model with its adapters.

    Attributes:
        on_disk: The names of the offloaded parameters of tuner layers that lie on disk, by (id of module, name).
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._places: dict[tuple[int, str], _Place] = {}
        self._hooks: list[AlignDevicesHook] = []
        self._folders: dict[int, Path] = {}
        self._converted: dict[tuple[int, str], Path] = {}
        self._kept = 0
        self.on_disk: dict[tuple[int, str], str] = {}

    def __enter__(self) -> Offloaded:
        """Put the tensors into their modules."""
        try:
            self._fill()
        except BaseException:
            self._restore()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        """Leave what is offloaded on meta again."""
        self._restore()

    def lacking(self, changed: Iterable[tuple[torch.nn.Module, str]]) -> list[str]:
        """Return a problem for each disk that has too little room for the weights that will change."""
        needed: dict[str, int] = {}
        for place in self._of(changed):
            folder = str(place.loader.save_folder or tempfile.gettempdir())
            needed[folder] = needed.get(folder, 0) + place.meta.nbytes
        return [
            f"{folder}: the merged weights that are offloaded to disk need {format_bytes(size)}, and it has "
            f"{format_bytes(free)}. Free some, or load the model with another offload_folder"
            for folder, size in needed.items()
            if size > (free := shutil.disk_usage(folder).free)
        ]

    def settle(self, changed: Iterable[tuple[torch.nn.Module, str]]) -> None:
        """Write changed weights that lie on disk to files of their own, all of them, and only then point to those."""
        entries = []
        for place in self._of(changed):
            held = {**place.module._parameters, **place.module._buffers}[place.name]
            if held is not None:
                path = self._written(held.detach(), place)
                entries.append((place, _entry(path, place.key, held.dtype)))
        for place, entry in entries:
            before = place.loader.index.get(place.key)
            place.loader.index[place.key] = entry
            self._kept += place.meta.nbytes
            if before is not None and before.get(_OURS):
                Path(before["safetensors_file"]).unlink(missing_ok=True)
            self._leave(place)  # its private pages are not needed any more

    def findings(self) -> list[Finding]:
        """Return where the merged weights lie that are offloaded to disk."""
        folders = sorted(str(folder) for folder in self._folders.values() if self._kept)
        if not folders:
            return []
        return [
            Finding(
                "offloaded-to-new-files",
                "info",
                ", ".join(folders),
                "merged weights that are offloaded to disk lie in new files there; the checkpoint and the files that "
                "they were read from are unchanged.",
                "keep the folder as long as the model is used; save_pretrained writes the whole model.",
                self._kept,
            )
        ]

    def _fill(self) -> None:
        layers: list[Any] = [layer for _, layer in tuner_layers(self._model)]
        inside = {id(part) for layer in layers for part in layer.modules()}
        for path, module in self._model.named_modules():
            tuned = id(module) in inside
            for hook in _hooks_of(module):
                for name, tensor in list(named_module_tensors(module, recurse=hook.place_submodules)):
                    if tensor.is_meta:
                        owner, _, attribute = name.rpartition(".")
                        place = _Place(module.get_submodule(owner), attribute, tensor)
                        self._put(place, hook, name, f"{path}.{name}", tuned=tuned)
                if hook not in self._hooks:
                    self._hooks.append(hook)
                    hook.offload = False  # else peft's unload brings the whole model onto its device, layer by layer

    def _put(self, place: _Place, hook: AlignDevicesHook, name: str, path: str, *, tuned: bool) -> None:
        value, loader, key = _stored(hook.weights_map, name)
        spot = (id(place.module), place.name)
        if loader is not None and tuned:
            place.loader, place.key = loader, key
            value = _mapped(loader, key)
            entry = loader.index[key]
            dtype = getattr(torch, entry["dtype"]) if "dtype" in entry else value.dtype
            if value.dtype != dtype:
                self._converted[spot] = file = self._written(value.to(dtype), place)
                value = _from_safetensors(file, key)
            self.on_disk[spot] = path
        if value is None:
            return
        self._places[spot] = place
        if place.name in place.module._parameters:
            grad = place.meta.requires_grad
            place.module._parameters[place.name] = torch.nn.Parameter(value, requires_grad=grad)
        else:
            place.module._buffers[place.name] = value

    def _restore(self) -> None:
        for place in self._places.values():
            self._leave(place)
        for hook in self._hooks:
            hook.offload = True
        for file in self._converted.values():
            file.unlink(missing_ok=True)
        for folder in self._folders.values():
            if not any(folder.iterdir()):
                folder.rmdir()
        self._places.clear()
        self._hooks.clear()

    @staticmethod
    def _leave(place: _Place) -> None:
        tensors: dict[str, Any] = (
            place.module._parameters if place.name in place.module._parameters else place.module._buffers
        )
        if place.name in tensors:
            tensors[place.name] = place.meta

    def _of(self, changed: Iterable[tuple[torch.nn.Module, str]]) -> Iterator[_Place]:
        for module, name in changed:
            place = self._places.get((id(module), name))
            if place is not None and place.loader is not None:
                yield place

    def _written(self, tensor: torch.Tensor, place: _Place) -> Path:
        folder = self._folders.get(id(place.loader))
        if folder is None:
            self._folders[id(place.loader)] = folder = _new_folder(place.loader.save_folder)
        path = folder / f"{place.key}.{secrets.token_hex(4)}.safetensors"
        try:
            save_file({place.key: tensor.cpu().contiguous()}, path)
        except OSError as error:
            path.unlink(missing_ok=True)
            raise MergeError(
                f"{path}: the merged weight cannot be written: {error}. This layer is as it was, those before it are "
                f"merged; make room and call merge_lora_inplace again for the rest."
            ) from error
        return path


def _hooks_of(module: torch.nn.Module) -> list[AlignDevicesHook]:
    hook = getattr(module, "_hf_hook", None)
    hooks = hook.hooks if isinstance(hook, SequentialHook) else (hook,)
    return [one for one in hooks if isinstance(one, AlignDevicesHook) and one.offload and one.weights_map is not None]


def _stored(weights: Any, name: str) -> tuple[torch.Tensor | None, Any, str]:
    """Return the tensor of a store in memory, or the loader of a store on disk, and the name there."""
    while isinstance(weights, PrefixedDataset):
        name, weights = f"{weights.prefix}{name}", weights.dataset
    if isinstance(weights, OffloadedWeightsLoader):
        if name in weights.state_dict:
            return weights.state_dict[name], None, name
        return None, weights if name in weights.index else None, name
    value = weights.get(name) if isinstance(weights, dict) else None
    return (value if isinstance(value, torch.Tensor) else None), None, name


def _mapped(loader: Any, key: str) -> torch.Tensor:
    """Return a tensor of a store on disk, mapped privately: what is written to it stays in this process."""
    entry: Mapping[str, Any] = loader.index[key]
    if entry.get("safetensors_file") is not None:
        return _from_safetensors(entry["safetensors_file"], entry.get("weight_name", key))
    shape, size = entry["shape"], 1
    for length in shape:
        size *= length
    dtype, path = getattr(torch, entry["dtype"]), str(Path(loader.save_folder) / f"{key}.dat")
    if not size:
        return torch.empty(shape, dtype=dtype)
    return torch.from_file(path, shared=False, size=size, dtype=dtype).view(shape)


def _from_safetensors(path: str | os.PathLike[str], name: str) -> torch.Tensor:
    with safe_open(path, framework="pt", device="cpu") as file:
        tensor: torch.Tensor = file.get_tensor(name)
        return tensor


def _entry(path: Path, key: str, dtype: torch.dtype) -> dict[str, Any]:
    """Return the entry of an offload index, in the form of transformers."""
    return {
        "safetensors_file": str(path),
        "weight_name": key,
        "dtype": str(dtype).removeprefix("torch."),
        _OURS: True,
    }


def _new_folder(inside: str | os.PathLike[str] | None) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="merged-", dir=inside))
    if inside is None:  # nobody else knows of it
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder
