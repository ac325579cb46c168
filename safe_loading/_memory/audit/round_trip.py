"""The round trip of trained tensors: saved as the trainer saves them, loaded again, compared by name and value."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from peft import PeftModel
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from safe_loading._core.engines import is_integrated
from safe_loading._core.interrupts import undone
from safe_loading._core.log import quiet, without_records
from safe_loading._core.names import first_names
from safe_loading._core.progress import engine_bars
from safe_loading._core.report import Finding, Severity, counted
from safe_loading._model.snapshot import Snapshot
from safe_loading._ranks.launcher import local_rank
from safe_loading._ranks.own_generators import own_generators
from safe_loading._wrapping.transparent import mixins_and_original
from safe_loading._wrapping.wrap_order import inside_engines

from .audited_model import AuditedModel, by_value, size_of

_BEFORE_THE_LOAD = 0.5  # in every element of what is trained; the values that were saved are random
_LONGEST_ERROR = 300  # characters
_UNREAD = "left as before the load"
_ABSENT = "not in the checkpoint"
_PROMPT = (
    "peft saves the prompt, and not the encoder that computes it: PeftModel.from_pretrained has the same prompt, but "
    "no training can be resumed."
)
_FIXES = {
    "failed": "end what it names before training: the first checkpoint fails in the same way.",
    "failed to load": "end what it names before training: the checkpoint is written, and fails when it is loaded.",
    "failed of an integrated adapter": (
        "use get_peft_model(model, config) in the place of model.add_adapter(config): a Trainer resumes a PeftModel."
    ),
    "unread of an adapter": "name their modules in modules_to_save, or attach new heads with attach_head.",
    "unread": (
        "have save_pretrained write them: _keys_to_ignore_on_save, _tied_weights_keys and an overridden state_dict() "
        "leave names out, and load_state_dict() of a Trainer is not strict."
    ),
    "renamed": (
        "resume with the model of the checkpoint: from_pretrained(checkpoint) for a new Trainer, and then its "
        "train(resume_from_checkpoint=checkpoint); with load_best_model_at_end=True load the best one so, too. The "
        "file has the names that are published, and Trainer (of transformers 5.23) reads those of the modules."
    ),
    "rounded": "keep one dtype in the model, model.to(dtype), or load with from_pretrained(..., dtype=torch.float32).",
    "changed": (
        "write first values with transformers.initialization (init.normal_(module.weight)): _init_weights runs after "
        "the load, and weight.data.normal_() writes over what was loaded."
    ),
}


class Road(NamedTuple):
    """A way to save a model and to load it again, which gives the loaded parameters by name."""

    named: str
    save: Callable[[str], object]
    load: Callable[[str], Mapping[str, torch.Tensor]]
    of_trainer: bool = False  # whether a training is resumed so


def check_round_trip(audited: AuditedModel, skipped: list[str]) -> Iterator[Finding]:
    """Yield a finding for each way on which trained tensors do not come back, with their names.

    The trained parameters hold random values meanwhile, as after a training, and everything is put back. It takes the
    memory and the disk of a checkpoint, and once more where ``from_pretrained`` builds a second model.
    """
    model, roads = _roads(audited)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad and p.dtype.itemsize > 1}
    reason = _impossible(model, roads, trained, of_adapter=audited.adapted is not None)
    if reason is not None:
        skipped.append(f"round trip: {reason}")
        return
    told: set[str] = set()
    with ExitStack() as stack:
        stack.enter_context(undone(_undo_of(audited.model)))
        for block in (quiet(), without_records("transformers"), engine_bars(local_rank()), own_generators()):
            stack.enter_context(block)
        _in_other_memory(model)
        if any(parameter.is_meta for parameter in trained.values()):
            _fill(model, [*trained.values(), *audited.saved.values()])
            trained = {name: p for name, p in model.named_parameters() if name in trained}
        with torch.no_grad():
            for parameter in trained.values():
                parameter.normal_()
            expected = {name: parameter.detach().clone() for name, parameter in trained.items()}
        for road in roads:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="safe_loading-"))
            found = _walk(road, folder, trained, expected)
            if found and _is_prompt(audited) and not road.of_trainer:
                skipped.append(f"round trip: {_PROMPT}")
                return
            if isinstance(found, Exception):
                written = any(Path(folder).rglob("*.safetensors"))
                kind = " of an integrated adapter" if is_integrated(audited.inner) else " to load" if written else ""
                yield _failed(road, trained, found, _FIXES[f"failed{kind}"])
                return
            lost = {name: why for name, why in found.items() if name not in told}
            told |= set(lost)
            if lost:
                missing = {name: expected[name] for name in lost}
                adapted = audited.adapted is not None
                renamed = road.of_trainer and not adapted and _has(folder, audited.inner, missing)
                fix = _fix_of(lost, of_adapter=adapted, renamed=renamed)
                yield _finding(road, lost, len(trained), size_of(missing.values()), fix)


def _is_prompt(audited: AuditedModel) -> bool:
    return audited.peft is not None and audited.peft.active_peft_config.is_prompt_learning


def _roads(audited: AuditedModel) -> tuple[torch.nn.Module, list[Road]]:
    """Return the model whose names count, and the ways to save and load it, the trainer's own first."""
    trainer: Any = audited.trainer
    of_trainer = getattr(trainer, "model", None)
    model, roads = audited.inner, []
    if isinstance(of_trainer, torch.nn.Module) and inside_engines(of_trainer)[1] is audited.outermost:
        save, load = getattr(trainer, "save_model", None), getattr(trainer, "_load_from_checkpoint", None)
        if callable(save) and callable(load):
            model = audited.outermost
            named = f"{type(trainer).__name__}.save_model and a resumed training"
            roads.append(Road(named, partial(save, _internal_call=True), partial(_in_place, model, load), True))
    inner: Any = audited.inner
    named = f"{type(inner).__name__}.save_pretrained and "
    if isinstance(inner, PeftModel):
        if not roads:
            load = partial(_in_place, inner, partial(_load_adapters, inner))
            roads.append(Road(f"{named}load_adapter", inner.save_pretrained, load))
    elif isinstance(inner, PreTrainedModel) and model is inner:
        if is_integrated(inner):
            load = partial(_in_place, inner, partial(_load_integrated, inner))
            roads.append(Road(f"{named}load_adapter", inner.save_pretrained, load))
        else:
            roads.append(Road(f"{named}from_pretrained", inner.save_pretrained, partial(_built_anew, inner)))
    return model, roads


