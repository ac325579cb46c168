"""The preparation of a base in 4 or 8 bits for training, by an engine or by nobody: its dtypes and its adapter's.

trl's trainers leave the base as it was loaded and cast what is trained to bfloat16 (read in 1.16, and so since its pull
request 4577). peft's ``prepare_model_for_kbit_training`` freezes the base and casts what is not packed to float32, and
its ``get_peft_model`` makes the adapter in float32. That alone is "none". axolotl calls peft's, and casts norms,
embeddings and the output layer back (``_configure_embedding_dtypes`` of its ``loaders/model.py``, read in September
2026). unsloth freezes the base as it was loaded, and casts the adapter to float32 (``prepare_model_for_training`` of
unsloth-zoo, read at the same time); its own kernels are not those of the model that is traced.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, cast, get_args

import torch

from safe_loading._core.report import Finding
from safe_loading._model.formats.four_bit import is_four_bit
from safe_loading.errors import ArgumentError

from .stand_ins import stand_ins_of

KbitPreparation = Literal["trl", "peft", "axolotl", "unsloth", "none"]
_NOTES: dict[KbitPreparation, str] = {
    "trl": "as trl does it: the base stays in its dtype, and what is trained is cast to bfloat16",
    "peft": "by peft's prepare_model_for_kbit_training: what is not packed is cast to float32",
    "axolotl": "as axolotl does it: by peft's preparation, with norms, embeddings and the output layer cast back",
    "unsloth": (
        "as unsloth does it: the base stays in its dtype, and the adapter is in float32; unsloth's own kernels and "
        "offloaded checkpoints, which take less, are not counted"
    ),
    "none": "by nobody: the base stays in its dtype, and the adapter is in float32",
}
# trl leaves it in float32, in which its steps are not lost
_NOT_CAST = "lora_magnitude_vector"
# what axolotl casts back, in names of modules: by the model's type the embeddings and the output layer
_EMBEDDINGS = {"gpt_neox": ("embed_in", "embed_out"), "falcon": ("word_embeddings", "lm_head")}
_OTHER_EMBEDDINGS = ("embed_tokens", "lm_head")
_SIXTEEN_BITS = (torch.float16, torch.bfloat16)


def check_preparation(asked: object) -> KbitPreparation:
    """Return the preparation that was asked for, trl's for None, or raise `ArgumentError`."""
    for known in get_args(KbitPreparation):
        if asked == known:
            return cast("KbitPreparation", known)
    if asked is None:
        return "trl"
    words = ", ".join(f'"{word}"' for word in get_args(KbitPreparation))
    raise ArgumentError(f"prepare_for_kbit={asked!r:.80}: pass one of {words}, or None for trl's.")


def preparation_in_words(preparation: KbitPreparation) -> str:
    """Return the note of a forecast about its preparation."""
    return f"Prepared for training in 4 or 8 bits {_NOTES[preparation]}."


def preparation_assumed(preparation: KbitPreparation) -> Finding:
    """Return the finding of a plan for which nobody said who prepares the base."""
    message = f"nobody said who prepares the base for training, and it is counted {_NOTES[preparation]}."
    fix = 'pass prepare_for_kbit="trl", or "peft" for a script that calls prepare_model_for_kbit_training.'
    return Finding("kbit-assumed", "info", "", message, fix)


def prepare_base(model: torch.nn.Module, preparation: KbitPreparation) -> dict[str, int]:
    """Freeze and cast a base on meta as its preparation does; return the bytes before of each cast parameter.

    trl freezes nothing, but its Trainer trains no packed model without an adapter, and peft freezes what has one.
    """
    before = {}
    kept = _cast_back_by_axolotl(model) if preparation == "axolotl" else set()
    for name, parameter in model.named_parameters():
        if preparation != "none":
            parameter.requires_grad = False
        to_cast = parameter.dtype in _SIXTEEN_BITS and parameter not in kept and not is_four_bit(parameter)
        if to_cast and preparation in ("peft", "axolotl"):
            before[name] = parameter.nbytes
            parameter.data = parameter.data.to(torch.float32)
    return before


def _cast_back_by_axolotl(model: torch.nn.Module) -> set[torch.nn.Parameter]:
    """Return the parameters that have the model's dtype after axolotl's preparation."""
    kind = getattr(getattr(model, "config", None), "model_type", "")
    words = _EMBEDDINGS.get(kind, _OTHER_EMBEDDINGS)
    kept: set[torch.nn.Parameter] = set()
    for name, module in model.named_modules():
        if "norm" in name or (any(word in name for word in words) and hasattr(module, "weight")):
            kept.update(module.parameters())
    return kept


def prepare_adapter(model: torch.nn.Module, preparation: KbitPreparation) -> None:
    """Replace the parameters that trl would cast, those of an adapter on a packed base, by others on meta in bfloat16.

    They stay as they are themselves: some may be the caller's, such as biases that are trained with the adapter.
    """
    if preparation != "trl" or not stand_ins_of(model):
        return
    in_16_bits: dict[torch.nn.Parameter, torch.nn.Parameter] = {}
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is None or not parameter.requires_grad or _NOT_CAST in f"{path}.{name}":
                continue
            if parameter not in in_16_bits:
                values = torch.empty(parameter.shape, dtype=torch.bfloat16, device="meta")
                in_16_bits[parameter] = torch.nn.Parameter(values)
            module._parameters[name] = in_16_bits[parameter]


def preparation_of(trainer: Any) -> KbitPreparation | None:
    """Return who prepared the model of a trainer; None where there is none in 4 or 8 bits."""
    engines = {kind.__module__.partition(".")[0] for kind in type(trainer).__mro__}
    if "axolotl" in engines:  # before trl, of whose trainers some of axolotl's derive
        return "axolotl"
    if "trl" in engines:
        return "trl"
    model = getattr(trainer, "model", None)
    if not getattr(model, "is_loaded_in_4bit", False) and not getattr(model, "is_loaded_in_8bit", False):
        return None
    return "peft" if any(cast_by_peft(model)) else "none"


def cast_by_peft(model: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yield frozen parameters in float32 where the config says 16 bits: so peft leaves them, and nobody else."""
    if getattr(getattr(model, "config", None), "dtype", None) in _SIXTEEN_BITS:
        for name, parameter in model.named_parameters():
            if parameter.dtype == torch.float32 and not parameter.requires_grad:
                yield name, parameter
