"""Checks of the parameters themselves: quantized or not, in which dtype, tied or not."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import torch
from peft.utils.other import ModulesToSaveWrapper

from safe_loading._core.names import first_names
from safe_loading._core.report import Finding, counted, format_bytes
from safe_loading._model.dtypes import dtype_named
from safe_loading._model.embeddings_and_head import embeddings_and_head_of, tied_ends_of
from safe_loading._model.quantized.recognize import is_decoded_gguf, is_quantized

from .audited_model import AuditedModel, has_values, size_of


def bytes_by_dtype(audited: AuditedModel) -> dict[str, int]:
    """Return the bytes of the parameters by dtype, largest first, trainable and frozen ones separately."""
    sizes: defaultdict[str, int] = defaultdict(int)
    for parameter in {id(p): p for p in audited.model.parameters()}.values():
        kind = "trainable" if parameter.requires_grad else "frozen"
        sizes[f"{str(parameter.dtype).removeprefix('torch.')}, {kind}"] += parameter.nbytes
    return dict(sorted(sizes.items(), key=lambda item: -item[1]))


def check_quantized(audited: AuditedModel) -> Iterator[Finding]:
    """Yield a finding when the config says that the model is quantized, but its linear layers are not."""
    if audited.base is None:
        return
    in_config = getattr(audited.base.config, "quantization_config", None) is not None
    if not in_config and not any(getattr(audited.base, f"is_loaded_in_{bits}bit", False) for bits in (4, 8)):
        return
    # quantizers leave the output layer and the adapter's own layers as they are
    head = embeddings_and_head_of(audited.base).head
    plain = {
        name: weight
        for name, module in audited.base.named_modules()
        if type(module) is torch.nn.Linear and module is not head and not _is_adapters(name)
        if (weight := module._parameters.get("weight")) is not None
    }
    if (
        plain
        and not any(is_quantized(module) for module in audited.base.modules())
        and not is_decoded_gguf(audited.base)
    ):
        size = size_of(plain.values())
        message = (
            f"the config says that the model is quantized, but its {len(plain)} linear layers hold "
            f"{format_bytes(size)} of unquantized weights."
        )
        fix = "load it with from_pretrained(quantization_config=...); setting the config alone quantizes nothing."
        yield Finding("SL107", "error", next(iter(plain)), message, fix, size)


def check_dtypes(audited: AuditedModel) -> Iterator[Finding]:
    """Yield a finding for frozen weights in float32 of a model that computes in 16 bits."""
    if audited.base is None:
        return
    dtype = _dtype_of(audited)
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return
    adapter = {id(p) for p in audited.adapter_parameters.values()}
    # transformers itself loads these in float32
    keep = tuple(getattr(audited.base, "_keep_in_fp32_modules", None) or ())
    keep += tuple(getattr(audited.base, "_keep_in_fp32_modules_strict", None) or ())
    upcast = {
        name: p
        for name, p in audited.parameters.items()
        if p.dtype == torch.float32
        and not p.requires_grad
        and id(p) not in adapter
        and not any(k in name for k in keep)
    }
    extra = size_of(upcast.values()) // 2  # 16 bits would take the other half
    if upcast and dtype is torch.float32:
        yield from _float32_base(audited, next(iter(upcast)), extra)
    elif upcast:
        message = (
            f"{len(upcast)} frozen parameters of a {str(dtype).removeprefix('torch.')} model are in float32: they take "
            f"{format_bytes(extra)} more than they need to, and so do their activations."
        )
        fix = (
            "do not call prepare_model_for_kbit_training on a base that is not quantized, or cast them back; load with "
            "dtype='auto'."
        )
        if any(is_quantized(module) for module in audited.base.modules()):
            fix = (
                "leave prepare_model_for_kbit_training out, which has cast them: freeze the base, and call "
                "gradient_checkpointing_enable() and enable_input_require_grads(), as trl does."
            )
        yield Finding("SL108", "warning", next(iter(upcast)), message, fix, extra)


def _dtype_of(audited: AuditedModel) -> torch.dtype | None:
    """Return the dtype that a model computes in: its config's, or else that of most of its frozen weights."""
    dtype = dtype_named(getattr(getattr(audited.base, "config", None), "dtype", None))
    if dtype is not None:
        return dtype
    sizes: defaultdict[torch.dtype, int] = defaultdict(int)
    for parameter in audited.parameters.values():
        if parameter.is_floating_point() and not parameter.requires_grad:
            sizes[parameter.dtype] += parameter.numel()
    most = max(sizes, key=lambda found: sizes[found], default=None)
    # a model that was never told a dtype is in float32 by torch's default: that is a fault only if 16 bits are wanted
    return None if most is torch.float32 and not _computes_in_16_bits(audited) else most