def _impossible(
    model: torch.nn.Module, roads: list[Road], trained: Mapping[str, torch.Tensor], *, of_adapter: bool
) -> str | None:
    """Return why there is no round trip, or None. An adapter needs no base with values: a checkpoint holds it alone."""
    if not trained:
        return "nothing is trained."
    if any(tensor.is_meta for tensor in trained.values()) and not of_adapter:
        return "the model is on meta, and has no values to save: pass one with weights."
    if any(isinstance(tensor, DTensor) for tensor in trained.values()) or (
        torch.distributed.is_available()
        and torch.distributed.is_initialized()
        and torch.distributed.get_world_size() > 1
    ):
        return "the model is spread over ranks: run it in one process, before the model is sharded."
    if not roads:
        return f"a {type(model).__name__} has no save_pretrained: pass the trainer that saves it, as trainer=."
    return None


def _undo_of(model: torch.nn.Module) -> Callable[[], None]:
    """Return the function that gives a model its tensors, structure and configs back."""
    snapshot = Snapshot(model)
    tensors = [(tensor, tensor.data) for tensor in (*model.parameters(), *model.buffers())]
    held = [vars(module).get(name) for module in model.modules() for name in ("generation_config", "peft_config")]
    # an adapter's config is in a dict by its name, to which saving adds the base's
    objects = [item for value in held for item in (value.values() if isinstance(value, dict) else (value,))]
    configs = [(item, vars(item).copy(), copy.deepcopy(vars(item))) for item in objects if item is not None]

    def undo() -> None:
        snapshot.restore()
        for tensor, data in tensors:
            tensor.data = data
        for item, fields, copies in configs:  # a copy of a set may have another order, so an equal field stays itself
            vars(item).update({name: fields[name] if fields[name] == copies[name] else copies[name] for name in fields})

    return undo


def _in_other_memory(model: torch.nn.Module) -> None:
    """Give every tensor of a model memory of its own, in which ties stay: a load may write to any of them."""
    copies: dict[int, torch.UntypedStorage] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        storage = tensor.untyped_storage()
        own = copies.setdefault(storage._cdata, storage) if tensor.is_meta else copies.get(storage._cdata)
        if own is None:
            own = copies[storage._cdata] = storage.clone()  # type: ignore[no-untyped-call]  # of torch
        empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        tensor.data = empty.set_(own, tensor.storage_offset(), tensor.size(), tensor.stride())


def _fill(model: torch.nn.Module, wanted: Iterable[torch.nn.Parameter]) -> None:
    """Put zeros on the host in the place of some parameters on meta; where they have two names, at both."""
    zeros = {p: torch.nn.Parameter(torch.zeros_like(p, device="cpu"), p.requires_grad) for p in wanted if p.is_meta}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter in zeros:
                module._parameters[name] = zeros[parameter]


