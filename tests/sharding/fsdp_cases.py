"""What the tests of FSDP share: small models, one step of training, and the comparison with a single process.

Rank scripts import it: ``tests`` is on their path. Every rank gets the same batch, so that the mean of the ranks'
gradients is the gradient of one process, to the last bit while the number of ranks is a power of two.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from safe_loading import SafeLoadingError

TOKENS = torch.arange(1, 33).reshape(2, 16)


def llama(**options: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {
        "hidden_size": 60,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "vocab_size": 251,
        "attn_implementation": "eager",
    }
    return LlamaForCausalLM, LlamaConfig(**{**sizes, **options})


def gpt2(**options: Any) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_embd": 60, "n_layer": 2, "n_head": 4, "vocab_size": 251, "n_positions": 64}
    quiet = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 2}
    return GPT2LMHeadModel, GPT2Config(**{**sizes, **quiet, "attn_implementation": "eager", **options})


def mixtral(**options: Any) -> Any:
    """Three experts: on four ranks one of them owns nothing of a stack of experts."""
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {
        "hidden_size": 60,
        "intermediate_size": 36,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "vocab_size": 251,
        "num_local_experts": 3,
        "attn_implementation": "eager",
    }
    return MixtralForCausalLM, MixtralConfig(**{**sizes, **options})


def llava(**options: Any) -> Any:
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    vision = CLIPVisionConfig(
        hidden_size=32,
        intermediate_size=36,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=16,
        patch_size=8,
        projection_dim=32,
    )
    _, text = llama(**options)
    config = LlavaConfig(
        vision_config=vision, text_config=LlamaConfig(**text.to_diff_dict()), image_token_index=250, image_seq_length=4
    )
    config._attn_implementation = "eager"
    return LlavaForConditionalGeneration, config


CASES = {"llama": llama, "gpt2": gpt2, "mixtral": mixtral, "llava": llava}


def inputs(name: str) -> dict[str, Any]:
    tokens = TOKENS.clone()
    if name != "llava":
        return {"input_ids": tokens, "labels": tokens}
    tokens[:, 2:6] = 250
    pixels = torch.linspace(-1, 1, 2 * 3 * 16 * 16).reshape(2, 3, 16, 16)
    return {"input_ids": tokens, "labels": TOKENS, "pixel_values": pixels}


def last_of_two_losses(model: Any) -> float:
    """The loss of the second of two steps of AdamW on the tokens of the cases."""
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        loss = model(**inputs("llama")).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    last: float = loss.item()
    return last


def reference(make: Any, dtype: torch.dtype = torch.float32, seed: int = 0) -> Any:
    """The model in one process, with random weights, in train mode without dropout."""
    kind, config = make()
    torch.manual_seed(seed)
    return kind(config).to(dtype).train()


def on_meta(make: Any) -> Any:
    kind, config = make()
    with torch.device("meta"):
        return kind(config).train()


def save(model: Any, folder: str | Path) -> str:
    model.save_pretrained(folder, max_shard_size="60KB")
    return str(folder)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local_bytes(tensor: torch.Tensor) -> int:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).nbytes


def plain(name: str) -> str:
    for part in ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod."):
        name = name.replace(part, "")
    return name


def step(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    """One forward and backward pass; the logits."""
    model.zero_grad()
    output = model(**batch)
    output.loss.backward()
    return output.logits.detach()


def differences(one: Any, model: Any, batch: dict[str, Any]) -> dict[str, Any]:
    """What differs between a model in one process and the sharded one: nothing, when all is right."""
    return compared(one, model, step(one, batch), step(model, batch))


def compared(one: Any, model: Any, logits: torch.Tensor, sharded: torch.Tensor) -> dict[str, Any]:
    """What differs after a step of each."""
    found: dict[str, Any] = {"logits": int((logits != sharded).sum())}
    if type(model).__name__ == "FullyShardedDataParallel":
        from torch.distributed.fsdp import FullyShardedDataParallel

        # torch hangs over the gradients of a unit of which one rank holds frozen elements only; a step tells as much
        grads = all(parameter.requires_grad for parameter in one.parameters())
        with FullyShardedDataParallel.summon_full_params(model, with_grads=grads, writeback=False):
            return {**found, **_tensors(one, model, grads)}
    return {**found, **_tensors(one, model, True)}


def _tensors(one: Any, model: Any, grads: bool) -> dict[str, Any]:
    parameters = {plain(name): parameter for name, parameter in model.named_parameters()}
    buffers = {plain(name): buffer for name, buffer in model.named_buffers()}
    found: dict[str, Any] = {
        "names": sorted({name for name, _ in one.named_parameters()} ^ parameters.keys())
        + sorted({name for name, _ in one.named_buffers()} ^ buffers.keys()),
        "parameters": [],
        "gradients": [],
        "buffers": [],
    }
    for name, parameter in one.named_parameters():
        other = parameters[name]
        if not torch.equal(parameter, whole(other)) or parameter.dtype != other.dtype:
            found["parameters"].append(name)
        if not grads:
            continue
        grad, sharded = parameter.grad, other.grad
        sharded = None if sharded is None else whole(sharded)
        if grad is None or sharded is None:
            # a rank that owns nothing of a frozen or unused parameter has no gradient either
            if (grad is None) != (sharded is None) and bool((grad if grad is not None else sharded).any()):
                found["gradients"].append(name)
        elif not torch.equal(grad, sharded):
            found["gradients"].append(name)
    for name, buffer in one.named_buffers():
        if not torch.equal(buffer, buffers[name]) or buffer.dtype != buffers[name].dtype:
            found["buffers"].append(name)
    return found


NOTHING = {"logits": 0, "names": [], "parameters": [], "gradients": [], "buffers": []}


def error_of(call: Callable[[], object]) -> str | None:
    """The kind and text of the package's error that a call raises; None when it raises none."""
    try:
        call()
    except SafeLoadingError as error:
        return f"{type(error).__name__}: {error}"
    return None
