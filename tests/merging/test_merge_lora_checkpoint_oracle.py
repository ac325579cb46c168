"""The oracle: the logits of the reloaded output are those of base and adapter, for every kind on every layout."""

from __future__ import annotations

import itertools
import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import KINDS, save_adapter, save_llama
from peft import EvaConfig
from test_merge_lora_checkpoint import TOKENS, llava, loaded, mixture, on_disk, reference
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForImageTextToText

from safe_loading import load_peft_on_rank, merge_lora_checkpoint
from safe_loading._checkpoint.index import read_checkpoint

ALL_KINDS: dict[str, dict[str, Any]] = {
    **KINDS,
    "dora, all linear": {"target_modules": "all-linear", "use_dora": True},
    "dora embedding": {"target_modules": ["embed_tokens", "q_proj"], "use_dora": True},
    "eva start": {"init_lora_weights": "eva", "eva_config": EvaConfig()},
    "rslora with patterns": {"use_rslora": True, "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"v_proj": 3}},
}
ODD = {"hidden_size": 60, "intermediate_size": 97, "vocab_size": 103, "num_attention_heads": 5, "head_dim": 6}
EXPERTS = "experts on disk one by one"
LAYOUTS: dict[str, Callable[[Path], Path]] = {
    "plain": lambda folder: save_llama(folder),
    "tied": lambda folder: save_llama(folder, tie_word_embeddings=True),
    "odd shapes": lambda folder: save_llama(folder, **ODD, num_key_value_heads=1, attention_bias=True),
    EXPERTS: lambda folder: mixture(folder, "Qwen3Moe"),
    "Mixtral": lambda folder: mixture(folder, "Mixtral"),
    "vision and language": lambda folder: llava(folder, "published"),
}
# peft itself refuses DoRA and starts on fused experts, which its names "down_proj" and "all-linear" stand for there.
NOT_OF_PEFT = {
    *itertools.product((EXPERTS,), ("dora", "orthogonal start", "pissa start", "olora start", "dora, all linear")),
    ("Mixtral", "dora, all linear"),
}
CASES = [case for case in itertools.product(LAYOUTS, ALL_KINDS) if case not in NOT_OF_PEFT]


def check(root: Path, layout: str, kind: str) -> None:
    base = LAYOUTS[layout](root / "base")
    auto: Any = AutoModelForImageTextToText if layout == "vision and language" else AutoModelForCausalLM
    options = {} if auto is AutoModelForCausalLM else {"auto_class": auto}
    config = dict(ALL_KINDS[kind])
    if kind == "modules to save" and layout == "vision and language":
        config = {"modules_to_save": ["linear_1"]}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapter = save_adapter(root / "adapter", base, **options, **config)
        merge_lora_checkpoint(base, adapter, root / "out")
        with torch.no_grad():
            ours = loaded(root / "out", auto)(input_ids=TOKENS).logits
            theirs = load_peft_on_rank(base, adapter, **options)(input_ids=TOKENS).logits
            before = auto.from_pretrained(base)(input_ids=TOKENS).logits
    assert torch.allclose(ours, theirs, atol=2e-4, rtol=1e-4), (ours - theirs).abs().max()
    assert not torch.allclose(ours, before, atol=1e-3)
    expected = on_disk(reference(base, adapter, root / "reference", **options))
    found = on_disk(root / "out")
    both = found.keys() & expected.keys()
    assert len(both) > 10
    assert all(torch.equal(found[name], expected[name]) for name in both)


@pytest.mark.parametrize(
    ("layout", "kind"), [("tied", "embedding and head saved"), *random.Random(5).sample(CASES, 11)]
)
def test_logits_are_those_of_base_and_adapter(tmp_path: Path, layout: str, kind: str) -> None:
    check(tmp_path, layout, kind)


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "kind"), CASES)
def test_logits_of_every_kind_on_every_layout(tmp_path: Path, layout: str, kind: str) -> None:
    check(tmp_path, layout, kind)


# ----------------------------------------------------------------------------- attention modules and convolutions


def vision(folder: Path, kind: str) -> Path:
    from transformers import SiglipVisionConfig, SiglipVisionModel, WhisperConfig, WhisperModel

    torch.manual_seed(0)
    if kind == "siglip":
        sizes = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 2}
        SiglipVisionModel(SiglipVisionConfig(**sizes, image_size=16, patch_size=8)).save_pretrained(folder)
    else:
        sizes = {"d_model": 24, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
        heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "max_source_positions": 20}
        tokens = {"vocab_size": 60, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
        config = WhisperConfig(**sizes, **heads, **tokens, num_mel_bins=8, decoder_start_token_id=1)
        WhisperModel(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        ("siglip", {"target_modules": ["attention"]}),  # a torch.nn.MultiheadAttention
        ("siglip", {"target_modules": ["patch_embedding", "fc1"]}),  # a Conv2d
        ("siglip", {"target_modules": ["patch_embedding"], "use_dora": True}),
        ("whisper", {"target_modules": ["conv1", "conv2", "q_proj"]}),  # two Conv1d
        ("whisper", {"target_modules": ["conv1", "fc1"], "use_dora": True}),
    ],
)
def test_attention_modules_and_convolutions(tmp_path: Path, kind: str, config: dict[str, Any]) -> None:
    base = vision(tmp_path / "base", kind)
    adapter = save_adapter(tmp_path / "adapter", base, auto_class=AutoModel, task_type=None, **config)
    report = merge_lora_checkpoint(base, adapter, tmp_path / "out")
    assert report.of("merged")
    ours = loaded(tmp_path / "out", AutoModel).state_dict()
    theirs = loaded(reference(base, adapter, tmp_path / "reference", auto_class=AutoModel), AutoModel).state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
    assert set(on_disk(tmp_path / "out")) == set(read_checkpoint(base).tensors)