def _computes_in_16_bits(audited: AuditedModel) -> bool:
    return any(getattr(audited.training_arguments, name, False) is True for name in ("bf16", "fp16"))


def _float32_base(audited: AuditedModel, first: str, extra: int) -> Iterator[Finding]:
    """Yield a finding for a base that was loaded in float32, which a frozen base gains nothing from."""
    mixed = _computes_in_16_bits(audited)
    if audited.peft is not None and audited.training:
        message = (
            f"the frozen base is in float32: it takes {format_bytes(extra)} more than in 16 bits, as do its activations"
            + (", although the trainer computes in 16 bits." if mixed else ".")
        )
        fix = "load it with dtype=torch.bfloat16; the adapter stays in float32."
        yield Finding("SL108", "warning" if mixed else "info", first, message, fix, extra)


def check_ties(audited: AuditedModel) -> Iterator[Finding]:
    """Yield a finding when embeddings that the config ties are two tensors."""
    parts = tied_ends_of(audited.base)
    if parts is None:
        return
    first, second = parts.weights
    if first is None or second is None or first.shape != second.shape:
        return
    if first is not second and first.untyped_storage()._cdata != second.untyped_storage()._cdata:
        message = (
            f"the config ties the output layer to the embeddings, but they are two tensors of "
            f"{format_bytes(second.nbytes)}: training makes them differ, and a checkpoint keeps only one of them."
        )
        fix = "call model.tie_weights() after replacing either, and make the optimizer afterwards."
        if any(isinstance(part, ModulesToSaveWrapper) for part in parts):
            message = (
                f"the config ties the output layer to the embeddings, but the adapter trains a copy of "
                f"{format_bytes(second.nbytes)} of one alone or of each: training makes them differ, so that a merged "
                f"model cannot tie them."
            )
            fix = _fix_of_copies(audited)
        yield Finding("SL111", "error", type(audited.base).__name__, message, fix, second.nbytes)


def _fix_of_copies(audited: AuditedModel) -> str:
    """Return the way to train tied weights with the method that has copies of them; only LoRA's can tie those."""
    configs = [config for config in audited.adapter_configs.values() if getattr(config, "modules_to_save", None)]
    kind = type(configs[0]).__name__ if configs else "LoraConfig"
    if configs and not hasattr(configs[0], "ensure_weight_tying"):
        return (
            f"leave them out of modules_to_save, for {kind} cannot tie copies; or take "
            f"LoraConfig(ensure_weight_tying=True), which trains one copy for both."
        )
    return f"{kind}(ensure_weight_tying=True) trains one copy for both."


def _is_adapters(name: str) -> bool:
    return any(part.startswith("lora_") or part in ("modules_to_save", "value_head") for part in name.split("."))


def check_finite(audited: AuditedModel) -> Iterator[Finding]:
    """Yield a finding for trained parameters that hold NaN or an infinity, as memory does that nothing has filled."""
    trained = {n: p for n, p in audited.model.named_parameters() if p.requires_grad and p.is_floating_point()}
    bad = {name: p for name, p in trained.items() if _has_no_number(p.detach())}
    if bad and audited.training:
        message = (
            f"{counted(len(bad), 'trained parameter holds', 'trained parameters hold')} NaN or an infinity: the loss "
            f"will be NaN from the first step on."
        )
        fix = "fill them: torch.empty() does not, nor does a load with missing keys; torch.nn.init.normal_(parameter)."
        yield Finding("SL147", "error", first_names(bad), message, fix, size_of(bad.values()))


def _has_no_number(tensor: torch.Tensor) -> bool:
    if not has_values(tensor) or tensor.numel() == 0 or tensor.itemsize < 2:
        return False
    return not all(bool(torch.isfinite(end)) for end in torch.aminmax(tensor))
