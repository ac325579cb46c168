"""Merging from disk to disk into the codes of a base: what rounding loses, and the time of a weight.

One layer of real size with random weights: a Llama's in fp8 with blocks of 128 x 128, and gpt-oss's experts in MXFP4;
LoRA of rank 16. The update is scaled to a share of the weight's norm. Beside it the merge into a plain output.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from _common import ENVIRONMENT, headline, options, table, write_json

os.environ.update(ENVIRONMENT)

SHARES = (0.001, 0.01, 0.05)
TARGETS: dict[str, dict[str, Any]] = {
    "fp8": {"target_modules": ["q_proj", "o_proj"]},
    "mxfp4": {"target_modules": [], "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]},
}


def save_bases(folder: Path, width: int) -> Iterator[tuple[str, Path, Path]]:
    """Save each kind of base, in codes and plain."""
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForCausalLM, GptOssConfig, LlamaConfig

    heads = max(1, width // 128)
    sizes: dict[str, Any] = {"hidden_size": width, "num_hidden_layers": 1, "vocab_size": 128}
    sizes |= {"num_attention_heads": heads, "num_key_value_heads": heads, "dtype": "bfloat16"}
    narrow = width * 2880 // 4096 // 32 * 32
    experts = {**sizes, "hidden_size": narrow, "intermediate_size": narrow, "head_dim": 32, "num_local_experts": 4}
    configs = {"fp8": LlamaConfig(**sizes, intermediate_size=256), "mxfp4": GptOssConfig(**experts)}
    for kind, config in configs.items():
        torch.manual_seed(0)
        plain, base = folder / f"{kind}-plain", folder / kind
        auto: Any = AutoModelForCausalLM  # whose methods have no annotations
        auto.from_config(config, dtype=torch.bfloat16).save_pretrained(plain)
        tensors = load_file(plain / "model.safetensors")
        settings = {"quant_method": kind}
        for name in list(tensors):
            if kind == "fp8" and name.endswith("_proj.weight"):
                tensors |= as_fp8(name, tensors[name])
            elif kind == "mxfp4" and name.endswith(("gate_up_proj", "down_proj")):
                tensors |= as_mxfp4(name, tensors.pop(name))
        base.mkdir()
        save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
        document = json.loads((plain / "config.json").read_text())
        blocks = {"weight_block_size": [128, 128]} if kind == "fp8" else {}
        document["quantization_config"] = {**settings, **blocks}
        (base / "config.json").write_text(json.dumps(document))
        yield kind, base, plain


def as_fp8(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return codes and scales, the largest absolute value of a block / 448."""
    from safe_loading._merging.weights.fp8_merge import codes_under, fitted_scales, largest_of_blocks

    block, values = (128, 128), weight.double()
    largest = largest_of_blocks(values, block)
    scales = fitted_scales(largest, torch.zeros(largest.shape), torch.float8_e4m3fn)
    return {name: codes_under(values, scales, block, torch.float8_e4m3fn), f"{name}_scale_inv": scales}


def as_mxfp4(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return codes and exponents, by the rule of the merge."""
    from safe_loading._model.formats.mxfp4 import pack_mxfp4, requantize_mxfp4

    experts = weight.transpose(1, 2)
    empty = torch.full((experts.shape[1], experts.shape[2] // 32), 254, dtype=torch.uint8)
    both = [requantize_mxfp4(expert.double().contiguous(), empty) for expert in experts]
    blocks = torch.stack([pack_mxfp4(codes).view(*empty.shape, 16) for codes, _ in both])
    return {f"{name}_blocks": blocks, f"{name}_scales": torch.stack([exponents for _, exponents in both])}


def save_adapter(folder: Path, plain: Path, share: float, **config: Any) -> Path:
    """Save an adapter whose updates have about that share of the norm of their weights."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(1)
    model: Any = AutoModelForCausalLM.from_pretrained(plain)
    model = get_peft_model(model, LoraConfig(r=16, lora_alpha=16, **config))
    with torch.no_grad():
        for module in [module for module in model.modules() if hasattr(module, "lora_B")]:
            base = module.get_base_layer()
            weight = base.weight if hasattr(base, "weight") else getattr(base, module.parameter_name)
            module.lora_B["default"].weight.normal_()
            module.lora_A["default"].weight.normal_()
            # The elements of a product of random factors of rank 16 have a root mean square of 4.
            module.lora_B["default"].weight.mul_(share * weight.float().square().mean().sqrt() / 4)
    model.save_pretrained(str(folder))
    return folder


def measured(base: Path, adapter: Path, output: Path) -> dict[str, float]:
    """Merge into codes and into a plain output; return the loss of the worst weight, and the seconds of one."""
    from safe_loading import merge_lora_checkpoint

    kept = merge_lora_checkpoint(base, adapter, output, overwrite=True, threads=1).of("merged")
    plain = merge_lora_checkpoint(base, adapter, output, overwrite=True, threads=1, dequantize=True).of("merged")
    worst = max((tensor.rounding for tensor in kept if tensor.rounding), key=lambda loss: loss.error)
    return {
        "error": worst.error,
        "base_error": worst.base_error,
        "update_kept": worst.update_kept,
        "elements": sum(tensor.bytes for tensor in plain) / 2 / len(plain),  # in bfloat16
        "seconds": sum(tensor.seconds for tensor in kept) / len(kept),
        "seconds_plain": sum(tensor.seconds for tensor in plain) / len(plain),
    }


def main() -> None:
    """Merge each adapter into each base, in its own format and into a plain output."""
    arguments = options(__doc__, "a layer of 256 instead of 4096").parse_args()
    rows, facts = [], []
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root)
        for kind, base, plain in save_bases(folder, 256 if arguments.quick else 4096):
            for share in SHARES:
                adapter = save_adapter(folder / f"{kind}-{share}", plain, share, **TARGETS[kind])
                found = measured(base, adapter, folder / "out")
                parts = [f"{found[name]:.2%}" for name in ("error", "base_error", "update_kept")]
                times = [f"{found[name]:.2f}" for name in ("seconds", "seconds_plain")]
                rows.append([kind, f"{share:.1%}", *parts, f"{found['elements'] / 1e6:.1f}", *times])
                facts.append({"kind": kind, "share": share, **found})
    header = ("base", "update", "rounding", "base's own", "update kept", "million elements", "s, codes", "s, plain")
    notes = (
        "update: its norm relative to the weight's; rounding: what it changed, relative to the exact sum",
        "s: seconds for one weight (all its experts), on one thread, read and written",
    )
    print(headline(), table("one weight", header, rows, notes), sep="\n\n")
    write_json(arguments.json, {"rows": facts})


if __name__ == "__main__":
    main()
