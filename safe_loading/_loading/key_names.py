"""The keys of an adapter file in the form that peft writes, with the prefixes of any wrapper removed. No torch."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping

from safe_loading._core.names import DDP_PREFIX, PEFT_PREFIX, canonical, without_peft_prefix
from safe_loading.errors import ArgumentError

# A key of a raw state_dict(), with the adapter's name after the kind of tensor. The tail is missing for the parameters
# of an embedding's LoRA. "weight" and "bias" are no names of adapters: lora_A.weight is what save_pretrained writes.
_WITH_ADAPTER_NAME = re.compile(
    r"^(?P<head>.+\.(?:lora_A|lora_B|lora_embedding_A|lora_embedding_B|lora_magnitude_vector|trainable_tokens_delta))"
    r"\.(?P<adapter>(?!weight$|bias$)[^.]+)(?P<tail>\.weight|\.bias)?$"
)


# A saved module in a raw state_dict(), which peft writes without this part.
_SAVED = re.compile(r"\.modules_to_save\.(?P<adapter>[^.]+)(?=\.)")


def canonical_key(key: str, *, prompt_learning: bool = False, own_module: bool = False) -> str:
    """Return the key as ``PeftModel.save_pretrained`` writes it.

    Takes off ``_fsdp_wrapped_module.``, ``_orig_mod.``, ``_checkpoint_wrapped_module.`` anywhere and the ``module.``
    of DistributedDataParallel in front, puts ``base_model.model.`` in front when it is missing (not with prompt
    learning, whose keys have no prefix), and takes an adapter's name out of ``lora_A.<name>.weight``, which a raw
    ``state_dict()`` has. With ``own_module`` the base has a child called ``module``, which is no wrapper then.
    """
    key = _strip_ddp(canonical(key))
    if prompt_learning:
        return key
    if not key.startswith("base_model."):
        key = PEFT_PREFIX + key
    # DistributedDataParallel may have wrapped the PeftModel, which is done with, or the base inside it.
    if key.startswith(PEFT_PREFIX) and not own_module:
        key = PEFT_PREFIX + _strip_ddp(without_peft_prefix(key))
    match = _WITH_ADAPTER_NAME.match(key)
    return match["head"] + (match["tail"] or "") if match else key


def _strip_ddp(key: str) -> str:
    while key.startswith(DDP_PREFIX):
        key = key.removeprefix(DDP_PREFIX)
    return key


def renames(
    keys: Iterable[str],
    *,
    prompt_learning: bool = False,
    own_module: bool = False,
    own_peft: bool = True,
    key_mapping: Mapping[str, str] | None = None,
    place: Callable[[str], str] | None = None,
) -> tuple[dict[str, str], list[str]]:
    """Return ``{key on disk: canonical key}`` where they differ, and a problem for each two that mean one tensor.

    ``key_mapping`` holds regular expressions and replacements for keys without peft's prefix, ``place`` says where in
    the base a key with that prefix leads. Without ``own_peft`` the base has no PeftModel in it, so that whatever stands
    before peft's prefix is a wrapper's: a LightningModule's ``model.``, or the prefix of a PeftModel around this one.
    """
    seen: dict[str, str] = {}
    changed: dict[str, str] = {}
    problems = []
    keys = list(keys)
    # Whoever saves what is trained (DeepSpeed's zero_to_fp32 --exclude_frozen_parameters) has raw names of all of it.
    adapters = {"default", *(found["adapter"] for key in keys if (found := _WITH_ADAPTER_NAME.match(key)))}
    for key in keys:
        name = canonical_key(key, prompt_learning=prompt_learning, own_module=own_module)
        if not (own_peft or prompt_learning):
            name = PEFT_PREFIX + name.rpartition(PEFT_PREFIX)[2] if PEFT_PREFIX in name else name
        name = _SAVED.sub(lambda found: "" if found["adapter"] in adapters else found[0], name)
        if key_mapping and name.startswith(PEFT_PREFIX) and not prompt_learning:
            name = PEFT_PREFIX + _mapped(without_peft_prefix(name), key_mapping)
        if place is not None and name.startswith(PEFT_PREFIX):
            name = place(name)
        if name in seen:
            problems.append(f"{seen[name]!r} and {key!r} both mean {name!r}; keep one of them")
        seen[name] = key
        if name != key:
            changed[key] = name
    return changed, problems


def check_key_mapping(key_mapping: object) -> None:
    """Refuse a value that is no mapping of regular expressions to their replacements."""
    if key_mapping is None:
        return
    if not isinstance(key_mapping, Mapping):
        raise ArgumentError(
            f"key_mapping={key_mapping!r:.80}: pass a mapping of regular expressions to their replacements, such as "
            f'{{"^visual": "model.visual"}}.'
        )
    for pattern, replacement in key_mapping.items():
        try:
            re.sub(pattern, replacement, "")
        except (re.error, TypeError, IndexError) as error:  # IndexError: a group without a name
            raise ArgumentError(
                f"key_mapping has {pattern!r}: {replacement!r}, which is no regular expression with a replacement: "
                f"{error}. Correct it, or leave it out."
            ) from error


def _mapped(key: str, key_mapping: Mapping[str, str]) -> str:
    """Return a key after the first pattern that matches it (peft ``load_peft_weights``)."""
    for pattern, replacement in key_mapping.items():
        mapped, count = re.subn(pattern, replacement, key)
        if count:
            return mapped
    return key


def layer_indices(keys: Iterable[str]) -> set[int]:
    """Return the layer numbers in the keys: the first number of each, since an expert's number comes after it."""
    numbers = (next((part for part in key.split(".") if part.isdigit()), None) for key in keys)
    return {int(number) for number in numbers if number is not None}


def summarize(changed: Mapping[str, str]) -> str:
    """Return how many keys were renamed, with the first as an example."""
    old, new = next(iter(changed.items()))
    return f"{len(changed)} key(s) renamed, for example {old!r} to {new!r}"
