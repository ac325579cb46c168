"""Checks for parts that look trained and are not: disabled adapters, frozen tokens, gradients that cannot be scaled."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from pathlib import Path

import torch
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from transformers import AutoConfig, PreTrainedModel

from safe_loading._checkpoint.model_folder import ModelFolder
from safe_loading._core.names import method_name
from safe_loading._core.report import Finding, Severity, counted
from safe_loading._memory.trace.inputs import is_of_engine
from safe_loading._model.embeddings_and_head import embeddings_and_head_of
from safe_loading._model.text_config import text_config
from safe_loading._wrapping.transparent import mixins_and_original
from safe_loading._wrapping.wrap_order import accessed

from .audited_model import AuditedModel, has_values, size_of
from .kept_memory import is_target
from .trainer_code import calls

# The heads that peft trains and saves for a task, by their names in transformers.
_TASKS = {"score": "SEQ_CLS", "classifier": "SEQ_CLS", "qa_outputs": "QUESTION_ANS"}
_ALLOCATES = "update_and_allocate"
_FEW = 8  # elements, of which no spread can be told
_PADDED = (8, 64, 128)  # what the rows of embeddings are rounded up to, for speed alone


def check_disabled(audited: AuditedModel) -> Iterator[Finding]:
    """Yield a finding for adapters that are disabled or merged: the base then runs without them."""
    if audited.peft is None or not audited.training:
        return
    layers = {n: m for n, m in audited.peft.named_modules() if isinstance(m, BaseTunerLayer)}
    off = {name: "disabled" for name, layer in layers.items() if layer.disable_adapters}
    off |= {name: "merged" for name, layer in layers.items() if getattr(layer, "merged", False)}
    if off:
        name, why = next(iter(off.items()))
        undo = {"disabled": "base_model.enable_adapter_layers()", "merged": "unmerge_adapter()"}[why]
        own = {name: p for name, p in audited.adapter_parameters.items() if p.requires_grad}
        message = (
            f"the adapter is {why} in {len(off)} of {len(layers)} layers, which run without it: nothing trains it."
        )
        yield Finding("SL127", "error", name, message, f"model.{undo} before training.", size_of(own.values()))


def check_allocated(audited: AuditedModel) -> Iterator[Finding]:
    """Yield a finding for AdaLoRA under a trainer in which no code gives each layer its rank."""
    configs = audited.adapter_configs
    adapters = [name for name, config in configs.items() if method_name(config.peft_type) == "ADALORA"]
    if not adapters or audited.trainer is None or calls(audited, _ALLOCATES):
        return
    message = (
        f"nothing in {type(audited.trainer).__name__} and its callbacks calls {_ALLOCATES}, by which AdaLoRA gives "
        f"each layer its rank: all keep the first one, init_r={getattr(configs[adapters[0]], 'init_r', None)}."
    )
    fix = (
        f"call model.base_model.{_ALLOCATES}(state.global_step) in on_optimizer_step of a TrainerCallback; for a model "
        f"of add_adapter, which has no such method, take get_peft_model."
    )
    yield Finding("SL139", "warning", type(audited.inner).__name__, message, fix)


def check_nested(audited: AuditedModel) -> Iterator[Finding]:
    """Yield a finding for a PeftModel inside another: the adapter that was loaded is lost, and none loads again."""
    nested = [path for path, m in audited.model.named_modules() if isinstance(m, PeftModel)]
    inner = next((path for path in nested for outer in nested if path != outer and path.startswith(outer)), None)
    if inner is None:
        return
    (outer, *_) = nested
    message = (
        "get_peft_model was called with a model that has an adapter: an adapter of the same name starts from new "
        "values, and the keys of a checkpoint have the prefix twice, so that no load finds them."
    )
    fix = (
        f"train the one that was loaded: model{f'.{inner}' if inner else ''}, or load it with is_trainable=True alone."
    )
    size = size_of(p for p in audited.model.get_submodule(outer).parameters() if p.requires_grad)
    yield Finding("SL137", "error", inner, message, fix, size)


def check_frozen_heads(audited: AuditedModel) -> Iterator[Finding]:
    """Yield a finding for each head that is frozen with the values that it was made with, while others are trained."""
    if not audited.training or not any(p.requires_grad for p in audited.model.parameters()):
        return
    seen: set[int] = set()
    for where, head, fix in _heads(audited):
        parameters = [*head.parameters()]
        if id(head) in seen or any(p.requires_grad for p in parameters) or not _as_made(head, audited.base):
            continue
        seen.add(id(head))
        if _is_copy(head, audited.model) or _is_saved(where, head, audited):
            continue
        message = (
            "it is frozen and has the values that it was made with: what is trained learns to suit a random head, "
            "which no checkpoint of the adapter has."
        )
        yield Finding("SL135", "warning", where, message, fix, size_of(parameters))


def _heads(audited: AuditedModel) -> Iterator[tuple[str, torch.nn.Module, str]]:
    """Yield the heads of a task, the parts of a class of the user's own and of wrappers, with the way to train each."""
    base, adapted = audited.base, audited.adapted is not None
    for name, child in base.named_children() if base is not None and adapted else ():
        task = _TASKS.get(name)
        if task is not None:
            yield name, child, f"name the task, LoraConfig(task_type={task!r}), or modules_to_save=[{name!r}]."
    own_class = base is not None and not is_of_engine(mixins_and_original(type(base))[1])
    head = embeddings_and_head_of(base).head if base is not None and own_class else None
    for name, child in base.named_children() if base is not None and own_class else ():
        if child is not head and not is_target(name) and not _has_model(child):
            road = f"name it in modules_to_save=[{name!r}]" if adapted else f"call model.{name}.requires_grad_(True)"
            yield name, child, f"{road}."
    for wrapper in audited.wrappers:
        parts = wrapper.inside_path.split(".")
        for depth, inner in enumerate(parts):
            path = ".".join(parts[:depth])
            for name, child in wrapper.module.get_submodule(path).named_children():
                shared = {wrapper.inside, *wrapper.inside.modules()} & {*child.modules()}
                if name != inner and not shared and not _has_model(child) and not is_target(name):
                    where = ".".join(filter(None, (wrapper.path, path, name)))
                    fix = f"attach it with attach_head, or call model{accessed(where)}.requires_grad_(True)."
                    yield where, child, fix


