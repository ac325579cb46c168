"""Chapter five: a 70B model placed on three cards, from its config alone."""

from __future__ import annotations

import logging
from pathlib import Path

from accelerate import infer_auto_device_map
from accelerate.utils import compute_module_sizes, get_balanced_memory
from transformers import AutoModelForCausalLM, LlamaConfig

from safe_loading import meta_model, plan_device_map
from safe_loading._core.report import format_bytes
from safe_loading.errors import DeviceMapInfeasible, SafeLoadingError

_CARDS = {0: "80GB", 1: "80GB", 2: "24GB"}


def chapter(folder: Path) -> str:
    """Plan a Llama of 70 billion parameters, draw the cards in `folder`, and return the table."""
    config = LlamaConfig(
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        vocab_size=128256,
        dtype="bfloat16",
    )
    plan = plan_device_map(config, _CARDS, verify=False)
    if any(use.used > use.limit for use in plan.devices) or plan.offloaded_bytes:
        raise SafeLoadingError(f"The plan of the demo exceeds its limits:\n{plan}")
    picture = folder / "plan.svg"
    picture.write_text(plan._repr_svg_(), encoding="utf-8")
    try:
        plan_device_map(config, {0: "80GB", 1: "40GB"}, verify=False)
    except DeviceMapInfeasible as error:
        missing = format_bytes(error.missing_bytes)
    else:
        raise SafeLoadingError("The demo placed a model of 141 GB on 120 GB.")
    return "\n".join(
        [
            "plan: a Llama of 70 billion parameters over cards of 80, 80 and 24 GB, from its config alone",
            f"  the picture of the cards is {picture.name} in the demo's folder",
            "",
            plan.table(),
            "",
            f'Nothing is offloaded; device_map="auto" (accelerate) sends {format_bytes(_by_accelerate(config))} to the',
            f"host. With cards of 80 and 40 GB the plan is refused, {missing} short.",
            "",
        ]
    )


def _by_accelerate(config: LlamaConfig) -> int:
    """Return the bytes that accelerate leaves off the cards when it is asked as ``device_map="auto"`` asks it."""
    model = meta_model(config, AutoModelForCausalLM)
    limits: dict[int | str, int | str] = {card: int(size[:-2]) * 10**9 for card, size in _CARDS.items()}
    limits["cpu"] = 10**12
    no_split = ["LlamaDecoderLayer"]
    log = logging.getLogger("accelerate.utils.modeling")
    level = log.level
    log.setLevel(logging.ERROR)  # it warns that this machine does not have these cards
    try:
        balanced = get_balanced_memory(model, limits, no_split_module_classes=no_split)
        device_map = infer_auto_device_map(model, balanced, no_split_module_classes=no_split)
    finally:
        log.setLevel(level)
    sizes = compute_module_sizes(model)
    return sum(sizes[path] for path, device in device_map.items() if device in ("cpu", "disk"))
