"""The dtype of weights is what the load will have, and one that nothing names is said to be assumed."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from models import QUANTIZABLE, SIZES, cached, save_llama
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from safe_loading import CheckpointError, Workload, meta_model, plan_device_map, predict_memory, smallest_limits
from safe_loading._checkpoint.model_folder import ModelFolder
from safe_loading._model.weights_dtype import dtype_on_disk, find_weights_dtype

# What decides in the published config.json of each model: Qwen3-VL names the dtype in text_config alone, and gpt-oss
# none at all.
QWEN3_VL: dict[str, Any] = {
    "architectures": ["Qwen3VLForConditionalGeneration"],
    "model_type": "qwen3_vl",
    "text_config": {
        **SIZES,
        "dtype": "bfloat16",
        "head_dim": 8,
        "model_type": "qwen3_vl_text",
        "rope_scaling": {"mrope_interleaved": True, "mrope_section": [2, 1, 1], "rope_type": "default"},
    },
    "tie_word_embeddings": False,
    "vision_config": {
        "depth": 1,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "out_hidden_size": 32,
        "deepstack_visual_indexes": [0],
        "model_type": "qwen3_vl",
    },
}
GPT_OSS: dict[str, Any] = {
    **QUANTIZABLE,
    "architectures": ["GptOssForCausalLM"],
    "head_dim": 64,
    "model_type": "gpt_oss",
    "num_experts_per_tok": 2,
    "num_local_experts": 4,
    "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]},
}
LLAMA: dict[str, Any] = {**SIZES, "architectures": ["LlamaForCausalLM"], "model_type": "llama"}
CARD: dict[Any, Any] = {0: "1GB"}
STEP = Workload.generate(1, 8)


def folder_of(tmp_path: Path, config: dict[str, Any]) -> Path:
    folder = tmp_path / "published"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def without_dtype(folder: Path) -> Path:
    """Take the dtype out of a saved config."""
    config = json.loads((folder / "config.json").read_text())
    del config["dtype"]
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def sizes(source: Any, **options: Any) -> list[int]:
    """Return the bytes of the weights as a plan, a search and a model on meta count them."""
    plan = plan_device_map(source, CARD, verify=False, **options)
    limits = smallest_limits(source, [0], verify=False, **options)
    on_meta = meta_model(source, **options)
    return [plan.devices[0].used, int(limits[0]), sum(parameter.nbytes for parameter in on_meta.parameters())]


def codes(source: Any, **options: Any) -> set[str]:
    return {finding.code for finding in plan_device_map(source, CARD, verify=False, **options).findings}


def test_a_dtype_in_the_text_config_alone_is_that_of_the_weights(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, QWEN3_VL)
    halved, whole = meta_model(folder, dtype="bfloat16"), meta_model(folder, dtype="float32")
    assert sum(p.nbytes for p in halved.parameters()) * 2 == sum(p.nbytes for p in whole.parameters())
    assert sizes(folder) == sizes(folder, dtype="bfloat16")
    assert sizes(folder) == sizes(folder, dtype="auto")
    assert "dtype-assumed" not in codes(folder)
    asked, found = (predict_memory(folder, STEP, **kind) for kind in ({"dtype": "bfloat16"}, {}))
    assert found.allocated_peak_bytes == asked.allocated_peak_bytes
    assert not any("assumed" in note for note in found.notes)


def test_parts_that_differ_decide_nothing(tmp_path: Path) -> None:
    vision = {**QWEN3_VL["vision_config"], "dtype": "float16"}
    folder = folder_of(tmp_path, {**QWEN3_VL, "vision_config": vision})
    assert "dtype-assumed" in codes(folder)
    assert sizes(folder) == sizes(folder, dtype="float32")


def test_a_quantization_that_computes_in_16_bits_says_what_the_rest_is_in(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, GPT_OSS)
    found, asked = (plan_device_map(folder, CARD, verify=False, dtype=dtype) for dtype in (None, "bfloat16"))
    assert found.devices[0].used == asked.devices[0].used
    assert "dtype-assumed" not in codes(folder)
    forecasts = [predict_memory(folder, STEP, capability=(9, 0), dtype=dtype) for dtype in (None, "bfloat16")]
    assert forecasts[0].allocated_peak_bytes == forecasts[1].allocated_peak_bytes


@pytest.mark.parametrize("kind", ["folder", "hub id", "config of the folder"])
def test_weights_that_are_here_say_their_dtype(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = without_dtype(save_llama(tmp_path / "saved", torch.bfloat16))
    source: Any = saved
    if kind == "hub id":
        source = cached(saved, tmp_path / "cache", monkeypatch)
    elif kind == "config of the folder":
        source = AutoConfig.from_pretrained(saved)
    loaded = AutoModelForCausalLM.from_pretrained(saved)
    assert loaded.dtype == torch.bfloat16
    parameters, buffers = (sum(t.nbytes for t in tensors()) for tensors in (loaded.parameters, loaded.buffers))
    assert sizes(source) == [parameters + buffers, parameters + buffers, parameters]
    assert "dtype-assumed" not in codes(source)
    asked, found = (predict_memory(source, STEP, **kind) for kind in ({"dtype": "bfloat16"}, {}))
    assert found.allocated_peak_bytes == asked.allocated_peak_bytes


def test_the_config_goes_before_the_headers_as_in_the_load(tmp_path: Path) -> None:
    folder = save_llama(tmp_path / "saved", torch.bfloat16)
    config = json.loads((folder / "config.json").read_text()) | {"dtype": "float16"}
    (folder / "config.json").write_text(json.dumps(config))
    assert AutoModelForCausalLM.from_pretrained(folder).dtype == torch.float16
    assert meta_model(folder).dtype == torch.float16


def test_codes_in_8_bits_are_no_dtype_of_a_model(tmp_path: Path) -> None:
    tensors = {"a": torch.zeros(4, dtype=torch.float8_e4m3fn), "b": torch.zeros(4, dtype=torch.bfloat16)}
    save_file(tensors, tmp_path / "model.safetensors")
    assert dtype_on_disk(ModelFolder(tmp_path)) == torch.bfloat16


def in_one_file(tmp_path: Path) -> Path:
    model = AutoModelForCausalLM.from_pretrained(save_llama(tmp_path / "saved", torch.bfloat16))
    model.save_pretrained(tmp_path / "whole")
    return without_dtype(tmp_path / "whole")


def test_a_file_says_its_dtype_by_the_first_name_in_the_alphabet(tmp_path: Path) -> None:
    """A header lists what has the wider dtype first."""
    folder = in_one_file(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    mixed = {name: tensor.float() if "norm" in name else tensor for name, tensor in tensors.items()}
    save_file(mixed, folder / "model.safetensors", metadata={"format": "pt"})
    assert AutoModelForCausalLM.from_pretrained(folder).dtype == torch.bfloat16
    assert meta_model(folder).dtype == torch.bfloat16


def test_an_index_says_its_dtype_before_its_files(tmp_path: Path) -> None:
    saved = AutoModelForCausalLM.from_pretrained(save_llama(tmp_path / "saved", torch.bfloat16))
    saved.save_pretrained(tmp_path / "split", max_shard_size="20KB")
    folder = without_dtype(tmp_path / "split")
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["metadata"]["dtype"] = "float16"
    index.write_text(json.dumps(content))
    assert AutoModelForCausalLM.from_pretrained(folder).dtype == torch.float16
    assert meta_model(folder).dtype == torch.float16


def test_a_variant_says_its_own_dtype(tmp_path: Path) -> None:
    folder = in_one_file(tmp_path)
    halves = {name: tensor.half() for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(halves, folder / "model.fp16.safetensors", metadata={"format": "pt"})
    assert AutoModelForCausalLM.from_pretrained(folder, variant="fp16").dtype == torch.float16
    assert dtype_on_disk(ModelFolder(folder), "fp16") == torch.float16
    assert dtype_on_disk(ModelFolder(folder)) == torch.bfloat16


def test_a_dtype_that_nothing_names_is_said_to_be_assumed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = folder_of(tmp_path, LLAMA)
    (found,) = (f for f in plan_device_map(folder, CARD, verify=False).findings if f.code == "dtype-assumed")
    assert "float32 is assumed" in found.message
    assert found.severity == "warning"
    assert any("float32 is assumed" in note for note in predict_memory(folder, STEP).notes)
    assert "dtype-assumed" in codes(AutoConfig.from_pretrained(folder))
    with caplog.at_level(logging.WARNING, logger="safe_loading"):
        assert meta_model(folder).dtype == torch.float32
    assert "float32 is assumed" in caplog.text


def test_the_advice_of_an_assumed_dtype_taken(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = folder_of(tmp_path, LLAMA)
    (found,) = (f for f in plan_device_map(folder, CARD, verify=False).findings if f.code == "dtype-assumed")
    assert found.fix == 'pass dtype=, such as "bfloat16", or pass the folder with its weights.'
    assert "dtype-assumed" not in codes(folder, dtype="bfloat16")
    assert "dtype-assumed" not in codes(without_dtype(save_llama(tmp_path / "saved", torch.bfloat16)))
    with caplog.at_level(logging.WARNING, logger="safe_loading"):
        assert meta_model(folder, dtype="bfloat16").dtype == torch.bfloat16
    assert "assumed" not in caplog.text


def test_a_config_made_by_hand_has_the_dtype_that_from_config_gives_it() -> None:
    config = LlamaConfig(**SIZES)
    assert find_weights_dtype(None, config) == (torch.float32, None, None)
    assert AutoModelForCausalLM.from_config(config).dtype == torch.float32


@pytest.mark.parametrize("kind", ["folder", "hub id", "config"])
def test_a_quantized_name_without_a_quantization_is_told(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Publishers leave the quantization to a file beside the config, which may not have come along."""
    folder = folder_of(tmp_path, {**LLAMA, "dtype": "bfloat16"}).rename(tmp_path / "Llama-3.1-70B-Instruct-FP8")
    source: Any = folder
    if kind == "hub id":
        source = cached(folder, tmp_path / "cache", monkeypatch, "Llama-3.1-70B-NVFP4")
    elif kind == "config":
        source = AutoConfig.from_pretrained(folder)
    (found,) = plan_device_map(source, CARD, verify=False).findings
    assert (found.code, found.severity) == ("quantization-assumed", "warning")
    word = "NVFP4" if kind == "hub id" else "FP8"
    assert f"says {word}, but neither the config nor a file beside it" in found.message
    assert any("plain weights are counted" in note for note in predict_memory(source, STEP).notes)
    with_weights = save_llama(tmp_path / "saved", torch.bfloat16).rename(tmp_path / "Llama-AWQ-w4a16")
    assert codes(with_weights) == set()
    assert codes(folder.rename(tmp_path / "Llama-3.1-8B-Int44")) == set()


