"""A checkpoint of any size that takes no disk: real headers, and holes where the data would be.

    python sparse_checkpoint.py CONFIG_FOLDER OUTPUT_FOLDER [DTYPE]

CONFIG_FOLDER holds a ``config.json``. All weights read as zeros.
"""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

NAMES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}
SHARD_BYTES = 5 * 10**9


def sparse_checkpoint(
    config: PretrainedConfig,
    folder: Path,
    dtype: torch.dtype = torch.bfloat16,
    shard_bytes: int = SHARD_BYTES,
    kind: type[PreTrainedModel] | None = None,
) -> Path:
    """Write the checkpoint of a model, by default a causal language model, with names and shapes and no values."""
    folder.mkdir(parents=True, exist_ok=True)
    make: Any = AutoModelForCausalLM.from_config if kind is None else kind._from_config
    with torch.device("meta"):
        model = make(config, dtype=dtype)
    config.architectures, config.dtype = [type(model).__name__], dtype
    config.save_pretrained(folder)
    tied = getattr(model, "all_tied_weights_keys", {}) if config.tie_word_embeddings else {}
    state = {name: tensor for name, tensor in model.state_dict().items() if name not in tied}
    shards: list[dict[str, torch.Tensor]] = [{}]
    for name, tensor in state.items():
        if shards[-1] and sum(t.nbytes for t in shards[-1].values()) + tensor.nbytes > shard_bytes:
            shards.append({})
        shards[-1][name] = tensor
    weight_map = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        _write(folder / file, shard)
        weight_map.update(dict.fromkeys(shard, file))
    index = {"metadata": {"total_size": sum(t.nbytes for t in state.values())}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def _write(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        offsets = [end, end + tensor.nbytes]
        header[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
        end += tensor.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)


if __name__ == "__main__":
    source, target, *rest = sys.argv[1:]
    wanted = getattr(torch, rest[0]) if rest else torch.bfloat16
    print(sparse_checkpoint(AutoConfig.from_pretrained(source), Path(target), wanted))  # noqa: T201 - a command line
