"""Chapter one: real ranks load a base and its adapter, each compared bit for bit with the plain two-step load.

Run as a module, this file is one rank: torchrun starts it with the folder of the checkpoints.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from safe_loading import load_peft_on_rank
from safe_loading._core.protocols import JsonObject
from safe_loading._core.report import format_bytes, text_table
from safe_loading._ranks.device_guard import contexts
from safe_loading.errors import SafeLoadingError

from .torchrun import run_ranks

_HEADER = ("rank", "device", "base", "adapter", "dtypes of the adapter", "seconds", "logits", "other devices")


def chapter(folder: Path) -> str:
    """Make the checkpoints, start the ranks, and return a table of the loads: device, base, adapter, time."""
    _make_base(folder / "base")
    _make_adapter(folder / "adapter", folder / "base")
    shards = sorted((folder / "base").glob("*.safetensors"))
    size = sum(shard.stat().st_size for shard in shards)
    devices = torch.accelerator.device_count()
    # Each rank needs a device of its own, except on the CPU.
    ranks = 1 if devices == 1 else 2
    results = run_ranks("safe_loading._demo.load", folder, ranks, "rank")
    wrong = [f"rank {rank}: {facts}" for rank, facts in enumerate(results) if not facts["equal"] or facts["stray"]]
    if wrong:
        raise SafeLoadingError("The load of the demo breaks its promise:", wrong)
    where = "the CPU (no accelerator found)" if devices == 0 else f"{devices} accelerator(s)"
    return "\n".join(
        [
            "load_peft_on_rank: a base and its adapter on exactly one device, on every rank",
            f"  made {len(shards)} shards ({format_bytes(size)}) and an adapter in {folder}",
            f"  {ranks} rank(s) started by torchrun (gloo) on {where}; 'logits' compares with the plain two-step load",
            "",
            text_table(_HEADER, [_row(rank, facts) for rank, facts in enumerate(results)]),
        ]
    )


def _make_base(folder: Path) -> None:
    """Save a bfloat16 Llama of a few megabytes with random weights, in several safetensors shards."""
    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=4000,
        dtype="bfloat16",
    )
    model = LlamaForCausalLM(config)
    torch.nn.Module.to(model, torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="2MB")


def _make_adapter(folder: Path, base: Path) -> None:
    """Save a float32 LoRA adapter over every linear layer of ``base``, with random lora_B weights as if trained."""
    config = LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(LlamaForCausalLM.from_pretrained(base), config)
    for name, parameter in model.named_parameters():
        if ".lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.02)
    model.save_pretrained(str(folder))


def _row(rank: int, facts: JsonObject) -> tuple[str, ...]:
    base, adapter = facts["parts"]
    return (
        str(rank),
        facts["device"],
        format_bytes(base["bytes"]),
        format_bytes(adapter["bytes"]),
        ", ".join(adapter["dtypes"]),
        f"{base['seconds'] + adapter['seconds']:.2f}",
        "equal" if facts["equal"] else "DIFFERENT",
        f"context on {facts['stray']}" if facts["stray"] else "untouched",
    )


def run_one_rank(folder: Path) -> None:
    """Load, compare with the plain two steps, and write the result as JSON."""
    dist.init_process_group("gloo")
    try:
        model = load_peft_on_rank(folder / "adapter")
        device = model.device
        # Read before the plain load, which makes contexts of its own.
        stray = sorted(contexts() - {device.index})
        tokens = torch.arange(1, 65, device=device).reshape(2, 32)
        with torch.no_grad():
            expected = _load_plainly(folder, device)(input_ids=tokens).logits
            equal = torch.equal(model(input_ids=tokens).logits, expected)
        facts = {**json.loads(model.load_report.to_json()), "equal": equal, "stray": stray}
        (folder / f"rank{dist.get_rank()}.json").write_text(json.dumps(facts))
    finally:
        dist.destroy_process_group()


def _load_plainly(folder: Path, device: torch.device) -> torch.nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        base = LlamaForCausalLM.from_pretrained(folder / "base")
        torch.nn.Module.to(base, device)
        plain: torch.nn.Module = PeftModel.from_pretrained(base, folder / "adapter", torch_device=str(device))
    return plain


if __name__ == "__main__":
    run_one_rank(Path(sys.argv[1]))
