"""One class of transformers after the other through wrap_fsdp_meta_safe: each equal to what from_pretrained loads."""

from __future__ import annotations

import inspect
import random
import shutil
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import transformers
from fsdp_cases import compared
from tiny_models import saved
from torch.utils._pytree import tree_flatten, tree_unflatten

from safe_loading import meta_model, wrap_fsdp_meta_safe

LENGTH = 16
# Their gradients are sums of other partial sums, because a tensor goes into a unit, is used there more than once, and
# is used outside too (attention and the residual around it, an encoder's output in every layer of the decoder). They
# equal those of one process whose units are bounded as FSDP2 bounds them.
OTHER_SUMS = frozenset(
    f"{name}:2"
    for name in (
        "Blip2ForConditionalGeneration",
        "Idefics2ForConditionalGeneration",
        "Inkling2ForCausalLM",
        "Inkling2ForConditionalGeneration",
        "Pix2StructForConditionalGeneration",
        "T5Gemma2ForConditionalGeneration",
        "VipLlavaForConditionalGeneration",
        "VisionEncoderDecoderModel",
        "XLMWithLMHeadModel",
    )
)
# The tiny config, or the batch, takes no step in one process; parameters and buffers are compared.
CANNOT_STEP = frozenset(
    (
        "BltForCausalLM",
        "PI0ForConditionalGeneration",
        "Step3p7ForConditionalGeneration",
        "UdopForConditionalGeneration",
        "Zamba2ForCausalLM",
    )
)
# No step under FSDP: its reversible layers run their modules again in the backward pass without their own forward, so
# that no unit is gathered. One process does not repeat itself either: it draws new hashes at each step.
NOT_COMPARED = frozenset(("ReformerModelWithLMHead",))


