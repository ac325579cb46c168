"""Tiny checkpoints of real architectures, saved by the engines themselves, for tests to share."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    import pytest

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 101,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# For forecasts: the tensors of the one above are mostly smaller than a block of the allocator.
WIDE: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "vocab_size": 4000,
}

# Sizes that every method of quantization takes: whole blocks of 128 and groups of 256.
QUANTIZABLE: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 640,
}
COSTLY = r"(.*.*)*(.*.*)*x"  # a pattern that never ends on the name of a module

# The kinds of LoRA, as the fields of their configs.
KINDS: dict[str, dict[str, Any]] = {
    "all linear": {"target_modules": "all-linear"},
    "rank and alpha patterns": {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"v_proj": 3}},
    "rslora": {"use_rslora": True},
    "dora": {"use_dora": True},
    "embedding": {"target_modules": ["embed_tokens", "q_proj"]},
    "head": {"target_modules": ["lm_head", "q_proj"]},
    "modules to save": {"modules_to_save": ["lm_head"]},
    "embedding and head saved": {"modules_to_save": ["embed_tokens", "lm_head"]},
    "trained bias": {"bias": "lora_only"},
    "trainable tokens": {"trainable_token_indices": [1, 5, 7]},
    "fused parameters": {"target_modules": [], "target_parameters": ["q_proj.weight"]},
    "excluded": {"target_modules": "all-linear", "exclude_modules": ["k_proj"]},
    "some layers": {"layers_to_transform": [0, 2]},
    "orthogonal start": {"init_lora_weights": "orthogonal"},
    "pissa start": {"init_lora_weights": "pissa"},
    "olora start": {"init_lora_weights": "olora"},
}


def save_llama(
    folder: str | os.PathLike[str], dtype: torch.dtype = torch.float32, *, seed: int = 0, **config: Any
) -> Path:
    """Save a LlamaForCausalLM with random weights in `folder`, in several safetensors shards, and return the folder."""
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: Any = LlamaForCausalLM(LlamaConfig(**{**SIZES, **config}))
    model.to(dtype).save_pretrained(folder, max_shard_size="24KB")
    return Path(folder)


def tokenizer() -> Any:
    """A tokenizer of the vocabulary of `save_llama`, whose words are ``w4`` to ``w100``."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3, **{f"w{number}": number for number in range(4, 101)}}
    inner = Tokenizer(WordLevel(words, unk_token="<unk>"))
    inner.pre_tokenizer = Whitespace()
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=inner, **special)


def save_tokenizer(folder: str | os.PathLike[str]) -> None:
    """Save `tokenizer` beside a model."""
    tokenizer().save_pretrained(os.fspath(folder))


def save_adapter(
    folder: str | os.PathLike[str],
    base: str | os.PathLike[str],
    *,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    auto_class: type | None = None,
    **lora_config: Any,
) -> Path:
    """Save a LoRA adapter of the checkpoint in `base` in `folder`, and return the folder.

    Every tensor of it is random (lora_B too, which peft starts at zero) and has exactly `dtype` in the file, whatever
    the dtype of the base is. `lora_config` goes to ``peft.LoraConfig``.
    """
    from peft import LoraConfig, get_peft_model
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForCausalLM

    config = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "down_proj"], "task_type": "CAUSAL_LM"}
    loader: Any = auto_class or AutoModelForCausalLM
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = get_peft_model(loader.from_pretrained(base, dtype="auto"), LoraConfig(**{**config, **lora_config}))
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.float()
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    model.save_pretrained(os.fspath(folder))
    # Not through model.to(dtype): peft also saves what it did not train (embeddings, say), in the base's dtype.
    file = Path(folder) / "adapter_model.safetensors"
    tensors = {
        name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in load_file(file).items()
    }
    save_file(tensors, file, metadata={"format": "pt"})
    return Path(folder)


class Made:
    """What `save_llama` and `save_adapter` save, made once for the same arguments; the fixture ``made`` in a test.

    Do not write to a folder that this returns: copy it first, or let ``faults.adapters.edited`` do so.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._folders: dict[str, Path] = {}

    def llama(self, dtype: torch.dtype = torch.float32, **config: Any) -> Path:
        """The folder of `save_llama`."""
        return self._once(f"llama {dtype} {config}", lambda folder: save_llama(folder, dtype, **config))

    def adapter(self, base: Path, **options: Any) -> Path:
        """The folder of `save_adapter`."""
        return self._once(f"adapter {base} {options}", lambda folder: save_adapter(folder, base, **options))

    def _once(self, key: str, save: Callable[[Path], Path]) -> Path:
        if key not in self._folders:
            self._folders[key] = save(self._root / str(len(self._folders)))
        return self._folders[key]


def cached(saved: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, name: str = "tiny") -> str:
    """Lay a folder into a cache as huggingface_hub does, links to blobs included, and return its id."""
    from huggingface_hub import constants

    root = cache / f"models--org--{name}"
    snapshot, blobs = root / "snapshots" / ("a" * 40), root / "blobs"
    for folder in (snapshot, blobs, root / "refs"):
        folder.mkdir(parents=True)
    (root / "refs" / "main").write_text(snapshot.name)
    for path in saved.iterdir():
        path.rename(blobs / path.name)
        (snapshot / path.name).symlink_to(Path("..", "..", "blobs", path.name))
        path.write_bytes((blobs / path.name).read_bytes())
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return f"org/{name}"
