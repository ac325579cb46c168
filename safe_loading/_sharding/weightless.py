"""from_pretrained without weights: parameters take no memory until prepare reads them; everything else is real.

A parameter without its weight is one NaN on the host, expanded to the shape. So peft makes its adapters on the host,
with the values and draws of one process; on meta it would lose them. What reads or writes it reads the folder first.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.integrations.fsdp import is_fsdp_enabled

from safe_loading._checkpoint.base_config import quantization_of
from safe_loading._checkpoint.hub import base_files, resolve
from safe_loading._checkpoint.model_folder import ModelFolder
from safe_loading._core.engines import is_integrated
from safe_loading._core.thread_patches import patched, seen_here
from safe_loading._model.formats.four_bit_on_meta import four_bit_on_meta, packed_from, weight_on_meta
from safe_loading._model.layout.checkpoint_source import CheckpointSource
from safe_loading._model.layout.layout import own_key_mapping
from safe_loading._model.layout.ties import untie_as_in_folder
from safe_loading._model.quantized.on_disk import plain_all_the_same, refuse_bad_codes
from safe_loading._model.tensors import walk_modules
from safe_loading._model.zero3 import splits_new_models
from safe_loading._ranks.own_generators import own_copy_of_generators
from safe_loading.errors import ArgumentError, SafeLoadingError

from .buffers import compute_buffers
from .later_values import FolderTensor, WeightlessParameter, copy_notes, note_origin, origin_of, weightless
from .open_source import open_source
from .parameters import buffers_of, parameters_of

_RECORD = "_weights_of_safe_loading"
_FLAG = "_is_hf_initialized"  # by which transformers knows what it need not initialize
# What from_pretrained would do with the weights, or where it would put them: not known to the later load.
_UNKNOWN = (
    *("state_dict", "gguf_file", "device_map", "tp_plan", "distributed_config", "key_mapping"),
    *("variant", "max_memory", "offload_folder"),
)
_HUB = ("token", "cache_dir", "local_files_only")


@dataclasses.dataclass(frozen=True)
class LaterWeights:
    """Where the weights of a model are, kept with it until they are read."""

    folder: Path
    source: CheckpointSource | None  # matched with the model as it was loaded; None where it does not fit

    def __deepcopy__(self, memo: dict[int, object]) -> LaterWeights:
        """Return the same, which is never changed."""
        return self


def load_later(load: Callable[..., Any], kind: type[PreTrainedModel], *args: Any, **options: Any) -> Any:
    """Return the result of ``from_pretrained`` without reading a weight.

    ``load`` is the function of that classmethod. It makes the model on meta itself, so that configs, code and warnings
    are its own.
    """
    if splits_new_models():
        raise ArgumentError(
            f"DeepSpeed's ZeRO-3 is on in this process, through TrainingArguments(deepspeed=), an Accelerator or an "
            f"HfDeepSpeedConfig, and would split {kind.__name__} itself: load_at_prepare() is for FSDP. Make this call "
            f"outside of it, or train with FSDP."
        )
    options |= dict(zip(list(inspect.signature(load).parameters)[1:], args, strict=False))
    known = {"key_mapping": own_key_mapping(kind)}  # which the later load asks for, too
    given = sorted(name for name in _UNKNOWN if options.get(name) not in (None, {}, known.get(name)))
    name = options.get("pretrained_model_name_or_path")
    if given or name is None:
        raise ArgumentError(
            f"from_pretrained({str(name)!r:.200}) in load_at_prepare() has options that the later load does not know: "
            f"{', '.join(given) or 'no name'}. Leave them out, or make this call outside of load_at_prepare()."
        )
    if _is_quantized(name, options):  # whose codes transformers cannot convert on meta
        folder = ModelFolder(Path(name, options.get("subfolder") or ""))
        if folder.path.is_dir():
            refuse_bad_codes(folder)
        if not folder.path.is_dir() or not plain_all_the_same(folder):
            raise _not_as_they_are(name)
    with_info = bool(options.pop("output_loading_info", False))
    quantization = options.pop("quantization_config", None)
    with _initialized_later(kind):
        model, info = load(kind, **{**options, "device_map": "meta"}, output_loading_info=True)
    if getattr(model, "hf_quantizer", None) is not None or is_integrated(model):
        raise _not_as_they_are(name)
    if quantization is not None:
        four_bit_on_meta(model, quantization, model.dtype)
    hub = {key: options[key] for key in _HUB if options.get(key) is not None}
    resolved = resolve(
        name,
        base_files({}),
        revision=options.get("revision") if options.get("revision") != "main" else None,
        subfolder=options.get("subfolder") or None,
        hub=hub,
    )
    if getattr(model, "all_tied_weights_keys", None):
        model.tie_weights(recompute_mapping=False)  # on meta from_pretrained compares no values, and ties nothing
        untie_as_in_folder(model, ModelFolder(resolved.folder))
    source = _opened(resolved.folder, model)
    _compute_buffers(model)
    _take_weights_away(model, _missing(model, info["missing_keys"], source), source)
    model.__dict__[_RECORD] = LaterWeights(resolved.folder, source)
    return (model, info) if with_info else model


def later_weights_of(model: nn.Module) -> tuple[nn.Module, LaterWeights] | None:
    """Return the model inside, and where its weights are; None where no weights are missing."""
    found = [(module, vars(module)[_RECORD]) for _, module in walk_modules(model) if _RECORD in vars(module)]
    if len(found) > 1:
        names = [f"{type(module).__name__}: {weights.folder}" for module, weights in found]
        raise ArgumentError("Several models of load_at_prepare() are in one; load them outside of it:", names)
    return found[0] if found else None


def move_to_meta(model: nn.Module, inner: nn.Module, *, trained_dtype: torch.dtype | None) -> None:
    """Put parameters on meta in place of those without weights, from where they are read.

    Trained parameters get ``trained_dtype``, where it is given; real ones are cast.
    """
    for each in parameters_of(model):
        tensor = each.tensor
        dtype = trained_dtype if trained_dtype is not None and tensor.requires_grad else tensor.dtype
        if packed_from(tensor) is not None:
            each.put(weight_on_meta(tensor))
        elif isinstance(tensor, WeightlessParameter):
            empty = nn.Parameter(torch.empty(tensor.shape, dtype=dtype, device="meta"), tensor.requires_grad)
            copy_notes(tensor, empty)
            if tensor.dtype != dtype and (origin := origin_of(tensor)) is not None:
                note_origin(empty, origin.rounded_to(tensor.dtype))
            each.put(empty)
        elif tensor.dtype != dtype:
            tensor.data = tensor.data.to(dtype)
    for number in [number for number, hook in inner._forward_pre_hooks.items() if hook is _refuse]:
        del inner._forward_pre_hooks[number]  # by the hook, as a handle would be another in a copy
    del vars(inner)[_RECORD]


def _is_quantized(name: str | os.PathLike[str], options: Mapping[str, Any]) -> bool:
    """Return whether the config of a folder says that its weights are codes."""
    config = options.get("config")
    if config is None:
        where = {key: options[key] for key in (*_HUB, "revision", "subfolder") if options.get(key) is not None}
        with contextlib.suppress(OSError):  # of an adapter's folder, which transformers looks into itself
            config, _ = PreTrainedConfig.get_config_dict(name, **where)
    held = config.to_dict() if isinstance(config, PreTrainedConfig) else config
    return isinstance(held, Mapping) and bool(quantization_of(dict(held)))


def _not_as_they_are(name: object) -> ArgumentError:
    return ArgumentError(
        f"{name} holds quantized weights, or an adapter: load_at_prepare() is for folders whose weights are read "
        f"as they are, or packed in 4 bits. Make this call outside of it."
    )


def _opened(folder: Path, model: PreTrainedModel) -> CheckpointSource | None:
    """Return the folder, matched with the model before a script changes it; None where it does not fit.

    What does not fit is told by the wrap, on all ranks at once.
    """
    with contextlib.suppress(SafeLoadingError):
        source = open_source(folder, model, is_new=lambda name: True, heads=True)
        return None if source.layout.mismatched else source
    return None


def _compute_buffers(model: PreTrainedModel) -> None:
    """Give values to the buffers that no folder has, as far as that is possible: the script may cast or move them."""
    with contextlib.suppress(SafeLoadingError):  # the wrap tells what nothing computes
        computed = compute_buffers(model)
        for each in buffers_of(model):
            if each.name in computed:
                each.put(computed[each.name])


def _missing(model: PreTrainedModel, told: Iterable[str], source: CheckpointSource | None) -> set[str]:
    """Return the names of parameters that no file has, those included that a class leaves out of the report."""
    missing = set(told)
    if source is not None:
        for each in parameters_of(model):
            if source.stored_as(each.name) is None:
                missing.update(each.names)
    return missing


def _take_weights_away(model: PreTrainedModel, missing: Set[str], source: CheckpointSource | None) -> None:
    new = []
    for each in parameters_of(model):
        if missing.isdisjoint(each.names):
            each.put(weightless(each.tensor))
        else:
            empty = torch.empty(each.tensor.shape, dtype=each.tensor.dtype, device="cpu")
            new.append(nn.Parameter(empty, requires_grad=each.tensor.requires_grad))
            each.put(new[-1])
    if source is not None:  # else nothing can be read, and the wrap tells why
        _note_origins(model, source)
    _initialize(model, new)
    if source is None:
        _note_origins(model, source)
    for each in buffers_of(model):
        # few bytes, which no cast, copy or move by the script can lose
        if source is not None and each.is_meta and each.persistent and source.stored_as(each.name) is not None:
            each.put(FolderTensor(source, each.name).read(each.tensor))
    model.register_forward_pre_hook(_refuse)


def _note_origins(model: PreTrainedModel, source: CheckpointSource | None) -> None:
    for each in parameters_of(model):
        if isinstance(each.tensor, WeightlessParameter):
            note_origin(each.tensor, FolderTensor(source, each.name))


@contextlib.contextmanager
def _initialized_later(kind: type[PreTrainedModel]) -> Iterator[None]:
    """Leave the initialization of a model on meta to :func:`_initialize`, once its tensors are on the host.

    Some classes draw first values of parameters that were loaded (``A_log`` of Qwen3-Next), and throw them away. On
    meta they would draw none, and what a script draws afterwards, an adapter for one, would be other numbers.
    """
    method = "_initialize_missing_keys"
    of_engine = seen_here(PreTrainedModel, method)

    def initialize(model: PreTrainedModel, *args: Any, **options: Any) -> None:
        if type(model) is not kind:  # one that is loaded inside of it
            of_engine(model, *args, **options)
        elif is_fsdp_enabled():  # cpu_ram_efficient_loading made zeros of the buffers that no folder has
            with own_copy_of_generators():
                of_engine(model, *args, **options)

    with patched(PreTrainedModel, method, initialize):
        yield


@torch.no_grad()
def _initialize(model: PreTrainedModel, new: Iterable[nn.Parameter]) -> None:
    """Let transformers initialize parameters that no file has, as it does after it has loaded the others.

    Without any it still draws what it does for a model that was loaded whole.
    """
    made = {id(parameter) for parameter in new}
    for module in model.modules():
        vars(module).pop(_FLAG, None)
    for parameter in model.parameters():
        setattr(parameter, _FLAG, id(parameter) not in made)
    for buffer in model.buffers():
        setattr(buffer, _FLAG, True)
    initialize: Callable[[], object] = model.initialize_weights  # transformers annotates nothing here
    initialize()


def _refuse(module: nn.Module, args: object) -> NoReturn:
    raise ArgumentError(
        f"This {type(module).__name__} has no weights yet: from_pretrained in load_at_prepare() leaves them to "
        f"accelerator.prepare, which Trainer calls when it trains. Where the model is used without it (a reference "
        f"model, generate before the training), load it outside of load_at_prepare()."
    )