@pytest.mark.parametrize("kind", ["an index alone", "a clone without git lfs pull"])
def test_a_folder_whose_weights_are_still_to_come_is_planned_by_its_config(kind: str, tmp_path: Path) -> None:
    saved = save_llama(tmp_path / "saved", torch.bfloat16)
    whole = plan_device_map(saved, CARD, verify=False)
    shards = sorted(saved.glob("*.safetensors"))
    assert len(shards) > 1
    held = load_file(shards[0])
    for shard in shards:
        shard.unlink()
        if kind != "an index alone":
            shard.write_text(f"version https://git-lfs.github.com/spec/v1\noid sha256:{'a' * 64}\nsize 9\n")
    assert plan_device_map(saved, CARD, verify=False).devices == whole.devices
    named = saved.rename(tmp_path / "Llama-3.1-8B-FP8")
    assert codes(named) == {"quantization-assumed"}
    save_file(held, named / shards[0].name)
    with pytest.raises(CheckpointError, match=shards[1].name):  # a download that broke off
        plan_device_map(named, CARD, verify=False)


def a_pointer(folder: Path, name: str, size: int) -> None:
    (folder / name).write_text(f"version https://git-lfs.github.com/spec/v1\noid sha256:{64 * '0'}\nsize {size}\n")


def elsewhere(folder: Path, kind: str, size: int) -> None:
    """The facts of weights that lie elsewhere, as clones and mirrors of the hub keep them."""
    if kind == "index":
        index = {
            "metadata": {"total_size": size},
            "weight_map": {"model.norm.weight": "model-00001-of-00001.safetensors"},
        }
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    elif kind == "index without a size":
        index = {"metadata": {"total_size": 0}, "weight_map": {"model.norm.weight": "model-00001-of-00001.safetensors"}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        a_pointer(folder, "model-00001-of-00001.safetensors", size)
    elif kind == "index of pickles":
        index = {"metadata": {"total_size": float(size)}, "weight_map": {"a": "pytorch_model-00001-of-00001.bin"}}
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    elif kind == "pickle":
        (folder / "pytorch_model.bin").write_bytes(bytes(size))
    else:
        a_pointer(folder, kind, size)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize(
    "kind",
    ["index", "index without a size", "index of pickles", "pickle", "model.safetensors", "pytorch_model.bin"],
)
def test_the_size_of_weights_that_are_elsewhere_shows_their_dtype(tmp_path: Path, kind: str, dtype: str) -> None:
    """As of bloom-560m, whose config names no dtype and whose weights are in 16 bits."""
    folder = folder_of(tmp_path, LLAMA)
    wanted = sizes(folder, dtype=dtype)
    elsewhere(folder, kind, wanted[2] + 2000)
    assert sizes(folder) == wanted
    told = [f.message for f in plan_device_map(folder, CARD, verify=False).findings if f.code == "dtype-assumed"]
    assert ["float16 is assumed by the size of its files" in message for message in told] == [True] * (
        dtype == "float16"
    )
    assert sizes(folder, dtype="bfloat16")[2] == wanted[2] // (1 if dtype == "float16" else 2)