def _walk(
    road: Road, folder: str, trained: Mapping[str, torch.nn.Parameter], expected: Mapping[str, torch.Tensor]
) -> dict[str, str] | Exception:
    """Return why each tensor that did not come back is another one, or the exception on the way."""
    with torch.no_grad():
        for name, parameter in trained.items():
            parameter.copy_(expected[name])
    try:
        road.save(folder)
        with torch.no_grad():
            for parameter in trained.values():
                parameter.fill_(_BEFORE_THE_LOAD)
        loaded = road.load(folder)
    except Exception as error:  # whatever the engines raise would end the training
        return error
    return {name: why for name, value in expected.items() if (why := _difference(value, loaded.get(name)))}


def _difference(saved: torch.Tensor, loaded: torch.Tensor | None) -> str | None:
    """Return how a loaded tensor differs from the one that was saved; None where its values are the same."""
    if loaded is None or loaded.is_meta:
        return _ABSENT
    if loaded.shape != saved.shape:
        return f"of shape {list(loaded.shape)} instead of {list(saved.shape)}"
    loaded = loaded.detach().to(saved.device)
    wide = torch.promote_types(saved.dtype, loaded.dtype)
    if torch.equal(saved.to(wide), loaded.to(wide)):
        return None
    if bool((loaded == _BEFORE_THE_LOAD).all()):
        return _UNREAD
    if loaded.dtype != saved.dtype and torch.equal(saved.to(loaded.dtype), loaded):
        return f"rounded to {str(loaded.dtype).removeprefix('torch.')}"
    return "other values"


def _failed(road: Road, trained: Mapping[str, torch.nn.Parameter], error: Exception, fix: str) -> Finding:
    told = f"{type(error).__name__}: {str(error).strip()[:_LONGEST_ERROR]}"
    message = f"{counted(len(trained), 'trained tensor')} cannot be saved and loaded again by {road.named}: {told}"
    return Finding("SL132", "error", first_names(trained), message, fix, size_of(trained.values()))


def _finding(road: Road, lost: Mapping[str, str], of: int, size: int, fix: str) -> Finding:
    by_reason = by_value(lost)
    told = "; ".join(f"{', '.join(names)} ({why})" for why, names in by_reason.items())
    message = f"{len(lost)} of {counted(of, 'trained tensor')} do not come back by {road.named}: {told}."
    severity: Severity = "warning" if {_kind(why) for why in by_reason} == {"rounded"} else "error"
    return Finding("SL132", severity, first_names(lost), message, fix, size)


def _fix_of(lost: Mapping[str, str], *, of_adapter: bool, renamed: bool) -> str:
    kinds = {_kind(why) for why in lost.values()}
    kind: str = next(kind for kind in ("unread", "changed", "rounded") if kind in kinds)
    if kind == "unread":
        kind = "unread of an adapter" if of_adapter else "renamed" if renamed else kind
    return _FIXES[kind]


def _has(folder: str, model: torch.nn.Module, expected: Mapping[str, torch.Tensor]) -> bool:
    """Whether ``from_pretrained`` reads some tensors from a trainer's checkpoint, whose own load does not find them."""
    try:
        read = _built_anew(model, folder) if isinstance(model, PreTrainedModel) else {}
    except Exception:  # of a class that builds itself in another way
        return False
    return all(_difference(value, read.get(name)) is None for name, value in expected.items())


def _kind(why: str) -> str:
    if why in (_UNREAD, _ABSENT):
        return "unread"
    return "rounded" if "rounded" in why else "changed"


def _in_place(model: torch.nn.Module, load: Callable[[str], object], folder: str) -> Mapping[str, torch.Tensor]:
    """Load into the model itself, as a resumed training does."""
    load(folder)
    return dict(model.named_parameters())


def _load_adapters(model: PeftModel, folder: str) -> None:
    for name in list(model.peft_config):
        own = Path(folder, name)
        if own.is_dir() or name == "default":  # only the one of that name lies in the folder itself
            model.load_adapter(str(own if own.is_dir() else folder), name, is_trainable=True)


def _load_integrated(model: Any, folder: str) -> None:
    """Load an adapter of transformers' ``add_adapter``, which takes no name that is there already."""
    (name, *_) = model.active_adapters()
    model.delete_adapter(name)
    model.load_adapter(folder, adapter_name=name)


def _built_anew(model: PreTrainedModel, folder: str) -> Mapping[str, torch.Tensor]:
    """Load into a second model, and return the parameters that the folder has."""
    cls: Any = mixins_and_original(type(model))[1]
    built, told = cls.from_pretrained(folder, local_files_only=True, output_loading_info=True)
    return {name: p for name, p in built.named_parameters() if name not in told["missing_keys"]}
