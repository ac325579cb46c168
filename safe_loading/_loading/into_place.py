"""Weights of a base that transformers would copy more than once, read straight to where they are used.

transformers maps a file. On the host a weight that is used as it is on disk costs nothing until it is touched, and one
that is cast is cast once, in several threads: neither can be bettered. A weight that is fused from a tensor for each
expert it copies two or three times, and all that goes to a CUDA device it copies from pageable memory. These are taken
out of the hands of its loader, and each byte goes from its file to its place, to a device through two pinned buffers.
Everything else is transformers' own: the model, its other weights, what is missing or unexpected, ties.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel, modeling_utils
from transformers import core_model_loading as loader

from safe_loading._checkpoint.index import Checkpoint
from safe_loading._checkpoint.model_folder import ModelFolder
from safe_loading._core.engines import kept_dtypes, missing_of_load, note_uses
from safe_loading._core.protocols import EngineKwargs
from safe_loading._core.report import counted, format_bytes
from safe_loading._core.thread_patches import patched
from safe_loading._model.dtypes import DTYPES
from safe_loading._model.layout.checkpoint_source import CheckpointSource, ExpectedTensor
from safe_loading._model.layout.layout import CheckpointLayout
from safe_loading._model.layout.reading import ShardTarget, read_targets
from safe_loading._model.zero3 import splits_new_models
from safe_loading._ranks.rank_devices import RankDevices

from .report import FROM_PRETRAINED, INTO_PLACE


class Method(NamedTuple):
    """How the weights of a base came to where they are used, and why so."""

    name: str
    why: str


NOT_COMPARED = Method(FROM_PRETRAINED, "no header of its files could be compared with its class")
_LOADER = "convert_and_load_state_dict_in_model"
# The rules of transformers that rename each tensor by its name alone. Others look at the tensors before.
_STATELESS = ("WeightRenaming", "WeightConverter", "PrefixChange")


@dataclasses.dataclass(frozen=True, eq=False)
class IntoPlace:
    """The weights of a base that are read into place, and where they are."""

    source: CheckpointSource  # with those weights as slots
    tensors: frozenset[str]  # the tensors on disk that they are made of
    device: torch.device

    @property
    def method(self) -> Method:
        """The method of the base, where these weights were read."""
        tensors = self.source.checkpoint.tensors
        size = format_bytes(sum(tensors[name].nbytes for name in self.tensors))
        weights = counted(len(self.source.slots), "weight")
        if self.device.type == "cpu":
            made = f"{weights}, fused from {len(self.tensors)} tensors ({size})"
        else:
            made = f"{weights} of {counted(len(self.tensors), 'tensor')} ({size}), through pinned memory"
        others = "; the others by from_pretrained" if len(self.tensors) < len(tensors) else ""
        return Method(INTO_PLACE, f"{made}{others}")


def plan_into_place(
    opened: ModelFolder,
    checkpoint: Checkpoint,
    layout: CheckpointLayout,
    meta_model: torch.nn.Module,
    devices: RankDevices,
    base_kwargs: EngineKwargs,
) -> IntoPlace | Method:
    """Find the weights that are read into place, from headers alone; or the reason why there are none.

    ``meta_model`` is the model before an adapter is attached, with the dtypes that the load will give it.
    """
    config = getattr(meta_model, "config", None)
    if not isinstance(meta_model, PreTrainedModel):
        return Method(FROM_PRETRAINED, "its class is none of transformers")
    if base_kwargs.get("quantization_config") is not None or getattr(config, "quantization_config", None) is not None:
        return Method(FROM_PRETRAINED, "its weights are quantized")
    if splits_new_models():
        return Method(FROM_PRETRAINED, "DeepSpeed's ZeRO-3 splits its weights")
    if devices.are_several or devices.main.type not in ("cpu", "cuda"):
        return Method(FROM_PRETRAINED, f"its weights go to {devices}")
    if any(type(rule).__name__ not in _STATELESS for rule in layout.rules):
        return Method(FROM_PRETRAINED, "transformers renames its tensors by one another")
    parameters = meta_model.named_parameters(remove_duplicate=False)
    slots = {name: ExpectedTensor(tuple(each.shape), each.dtype) for name, each in parameters}
    tensors, read = set[str](), dict[str, ExpectedTensor]()
    on_card = devices.main.type == "cuda"
    for disk, names in _groups(layout):
        made = {name: slots[name] for name in names if name in slots}
        is_read = _is_moved if on_card else _are_fused
        if len(made) == len(names) and is_read(checkpoint, layout, made):
            tensors |= disk
            read |= made
    if not read:
        without = "can be followed from its files" if on_card else "is fused from several tensors"
        return Method(FROM_PRETRAINED, f"it maps files, and none of these weights {without}")
    source = CheckpointSource(opened, checkpoint, layout, read, {}, {}, config)
    return IntoPlace(source, frozenset(tensors), devices.main)


def _groups(layout: CheckpointLayout) -> Iterator[tuple[set[str], list[str]]]:
    """Yield the tensors on disk that transformers converts together, and all the parameters that it makes of them."""
    on_disk: dict[str, set[str]] = defaultdict(set)
    for disk, key in layout.key_of.items():
        on_disk[key].add(disk)
    made: dict[str, list[str]] = defaultdict(list)
    for name, whole in layout.of.items():
        made[layout.key_of[whole.pieces[0].tensor]].append(name)
    for key, names in made.items():
        used = {piece.tensor for name in names for piece in layout.of[name].pieces}
        if used == on_disk[key] and key not in layout.repeated:
            yield used, names


def _are_fused(checkpoint: Checkpoint, layout: CheckpointLayout, made: Mapping[str, ExpectedTensor]) -> bool:
    """Whether transformers fuses floats of several tensors to make these parameters, and how is known."""
    return _is_moved(checkpoint, layout, made) and any(len(layout.of[name].pieces) > 1 for name in made)


def _is_moved(checkpoint: Checkpoint, layout: CheckpointLayout, made: Mapping[str, ExpectedTensor]) -> bool:
    """Whether transformers makes these parameters by moving floats, and casting them."""
    wholes = [layout.of[name] for name in made]
    dtypes = {each.dtype for each in made.values()}
    stored = {DTYPES.get(checkpoint.tensors[piece.tensor].dtype) for whole in wholes for piece in whole.pieces}
    # one dtype, because transformers casts all of a group to that of its first
    return len(dtypes) == 1 and all(each and each.is_floating_point and each.itemsize > 1 for each in stored | dtypes)


@contextmanager
def read_into_place(planned: IntoPlace | Method) -> Iterator[list[Method]]:
    """Read the planned weights into place in the ``from_pretrained`` of the block; yield a list that gets the method.

    Raises:
        CheckpointError: A file became shorter.
    """
    told: list[Method] = []
    if isinstance(planned, Method):
        yield [planned]
        return

    def load(model: Any, state_dict: Mapping[str, Any], load_config: Any, **options: Any) -> Any:
        # of the loader's own module, where nothing is patched
        original: Callable[..., Any] = getattr(loader, _LOADER)
        if reason := _differs(planned, model, state_dict, load_config):
            told.append(Method(FROM_PRETRAINED, reason))
            return original(model=model, state_dict=state_dict, load_config=load_config, **options)
        rest = {name: tensor for name, tensor in state_dict.items() if name not in planned.tensors}
        note_uses(load_config.weight_mapping or (), planned.source.layout.rules)
        result = original(model=model, state_dict=rest, load_config=load_config, **options)
        _read(planned, model, missing_of_load(result))
        told.append(planned.method)
        return result

    with patched(modeling_utils, _LOADER, load):
        yield told


def _differs(planned: IntoPlace, model: Any, state_dict: Mapping[str, Any], load_config: Any) -> str | None:
    """Return why the loader's own reading must be left to it: it has other things to read than were planned."""
    devices = {torch.device(device) for device in (load_config.device_map or {"": "cpu"}).values()}
    if getattr(load_config, "hf_quantizer", None) is not None or devices != {planned.device}:
        return "its weights are quantized, or go to another device"
    if getattr(load_config, "prefetch", False):  # of transformers to come: it would have all of each file on the card
        return "safetensors reads its files ahead"
    if state_dict.keys() != planned.source.checkpoint.tensors.keys() or any(
        isinstance(tensor, torch.Tensor) for tensor in state_dict.values()
    ):
        return "transformers reads the files whole, or other files"
    state, kept = model.state_dict(), kept_dtypes(model, load_config.dtype)
    for name, expected in planned.source.slots.items():
        here = state.get(name)
        if type(here) is not torch.Tensor or not here.is_meta or tuple(here.shape) != expected.shape:
            return f"the model that transformers makes has {name} in another way"
        if expected.dtype != ((kept and kept(name)) or here.dtype):
            return f"transformers makes {name} in another dtype"
    rules = [(type(rule), rule.source_patterns) for rule in load_config.weight_mapping or ()]
    if rules != [(type(rule), rule.source_patterns) for rule in planned.source.layout.rules]:
        return "transformers renames its tensors by other rules"
    return None


def _read(planned: IntoPlace, model: torch.nn.Module, missing: set[str]) -> None:
    """Read the weights, and put them into the model as ``set_param_for_module`` of the loader does."""
    slots = planned.source.slots
    made = {name: torch.empty(slot.shape, dtype=slot.dtype, device=planned.device) for name, slot in slots.items()}
    read_targets(planned.source, [ShardTarget(name, 0, each.numel(), each.view(-1)) for name, each in made.items()])
    for name, tensor in made.items():
        path, _, attribute = name.rpartition(".")
        parameter: Any = torch.nn.Parameter(tensor)
        parameter._is_hf_initialized = True  # else transformers would initialize it
        setattr(model.get_submodule(path), attribute, parameter)
        missing.discard(name)