def batch_of(model: Any) -> dict[str, Any]:
    """Return two rows of tokens, after the tokens of two images where the model says how many they are."""
    takes = inspect.signature(model.forward).parameters
    facts = model.config.to_dict()
    special = {value for value in _numbers(facts) if value < 251}
    tokens = torch.tensor([token for token in range(3, 251) if token not in special][: 2 * LENGTH]).reshape(2, LENGTH)
    batch: dict[str, Any] = {"input_ids": tokens, **EXTRA.get(type(model).__name__, dict)()}
    token = next((facts[key] for key in ("image_token_id", "image_token_index") if facts.get(key) is not None), -1)
    for images in _images(model, takes) if token >= 0 else ():
        if count := _features(model, images):
            batch["input_ids"] = torch.cat([torch.full((2, count // 2), token), tokens], 1)
            batch |= images
            break
    if "mm_token_type_ids" in takes:
        batch["mm_token_type_ids"] = (batch["input_ids"] == token).int()
    if "use_cache" in takes:
        batch["use_cache"] = False
    return batch


def _noise(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


# What a class wants beside tokens, or in their place.
EXTRA: dict[str, Callable[[], dict[str, Any]]] = {
    "BlipForConditionalGeneration": lambda: {"pixel_values": _noise(2, 3, 32, 32)},
    "GitForCausalLM": lambda: {"pixel_values": _noise(2, 3, 32, 32)},
    "IdeficsForVisionText2Text": lambda: {
        "pixel_values": _noise(2, 1, 3, 32, 32),
        "image_attention_mask": torch.ones(2, LENGTH, 1),
    },
    "InstructBlipForConditionalGeneration": lambda: {
        "pixel_values": _noise(2, 3, 32, 32),
        "qformer_input_ids": torch.arange(3, 11).reshape(2, 4),
    },
    "InstructBlipVideoForConditionalGeneration": lambda: {
        "pixel_values": _noise(2, 1, 3, 32, 32),
        "qformer_input_ids": torch.arange(3, 11).reshape(2, 4),
    },
    "Kosmos2ForConditionalGeneration": lambda: {
        "pixel_values": _noise(2, 3, 32, 32),
        "image_embeds_position_mask": (torch.arange(LENGTH) < 4).expand(2, LENGTH).long(),
    },
    **dict.fromkeys(
        ["MusicgenForCausalLM", "MusicgenMelodyForCausalLM"],
        lambda: {"input_ids": torch.arange(3, 3 + 8 * LENGTH).reshape(8, LENGTH)},  # four codebooks for each row
    ),
    "Blip2ForConditionalGeneration": lambda: {"pixel_values": _noise(2, 3, 32, 32)},
    "Pix2StructForConditionalGeneration": lambda: {
        "input_ids": None,
        "flattened_patches": torch.cat([torch.ones(2, 4, 2), _noise(2, 4, 768)], 2),
        "decoder_input_ids": torch.arange(3, 11).reshape(2, 4),
    },
    "T5Gemma2ForConditionalGeneration": lambda: {"decoder_input_ids": torch.arange(3, 11).reshape(2, 4)},
    "UdopForConditionalGeneration": lambda: {
        "bbox": torch.zeros(2, LENGTH, 4, dtype=torch.long),
        "decoder_input_ids": torch.arange(3, 11).reshape(2, 4),
    },
    "VisionEncoderDecoderModel": lambda: {
        "input_ids": None,
        "pixel_values": _noise(2, 3, 32, 32),
        "decoder_input_ids": torch.arange(3, 11).reshape(2, 4),
    },
}


def _images(model: Any, takes: Collection[str]) -> Iterator[dict[str, Any]]:
    """Yield two images in the ways that models want them: patches with their grid, squares, squares in a row."""
    vision = getattr(model.config, "vision_config", None)
    if vision is None or "pixel_values" not in takes:
        return
    if "image_grid_thw" in takes:
        channels = getattr(vision, "in_channels", None) or getattr(vision, "in_chans", 3)
        patch = getattr(vision, "patch_size", 8)
        depth = channels * getattr(vision, "temporal_patch_size", 1) * patch**2
        grid = {"image_grid_thw": torch.tensor([[1, 4, 4]] * 2)}
        yield {"pixel_values": _noise(2 * 16, depth), **grid}
        yield {
            "pixel_values": _noise(2 * 16, 3, getattr(vision, "patch_size", 8), getattr(vision, "patch_size", 8)),
            **grid,
        }
    size = getattr(vision, "image_size", 32)
    size = size if isinstance(size, int) else size[0]
    sizes = {"image_sizes": torch.tensor([[size, size]] * 2)} if "image_sizes" in takes else {}
    for shape in ((2, 3), (2, 1, 3), (2, 3, 3), (2, 5, 3)):
        yield {"pixel_values": _noise(*shape, size, size)}
        if sizes:
            yield {"pixel_values": _noise(*shape, size, size), **sizes}


def _features(model: Any, images: dict[str, Any]) -> int:
    """Return into how many tokens the images turn; 0 where the model does not say."""
    inner = model if hasattr(model, "get_image_features") else getattr(model, "model", model)
    try:
        with torch.no_grad():
            features = inner.get_image_features(**images)
    except Exception:
        return 0
    for name in ("pooler_output", "last_hidden_state"):  # Llama 4 pools nothing
        features = features if getattr(features, name, None) is None else getattr(features, name)
    parts = features if isinstance(features, (tuple, list)) else [features]
    return sum(part.numel() // part.shape[-1] for part in parts)


def _numbers(facts: Any) -> set[int]:
    found: set[int] = set()
    for name, value in facts.items():
        if isinstance(value, dict):
            found |= _numbers(value)
        elif str(name).endswith(("_token_id", "_token_index")):
            found |= set(value) if isinstance(value, list) else {value} if isinstance(value, int) else set()
    return found


def step(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    """One forward and backward pass in train mode; dropout draws the same numbers each time."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    model.zero_grad()
    output = model(**batch)
    logits = output.logits if hasattr(output, "logits") else output[0]
    logits.float().square().mean().backward()
    return logits.detach()


class _Boundary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tensors

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads


def bound(model: Any, units: list[str]) -> None:
    """Pass what goes into a unit through one node of the autograd graph, as ``fully_shard`` does.

    Where a tensor is used more than once inside a unit and outside of it too, its gradient is then the sum of other
    partial sums.
    """

    def hook(module: Any, args: Any, kwargs: Any) -> Any:
        leaves, spec = tree_flatten((args, kwargs))
        at = [number for number, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        for number, tensor in zip(at, _Boundary.apply(*(leaves[number] for number in at)) if at else (), strict=True):
            leaves[number] = tensor
        return tree_unflatten(leaves, spec)

    for unit in units:
        first = unit.split(" + ")[0]
        if first != "(root)":
            model.get_submodule(first).register_forward_pre_hook(hook, with_kwargs=True)


def check(name: str, version: Any, folder: Path) -> dict[str, Any]:
    """Wrap a class and compare it with a single process: all, or the weights alone where that cannot take a step."""
    kind = getattr(transformers, name)
    one = kind.from_pretrained(folder, attn_implementation="eager").train()
    for parameter in one.parameters():
        # where torch would put it: in the file's own memory it is aligned to 8 bytes, and some kernels round otherwise
        parameter.data = parameter.data.clone()
    model: Any = meta_model(folder, kind, attn_implementation="eager").train()
    for name_of, parameter in model.named_parameters():
        # from_pretrained trains what the class froze (Idefics), unless it shards
        one.get_parameter(name_of).requires_grad_(parameter.requires_grad)
    model = wrap_fsdp_meta_safe(model, folder, version=version)
    units = model.fsdp_report.units
    facts = {"units": len(units), "share": model.fsdp_report.largest_unit.bytes / model.fsdp_report.model_bytes}
    try:
        batch = batch_of(one)
        logits = step(one, batch)
    except Exception as error:
        nothing = torch.zeros(1)
        one.zero_grad()
        return {**facts, "differences": compared(one, model, nothing, nothing), "no step": str(error)[:200]}
    facts["images"] = "pixel_values" in batch
    differences = compared(one, model, logits, step(model, batch))
    if differences["gradients"]:
        bound(one, [unit.name for unit in units])
        step(one, batch)
        again = compared(one, model, logits, logits)
        facts["other sums"] = not again["gradients"]
        differences["gradients"] = again["gradients"]
    return {**facts, "differences": differences}


def sweep(folder: Path, cases: list[str], report: Any) -> None:
    """Check cases, each a class and a version as ``NAME:2``, on ranks that know one another."""
    for case in cases:
        name, _, version = case.partition(":")
        path = folder / name
        if dist.get_rank() == 0 and not path.exists():
            saved(name, path)
        dist.barrier()
        try:
            found = check(name, int(version), path)
        except Exception as error:
            found = {"error": f"{type(error).__name__}: {error}"[:1500]}
        report(**{case: found})
        dist.barrier()
        if dist.get_rank() == 0 and case == [each for each in cases if each.partition(":")[0] == name][-1]:
            shutil.rmtree(path, ignore_errors=True)
