"""Attaching an adapter to a model: peft builds the modules, the file's tensors are put into them bit for bit."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from peft import PeftModel
from peft.utils import AuxiliaryTrainingWrapper

from safe_loading._checkpoint.tokenizer_ids import warning_of_added_words
from safe_loading._core.names import without_peft_prefix
from safe_loading._core.report import Finding
from safe_loading._model.embeddings_and_head import embeddings_and_head_of
from safe_loading._model.peft_layers import base_of, is_tuner_layer, without_peft_levels
from safe_loading._model.snapshot import Snapshot
from safe_loading._ranks.rank_devices import RankDevices
from safe_loading.errors import AdapterError

from .adapter_values import Adapter
from .alike import find_alike, plan_for, remember
from .fill_slots import fill_slots, overwrite_base
from .inject import (
    Injection,
    NeedsValues,
    errors_in,
    findings_of_start,
    inject_and_match,
    inject_checked,
    refusal,
    with_own_config,
)
from .move_modules import move_modules
from .old_names import with_new_names
from .peft_config import without_targets
from .prompts import foreign_prompt
from .slots import own_tensor
from .starts import builds_on_meta, starts_on_base

_TOKENS = ".trainable_tokens_delta."


@dataclasses.dataclass(frozen=True)
class Attached:
    """A model with an adapter attached, and the adapter's findings, sizes and renamed keys for the report."""

    model: PeftModel
    findings: list[Finding]
    dtypes: dict[str, int]
    tensors: int
    bytes: int
    renamed: dict[str, str]

    @classmethod
    def of(
        cls, model: PeftModel, findings: list[Finding], tensors: Iterable[torch.Tensor], renamed: dict[str, str]
    ) -> Attached:
        """Count the adapter's tensors, one that has several names once."""
        unique = {id(tensor): tensor for tensor in tensors}.values()
        dtypes = dict(Counter(str(tensor.dtype).removeprefix("torch.") for tensor in unique))
        return cls(model, findings, dtypes, len(unique), sum(tensor.nbytes for tensor in unique), renamed)


@dataclasses.dataclass(frozen=True)
class Checked:
    """The modules that peft built for an adapter on a model on meta, where all of it fitted."""

    adapter: Adapter
    injection: Injection
    before: Snapshot  # of the model on meta, without them


def check_on_meta(
    meta_model: torch.nn.Module, adapters: Sequence[Adapter], advise: Callable[[], Sequence[str]]
) -> Checked | None:
    """Attach the adapters to a model on meta, so that a misfit is refused before the base is loaded.

    Returns what peft built for the first adapter, if the model holds the modules of no other one. A refusal begins with
    what ``advise`` returns.
    """
    problems: list[str] = []
    built: list[Checked] = []
    model = meta_model
    for adapter in adapters:
        if find_alike(model, adapter):
            problems += errors_in(adapter.findings)
            continue
        if not builds_on_meta(adapter.config):  # needs the base's values; its tensors are matched as it is attached
            base, where = base_of(meta_model), adapter.facts.config_file
            foreign = foreign_prompt(adapter.config, base, where)
            config = with_new_names(adapter.config, adapter.renamed(base).old_names, base)
            problems += [*errors_in(adapter.findings), *without_targets(config, base), *foreign]
            continue
        before = Snapshot(model)
        try:
            injection = inject_and_match(model, with_own_config(adapter), on_meta=True)
        except NeedsValues:
            before.restore()
            problems += errors_in(adapter.findings)
            continue
        except AdapterError as error:
            problems += error.problems or [str(error)]
            continue
        model = injection.model
        problems += errors_in((*adapter.findings, *injection.match.findings, *findings_of_start(adapter, injection)))
        problems += _tokens_of_copies(adapter, injection)
        _remember(adapter, injection)
        built.append(Checked(adapter, injection, before))
    if problems:
        raise refusal(adapters, type(meta_model).__name__, (*advise(), *problems))
    return built[0] if len(built) == 1 and built[0].adapter is adapters[0] else None


def attach_checked(
    base: torch.nn.Module, checked: Checked, devices: RankDevices, *, dtype: torch.dtype | None
) -> Attached | None:
    """Attach an adapter to a loaded base with the modules that peft built for it on meta.

    None, and the base as it was, where they cannot be used (`move_modules`), or a value is not in the file.
    """
    adapter, injection = checked.adapter, checked.injection
    plan = plan_for(injection.model, adapter.facts)
    layers = plan.layers(injection.model) if plan is not None else None
    if layers is None or not move_modules(injection.model, base, layers, checked.before):
        return None
    fill_slots(injection.slots, injection.match.values, devices, dtype)
    return _attached(adapter, injection, ())