def _has_model(module: torch.nn.Module) -> bool:
    return any(isinstance(m, (PreTrainedModel, PeftModel)) for m in module.modules())


def _is_copy(head: torch.nn.Module, model: torch.nn.Module) -> bool:
    """Whether a trained part has the same values: an average that follows it is frozen, and begins as its copy."""
    own = next(head.parameters())
    trained = [p for p in model.parameters() if p.requires_grad and p.shape == own.shape and not p.is_meta]
    return not own.is_meta and any(p.device == own.device and torch.equal(p, own) for p in trained)


def _is_saved(where: str, head: torch.nn.Module, audited: AuditedModel) -> bool:
    """Whether the checkpoint of the base has all of a head: a short training leaves the values as they were spread."""
    found = None if audited.checkpoint is None else ModelFolder(audited.checkpoint).whole_checkpoint
    held = {} if found is None else found.tensors
    own = {f"{where}.{name}": tuple(p.shape) for name, p in head.named_parameters()}
    return all(name in held and held[name].shape == shape for name, shape in own.items())


def _as_made(module: torch.nn.Module, base: PreTrainedModel | None) -> bool:
    """Whether all linear layers of a module have values as torch or transformers draws them, or zeros."""
    spread = getattr(getattr(base, "config", None), "initializer_range", None)
    weights = [m.weight for m in module.modules() if isinstance(m, torch.nn.Linear)]
    return bool(weights) and all(_is_drawn(weight.detach(), spread) for weight in weights)


