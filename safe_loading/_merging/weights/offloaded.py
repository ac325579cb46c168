"""Weights that accelerate offloads to the host's memory or to disk: put into their modules for a merge, and back.

accelerate's own tool, ``align_module_device`` (``AlignDevicesHook.pre_forward`` and ``post_forward``), cannot be used
here: it drops what was changed. A weight from disk, or one copied to another execution device, is put on meta again
without being written anywhere. Besides, it aligns one module at a time, while all weights must be read before the first
is written; and it makes copies, whose memory no longer shows which weights are tied.
"""

from __future__ import annotations

import atexit
import dataclasses
import math
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

from safe_loading._core.interrupts import finish, undone_on_error
from safe_loading._core.report import Finding, format_bytes
from safe_loading._model.peft_layers import modules_inside_layers
from safe_loading.errors import MergeError

_MERGED_COPY = "merged_copy"  # marks an entry of an offload index whose file was written here


@dataclasses.dataclass(eq=False)
class _OffloadedTensor:
    """One offloaded tensor: ``module.name``, for which the module has ``meta`` while it is not used."""

    module: torch.nn.Module
    name: str
    meta: torch.Tensor
    loader: OffloadedWeightsLoader | None = None  # accelerate's, where it lies on disk under ``key``
    key: str = ""

    def set(self, value: torch.Tensor) -> None:
        """Put a tensor into the module."""
        if self.name in self.module._parameters:
            self.module._parameters[self.name] = torch.nn.Parameter(value, requires_grad=self.meta.requires_grad)
        else:
            self.module._buffers[self.name] = value

    def unset(self) -> None:
        """Put the tensor on meta back into the module, if it still has one of this name."""
        for tensors in self.module.__dict__["_parameters"], self.module.__dict__["_buffers"]:
            if self.name in tensors:
                tensors[self.name] = self.meta


