"""Seeded samples of two attacks: wrong merges as real tools make them, and right ones by roads that no test took."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch
from models import save_adapter, save_llama
from peft import PeftModel
from safetensors.torch import load_file, save_file
from test_verify_merge import Tensors, codes, rewritten, tensors_of
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    MixtralConfig,
    MixtralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
)

from safe_loading import merge_lora_checkpoint, merge_lora_inplace, verify_merge

SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "vocab_size": 128}
EMBED = "model.embed_tokens.weight"
SIZE = 0.1  # of lora_B as the tests' adapters have it, so that an update is about as large as its weight


def smaller(adapter: Path, magnitude: float = 1.0) -> Path:
    """An adapter as a training leaves one, in the place of one that is many times larger than the weights."""
    file = adapter / "adapter_model.safetensors"
    factors = {"lora_B": SIZE, "lora_embedding_B": SIZE, "lora_magnitude_vector": magnitude}
    tensors = {
        name: tensor * next((factor for part, factor in factors.items() if part in name), 1.0)
        for name, tensor in load_file(file).items()
    }
    save_file(tensors, file, metadata={"format": "pt"})
    return adapter


class Setting:
    """A base, an adapter, and their right merge."""

    def __init__(self, folder: Path, kind: str, **lora: Any) -> None:
        self.folder, self.base = folder, folder / "base"
        torch.manual_seed(0)
        if kind == "llama":
            save_llama(self.base, torch.bfloat16, **SIZES)
        elif kind == "gpt2":
            of_gpt2 = GPT2Config(vocab_size=128, n_embd=64, n_layer=2, n_head=4, n_positions=64)
            GPT2LMHeadModel(of_gpt2).to(torch.float16).save_pretrained(self.base)
        else:
            heads: Any = {**SIZES, "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0}
            model: Any = (
                Phi3ForCausalLM(Phi3Config(**heads, bos_token_id=1, eos_token_id=2))
                if kind == "phi3"
                else MixtralForCausalLM(MixtralConfig(**heads, num_local_experts=4))
            )
            model.to(torch.bfloat16).save_pretrained(self.base)
        self.adapter = smaller(save_adapter(folder / "adapter", self.base, **{"r": 8, "lora_alpha": 16, **lora}))
        merge_lora_checkpoint(self.base, self.adapter, folder / "right")
        self.right, self.before = tensors_of(folder / "right"), tensors_of(self.base)

    @property
    def dtype(self) -> torch.dtype:
        """That of the base."""
        return next(iter(self.before.values())).dtype

    @cached_property
    def updates(self) -> Tensors:
        """What is added, in float64."""
        merge_lora_checkpoint(self.base, self.adapter, self.folder / "exact", dtype=torch.float64)
        exact = tensors_of(self.folder / "exact")
        found = {name: exact[name] - tensor.double() for name, tensor in self.before.items()}
        return {name: update for name, update in found.items() if update.any()}

    def having(self, part: str) -> list[str]:
        """The names of the changed tensors of a kind."""
        return [name for name in self.updates if part in name]

    def with_updates(self, change: Callable[[str, torch.Tensor], torch.Tensor], part: str = "") -> Tensors:
        """The tensors with other updates."""
        return {
            name: (self.before[name].double() + change(name, self.updates[name])).to(self.before[name].dtype)
            for name in self.having(part)
        }


def number(name: str) -> int:
    return int(name.split("layers.")[1].split(".")[0])


def of_layer(name: str, layer: int) -> str:
    return name.replace(f"layers.{number(name)}.", f"layers.{layer}.")


def rope(matrix: torch.Tensor, heads: int) -> torch.Tensor:
    """The order of rows in which Meta and llama.cpp keep q and k."""
    return matrix.view(heads, 2, -1, matrix.shape[1]).transpose(1, 2).reshape(matrix.shape)


def noisy(weight: torch.Tensor, size: float, row: int = 3) -> torch.Tensor:
    found, noise = weight.clone(), torch.randn(weight.shape[1], generator=torch.Generator().manual_seed(1))
    found[row] = (found[row].float() * (1 + size * noise)).to(weight.dtype)
    return found


def halves(matrix: torch.Tensor) -> torch.Tensor:
    """Two fused weights in the other order."""
    return torch.cat([*reversed(matrix.chunk(2))])


ALL, DORA = {"target_modules": "all-linear"}, {"target_modules": "all-linear", "use_dora": True}
PATTERN = {**ALL, "alpha_pattern": {"q_proj": 64}}
Wrong = Callable[[Setting], Tensors]
WRONG: dict[str, tuple[str, dict[str, Any], set[str], Wrong]] = {
    "updates shifted by one layer": (
        "llama",
        ALL,
        {"values-differ"},
        lambda of: of.with_updates(lambda n, u: of.updates[of_layer(n, (number(n) + 1) % 3)]),
    ),
    "weights shifted by one layer": (
        "llama",
        ALL,
        {"values-swapped"},
        lambda of: {n: of.right[of_layer(n, (number(n) + 1) % 3)] for n in of.updates},
    ),
    "the updates of q and o swapped": (
        "llama",
        ALL,
        {"values-differ"},
        lambda of: of.with_updates(lambda n, u: of.updates[n.replace("q_proj", "o_proj")], "q_proj"),
    ),
    "only the MLP merged": (
        "llama",
        ALL,
        {"update-absent"},
        lambda of: {n: of.before[n] for n in of.having("self_attn")},
    ),
    "only the first shard merged": (
        "llama",
        ALL,
        {"update-absent"},
        lambda of: {n: of.before[n] for n in of.updates if number(n)},
    ),
    "twice with half the weight, and once more": (
        "llama",
        ALL,
        {"update-scaled"},
        lambda of: of.with_updates(lambda n, u: 1.5 * u),
    ),
    "q and k in the order of llama.cpp": (
        "llama",
        ALL,
        {"values-differ"},
        lambda of: {n: rope(of.right[n], 4 if "q_proj" in n else 2) for n in (*of.having("q_proj"), *of.having("k_p"))},
    ),
    "the updates of q in the order of llama.cpp": (
        "llama",
        ALL,
        {"values-differ"},
        lambda of: of.with_updates(lambda n, u: rope(u, 4), "q_proj"),
    ),
    "an alpha pattern ignored": (
        "llama",
        PATTERN,
        {"update-scaled"},
        lambda of: of.with_updates(lambda n, u: u / 4, "q_proj"),
    ),
    "rsLoRA twice": (
        "llama",
        {**ALL, "use_rslora": True},
        {"update-scaled"},
        lambda of: of.with_updates(lambda n, u: u * 8**0.5),
    ),
    "the router permuted": (
        "mixtral",
        {"target_modules": ["gate", "q_proj"]},
        {"values-swapped"},
        lambda of: {n: of.right[n][[1, 0, 3, 2]] for n in of.having(".gate.")},
    ),
    "gate and up fused in the other order": (
        "phi3",
        ALL,
        {"values-swapped"},
        lambda of: {n: halves(of.right[n]) for n in of.having("gate_up")},
    ),
    "the updates of gate and up in the other order": (
        "phi3",
        ALL,
        {"values-differ"},
        lambda of: of.with_updates(lambda n, u: halves(u), "gate_up"),
    ),
    "LoRA of the embeddings reshaped in place of transposed": (
        "llama",
        {"target_modules": ["embed_tokens"]},
        {"values-differ"},
        lambda of: of.with_updates(lambda n, u: u.T.reshape(u.shape)),
    ),
    "embeddings averaged": (
        "llama",
        ALL,
        {"values-differ"},
        lambda of: {EMBED: (of.right[EMBED] + of.right[EMBED].mean(0)) / 2},
    ),
    "half of the rows": (
        "llama",
        ALL,
        {"update-absent", "values-differ"},
        lambda of: {n: torch.cat([of.right[n][:32], of.before[n][32:]]) for n in of.having("q_proj")},
    ),
    "stochastic rounding": (
        "llama",
        ALL,
        {"values-differ"},
        lambda of: {
            n: ((of.before[n].double() + u).float().view(torch.int32) + torch.randint(1 << 16, u.shape).int())
            .bitwise_and(-1 << 16)
            .view(torch.float32)
            .bfloat16()
            for n, u in of.updates.items()
        },
    ),
    "5 % noise in a row of a DoRA": (
        "llama",
        DORA,
        {"values-differ"},
        lambda of: {n: noisy(of.right[n], 0.05) for n in of.having("layers.1.self_attn.o_proj")},
    ),
    "a row of a DoRA 5 % longer": (
        "llama",
        DORA,
        {"values-differ"},
        lambda of: {
            n: of.right[n].index_fill(0, torch.tensor([3]), 0)
            + torch.nn.functional.pad(of.right[n][3:4] * 1.05, (0, 0, 3, len(of.right[n]) - 4))
            for n in of.having("layers.1.self_attn.o_proj")
        },
    ),
    "the magnitudes of a DoRA shifted by a row": (
        "llama",
        DORA,
        {"values-differ"},
        lambda of: {
            n: (w.float() * (w.float().norm(dim=1).roll(1) / w.float().norm(dim=1))[:, None]).bfloat16()
            for n, w in of.right.items()
            if n in of.updates
        },
    ),
}


@pytest.mark.parametrize("mistake", WRONG)
def test_a_mistake_of_a_tool_is_found(tmp_path: Path, mistake: str) -> None:
    kind, lora, expected, make = WRONG[mistake]
    of = Setting(tmp_path, kind, **lora)
    assert verify_merge(of.base, of.adapter, tmp_path / "right").ok
    changed = make(of)
    assert changed
    check = verify_merge(of.base, of.adapter, rewritten(tmp_path / "right", tmp_path / "w", {**of.right, **changed}))
    assert not check.ok
    assert codes(check) <= expected, str(check)
    assert codes(check), str(check)


def _resaved(of: Setting, target: Path, **options: Any) -> None:
    AutoModelForCausalLM.from_pretrained(of.folder / "right", **options).save_pretrained(target, max_shard_size="15KB")


def _by_peft(of: Setting, dtype: torch.dtype) -> Any:
    model: Any = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(of.base, dtype=dtype), of.adapter)
    return model.to(dtype).merge_and_unload()


RIGHT: dict[str, Callable[[Setting, Path], object]] = {
    "peft in 16 bits": lambda of, to: _by_peft(of, of.dtype).save_pretrained(to),
    "a float64 sum, cast": lambda of, to: _by_peft(of, torch.float64).to(of.dtype).save_pretrained(to),
    "a float32 sum, kept": lambda of, to: _by_peft(of, torch.float32).save_pretrained(to),
    "in place": lambda of, to: merge_lora_inplace(
        PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(of.base, dtype="auto"), of.adapter)
    ).save_pretrained(to),
    "saved again in shards": lambda of, to: _resaved(of, to, dtype="auto"),
    "saved again in float32": lambda of, to: _resaved(of, to, dtype=torch.float32),
}


@pytest.mark.each_value
@pytest.mark.parametrize("kind", ["llama", "gpt2"])  # which has its magnitudes along columns
@pytest.mark.parametrize("magnitude", [None, 64.0, 1.0, 0.1])
def test_right_merges_by_other_roads_raise_no_alarm(tmp_path: Path, kind: str, magnitude: float | None) -> None:
    of = Setting(tmp_path, kind, **(ALL if magnitude is None else DORA))
    if magnitude is not None:
        shutil.rmtree(tmp_path / "right")
        merge_lora_checkpoint(of.base, smaller(of.adapter, magnitude), tmp_path / "right")
    for name, road in RIGHT.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            road(of, tmp_path / "merged")
        check = verify_merge(of.base, of.adapter, tmp_path / "merged")
        assert check.ok, (name, str(check))
        assert not codes(check), (name, str(check))
        shutil.rmtree(tmp_path / "merged")