def _is_drawn(weight: torch.Tensor, spread: object) -> bool:
    if not has_values(weight) or not weight.is_floating_point() or weight.numel() < _FEW:
        return False
    values = weight.float()
    bound, found, most = weight.shape[1] ** -0.5, float(values.std()), float(values.abs().max())
    away = max(0.05, 4 / (2 * weight.numel()) ** 0.5)  # four standard errors of a standard deviation
    uniform = most <= 1.01 * bound and abs(found * 3**0.5 / bound - 1) < away  # torch's own Linear
    normal = isinstance(spread, float) and spread > 0 and abs(found / spread - 1) < away
    return most == 0 or uniform or normal


def check_tokens(audited: AuditedModel) -> Iterator[Finding]:
    """Yield findings for tokens that were added to embeddings which stay frozen."""
    base = audited.base
    if base is None or audited.peft is None or not audited.training:
        return
    embeddings = embeddings_and_head_of(base).embeddings
    weight = getattr(embeddings, "weight", None)
    if not isinstance(embeddings, torch.nn.Module) or not isinstance(weight, torch.Tensor) or weight.dim() != 2:
        return
    rows, known = weight.shape[0], _rows_of_checkpoint(audited.checkpoint)
    # a config may count other words than those of the embeddings: MusicGen's the codes that its decoder writes
    if any(p.requires_grad for p in embeddings.parameters()) or rows != _vocabulary(base.config):
        return
    tokenizer = getattr(audited.trainer, "processing_class", None)
    used = min(rows, len(tokenizer)) if isinstance(tokenizer, Sized) else rows
    if known is not None and used > known:
        padded = not isinstance(tokenizer, Sized) and any(rows == -(-known // size) * size for size in _PADDED)
        severity: Severity = "info" if padded else "warning"
        message = (
            f"the embeddings have {used - known} tokens that the checkpoint has not ({used} and {known}), but they are "
            f"frozen: those rows keep the values that they were initialized with."
            + (" They may be no tokens: their number is a round one." if padded else "")
        )
        fix = f"LoraConfig(..., trainable_token_indices=list(range({known}, {used}))), or modules_to_save for all rows."
        where = next(name for name, module in base.named_modules() if module is embeddings)
        yield Finding("SL128", severity, where, message, fix, (used - known) * weight.shape[1] * weight.itemsize)


def _rows_of_checkpoint(folder: Path | None) -> int | None:
    """Return the rows of the embeddings in a checkpoint; None where that is not known."""
    if folder is None:
        return None
    try:
        config = AutoConfig.from_pretrained(str(folder), local_files_only=True)
    except (OSError, ValueError, KeyError):
        return None
    return _vocabulary(config)


def _vocabulary(config: object) -> int | None:
    rows = getattr(text_config(config), "vocab_size", None)
    return rows if isinstance(rows, int) else None


_REFUSALS = {
    torch.float16: "'Attempting to unscale FP16 gradients'",
    torch.bfloat16: "'\"_amp_foreach_non_finite_check_and_unscale_cuda\" not implemented for 'BFloat16''",
}


def check_scaled_halves(audited: AuditedModel) -> Iterator[Finding]:
    """Yield a finding for trained 16-bit weights under float16 autocast, whose gradients GradScaler refuses."""
    # DeepSpeed scales the loss itself, and accelerate makes no GradScaler beside it
    if getattr(audited.training_arguments, "fp16", False) is not True or audited.uses("deepspeed"):
        return
    trained = {n: p for n, p in audited.model.named_parameters() if p.requires_grad}
    for dtype, refusal in _REFUSALS.items():
        halves = {n: p for n, p in trained.items() if p.dtype == dtype}
        if not halves:
            continue
        message = (
            f"{counted(len(halves), 'trained parameter is', 'trained parameters are')} in "
            f"{str(dtype).removeprefix('torch.')} and the trainer has fp16=True: its GradScaler fails at the first "
            f"step with {refusal}."
        )
        fix = (
            "cast them: for p in model.parameters(): p.data = p.data.float() if p.requires_grad else p.data; or load "
            "it in bfloat16 with bf16=True."
        )
        yield Finding("SL129", "error", next(iter(halves)), message, fix, size_of(halves.values()))