def attach(
    model: torch.nn.Module,
    adapter: Adapter,
    devices: RankDevices,
    *,
    undo: Sequence[Snapshot],
    keep_base: bool = False,
    dtype: torch.dtype | None = None,
    strict: bool = True,
) -> Attached:
    """Attach an adapter to ``model``, a base model or a PeftModel that has other adapters.

    ``undo`` is a snapshot of the model as it is now, then earlier ones: when this raises, restoring them makes the
    model what it was. Base weights are kept in all of them before they are overwritten from the file; with
    ``keep_base`` the last one keeps those, too, that the adapter's start is about to change. ``dtype`` None leaves each
    tensor as it is on disk. With ``strict``, a finding of severity "error" refuses the adapter.
    """
    injection = inject_checked(model, adapter, undo=undo, keep_base=keep_base, strict=strict)
    unusable = _tokens_of_copies(adapter, injection)
    if unusable:
        raise refusal([adapter], type(base_of(injection.model)).__name__, unusable)
    fill_slots(injection.slots, injection.match.values, devices, dtype)
    overwritten = overwrite_base(injection.model, injection.match.base_writes, adapter.file, undo)
    _bring_inputs(injection.model, devices)
    _remember(adapter, injection)
    return _attached(adapter, injection, (*injection.start, *overwritten))


def _tokens_of_copies(adapter: Adapter, injection: Injection) -> list[str]:
    """Return a problem for each module of which another adapter has a copy, and this one trains tokens.

    peft builds that, and its forward fails: it takes the wrapper of the copy for a layer that it does not know.
    """
    found = (key.partition(_TOKENS) for key in injection.slots)
    paths = [path for path, tokens, _ in found if tokens]
    return [
        f"{adapter.facts.config_file}: it trains tokens of {without_peft_levels(without_peft_prefix(path))!r}, of "
        f"which another adapter has a copy (modules_to_save), and peft's forward fails at both. Load it with a base of "
        f"its own: load_peft_on_rank(base_model, adapter)."
        for path in paths
        if isinstance(injection.model.get_submodule(path).base_layer, AuxiliaryTrainingWrapper)
    ]


def _attached(adapter: Adapter, injection: Injection, findings: Iterable[Finding]) -> Attached:
    now = (own_tensor(slot.owner, slot.name) for slot in injection.slots.values())
    tensors = [tensor for tensor in now if tensor is not None]
    findings = [*adapter.findings, *injection.match.findings, *findings, *rows_of_words(adapter, injection.model)]
    return Attached.of(injection.model, findings, tensors, injection.renamed)


def rows_of_words(adapter: Adapter, model: torch.nn.Module) -> list[Finding]:
    """Return the finding of a tokenizer beside an adapter with words for which the base has no rows."""
    base = base_of(model)
    weight = embeddings_and_head_of(base).weights[0]
    named = getattr(base, "name_or_path", None)
    known = Path(named) if isinstance(named, str) and named and Path(named).is_dir() else None
    return [] if weight is None else warning_of_added_words(adapter.facts.path, weight.shape[0], known)


def _remember(adapter: Adapter, injection: Injection) -> None:
    """Keep where the tensors of an adapter went, for others that are alike."""
    match = injection.match
    if injection.on_meta and not (errors_in(match.findings) or match.base_writes or starts_on_base(adapter.config)):
        remember(injection.model, adapter.name, adapter.facts, injection.file, match.values, injection.slots)


def _bring_inputs(model: PeftModel, devices: RankDevices) -> None:
    """Let the layers of adapters that stand in the device map themselves move their inputs to their device.

    accelerate's hook is on what was there at the dispatch, which is inside the adapter's layer now, and the factors
    would get the inputs on the device of the layer before. Modules further down are inside a block that has the hook.
    """
    base = base_of(model)
    for path, device in devices.by_module.items():
        module = base.get_submodule(path)
        if (is_tuner_layer(module) or isinstance(module, AuxiliaryTrainingWrapper)) and not hasattr(module, "_hf_hook"):
            add_hook_to_module(module, AlignDevicesHook(execution_device=device))