class OffloadedWeights:
    """Context manager: inside, offloaded tensors are in their modules, as accelerate's stores hold them.

    What a hook keeps in memory is the store's own tensor, so it is merged in place. What lies on disk is mapped
    privately: nothing is ever written to a checkpoint or to the caller's offload folder. :meth:`write_back` writes what
    changed to new files, and makes the loader read those.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._tensors: dict[tuple[int, str], _OffloadedTensor] = {}
        self._hooks: list[AlignDevicesHook] = []
        self._folders: dict[int, Path] = {}
        self._converted: dict[tuple[int, str], Path] = {}
        self._written_bytes = 0
        # The names of the parameters of tuner layers that lie on disk, by (id of module, name).
        self.on_disk: dict[tuple[int, str], str] = {}

    def __enter__(self) -> OffloadedWeights:
        """Put the tensors into their modules."""
        with undone_on_error(self._restore):
            self._bring_in()
        return self

    def __exit__(self, *error: object) -> None:
        """Put the offloaded weights back on meta."""
        finish(self._restore)

    def holds(self, module: torch.nn.Module, name: str) -> bool:
        """Return whether a tensor of a module is offloaded."""
        return (id(module), name) in self._tensors

    def full_disks(self, changed: Iterable[tuple[torch.nn.Module, str]]) -> list[str]:
        """Return a problem for each disk with too little room for the weights that will change."""
        needed: dict[str, int] = {}
        for offloaded, loader in self._on_disk(changed):
            folder = str(loader.save_folder or tempfile.gettempdir())
            needed[folder] = needed.get(folder, 0) + offloaded.meta.nbytes
        return [
            f"{folder}: the merged weights that are offloaded to disk need {format_bytes(size)}, and it has "
            f"{format_bytes(free)}. Free some, or load the model with another offload_folder"
            for folder, size in needed.items()
            if size > (free := shutil.disk_usage(folder).free)
        ]

    def write_back(self, changed: Iterable[tuple[torch.nn.Module, str]]) -> None:
        """Write changed weights that lie on disk to files of their own, all of them, and only then point to those.

        If a file cannot be written, the loader still reads the weights as they were.
        """
        entries = []
        for offloaded, loader in self._on_disk(changed):
            tensors = {**offloaded.module._parameters, **offloaded.module._buffers}
            merged = tensors[offloaded.name]
            if merged is not None:
                path = self._write_file(merged.detach(), offloaded, loader)
                entries.append((offloaded, loader, _index_entry(path, offloaded.key, merged.dtype)))
        for offloaded, loader, entry in entries:
            before = loader.index.get(offloaded.key)
            loader.index[offloaded.key] = entry
            self._written_bytes += offloaded.meta.nbytes
            # A second merge replaces the file of the first; others belong to the caller and are never deleted.
            if before is not None and before.get(_MERGED_COPY):
                Path(before["safetensors_file"]).unlink(missing_ok=True)
            offloaded.unset()  # frees the private pages

    def findings(self) -> list[Finding]:
        """Return a finding that says where the merged weights lie that are offloaded to disk."""
        folders = sorted(str(folder) for folder in self._folders.values() if self._written_bytes)
        if not folders:
            return []
        why = (
            "merged weights that are offloaded to disk lie in new files there; the checkpoint and the files that they "
            "were read from are unchanged."
        )
        fix = "keep the folder as long as the model is used; save_pretrained writes the whole model."
        return [Finding("offloaded-to-new-files", "info", ", ".join(folders), why, fix, self._written_bytes)]

    def _bring_in(self) -> None:
        inside = modules_inside_layers(self._model)
        for path, module in self._model.named_modules():
            for hook in _offloading_hooks(module):
                # A list, as the loop changes what named_module_tensors walks through.
                for name, tensor in list(named_module_tensors(module, recurse=hook.place_submodules)):
                    if tensor.is_meta:
                        owner, _, attribute = name.rpartition(".")
                        offloaded = _OffloadedTensor(module.get_submodule(owner), attribute, tensor)
                        self._bring_tensor(offloaded, hook, name, f"{path}.{name}", of_tuner=id(module) in inside)
                if hook not in self._hooks:
                    self._hooks.append(hook)
                    hook.offload = False  # else peft's unload brings the whole model onto its device, layer by layer

    def _bring_tensor(
        self, offloaded: _OffloadedTensor, hook: AlignDevicesHook, name: str, path: str, *, of_tuner: bool
    ) -> None:
        value, loader, key = _look_up(hook.weights_map, name)
        place = (id(offloaded.module), offloaded.name)
        if loader is not None and of_tuner:
            offloaded.loader, offloaded.key = loader, key
            value = _map_privately(loader, key)
            entry = loader.index[key]
            dtype = getattr(torch, entry["dtype"]) if "dtype" in entry else value.dtype
            if value.dtype != dtype:
                # The converted values go to a file too, so that the whole model never has to fit into the memory.
                self._converted[place] = file = self._write_file(value.to(dtype), offloaded, loader)
                value = _map_safetensors(file, key)
            self.on_disk[place] = path
        if value is not None:
            self._tensors[place] = offloaded
            offloaded.set(value)

    def _restore(self) -> None:
        """Put everything back as accelerate expects it, whether or not a merge was written."""
        for offloaded in self._tensors.values():
            offloaded.unset()
        for hook in self._hooks:
            hook.offload = True
        # Loaders read the converted tensors from where they were; the new files served this merge alone.
        for file in self._converted.values():
            file.unlink(missing_ok=True)
        for folder in self._folders.values():
            if not any(folder.iterdir()):
                folder.rmdir()
        self._tensors.clear()
        self._hooks.clear()

    def _on_disk(
        self, changed: Iterable[tuple[torch.nn.Module, str]]
    ) -> Iterator[tuple[_OffloadedTensor, OffloadedWeightsLoader]]:
        for module, name in changed:
            offloaded = self._tensors.get((id(module), name))
            if offloaded is not None and offloaded.loader is not None:
                yield offloaded, offloaded.loader

    def _write_file(self, tensor: torch.Tensor, offloaded: _OffloadedTensor, loader: OffloadedWeightsLoader) -> Path:
        folder = self._folders.get(id(loader))
        if folder is None:
            self._folders[id(loader)] = folder = _new_folder(loader.save_folder)
        path = folder / f"{offloaded.key}.{secrets.token_hex(4)}.safetensors"
        try:
            save_file({offloaded.key: tensor.cpu().contiguous()}, path)
        except OSError as error:
            path.unlink(missing_ok=True)
            raise MergeError(
                f"{path}: the merged weight cannot be written: {error}. This layer is as it was, those before it are "
                f"merged; make room and call merge_lora_inplace again for the rest."
            ) from error
        return path


def _offloading_hooks(module: torch.nn.Module) -> list[AlignDevicesHook]:
    hook = getattr(module, "_hf_hook", None)
    hooks = hook.hooks if isinstance(hook, SequentialHook) else (hook,)
    return [one for one in hooks if isinstance(one, AlignDevicesHook) and one.offload and one.weights_map is not None]


def _look_up(weights: object, name: str) -> tuple[torch.Tensor | None, OffloadedWeightsLoader | None, str]:
    """Return the tensor of a store in memory, or the loader of a store on disk, and the name there."""
    while isinstance(weights, PrefixedDataset):
        name, weights = f"{weights.prefix}{name}", weights.dataset
    if isinstance(weights, OffloadedWeightsLoader):
        if name in weights.state_dict:
            return weights.state_dict[name], None, name
        return None, weights if name in weights.index else None, name
    value = weights.get(name) if isinstance(weights, dict) else None
    return (value if isinstance(value, torch.Tensor) else None), None, name


def _map_privately(loader: OffloadedWeightsLoader, key: str) -> torch.Tensor:
    """Return a tensor of a store on disk, mapped privately: writes to it stay in this process."""
    entry: Mapping[str, Any] = loader.index[key]
    if entry.get("safetensors_file") is not None:
        return _map_safetensors(entry["safetensors_file"], entry.get("weight_name", key))
    shape, dtype = entry["shape"], getattr(torch, entry["dtype"])
    size = math.prod(shape)
    if not size:
        return torch.empty(shape, dtype=dtype)
    path = Path(f"{loader.save_folder}", f"{key}.dat")  # as accelerate names the files that it writes itself
    return torch.from_file(str(path), shared=False, size=size, dtype=dtype).view(shape)


def _map_safetensors(path: str | os.PathLike[str], name: str) -> torch.Tensor:
    with safe_open(path, framework="pt", device="cpu") as file:  # maps its files privately
        tensor: torch.Tensor = file.get_tensor(name)
        return tensor


def _index_entry(path: Path, key: str, dtype: torch.dtype) -> dict[str, object]:
    """Return the entry of an offload index, in the form of transformers."""
    name = str(dtype).removeprefix("torch.")
    return {"safetensors_file": str(path), "weight_name": key, "dtype": name, _MERGED_COPY: True}


def _new_folder(inside: str | os.PathLike[str] | None) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="merged-", dir=inside))
    if inside is None:  # in the system's folder, where nobody else would delete it
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder
