"""merge_lora_inplace on models that accelerate spreads over devices, the host's memory and the disk."""

from __future__ import annotations

import hashlib
import itertools
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import cpu_offload, dispatch_model
from engines import needs
from models import KINDS, save_adapter, save_llama
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from safetensors.torch import save_file
from torch import nn
from transformers import AutoModelForCausalLM

from safe_loading import MergeError, load_peft_on_rank, merge_lora_checkpoint, merge_lora_inplace

TOKENS = torch.arange(1, 25).reshape(2, 12)
ON_DISK = {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk", "model.layers.2": "disk"}
MAP = {**ON_DISK, "model.norm": "disk", "model.rotary_emb": "cpu", "lm_head": "disk"}


def hashes(*folders: Path) -> dict[Path, str]:
    files = [file for folder in folders for file in folder.rglob("*") if file.is_file()]
    return {file: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def attached(model: Any, base: Path, adapter: Path) -> Any:
    """`model` with the adapter, whose values are copied from a plain model: peft loads none onto an offloaded one."""
    model = get_peft_model(model, LoraConfig.from_pretrained(adapter)).eval()
    plain, modules = load_peft_on_rank(base, adapter), dict(model.named_modules())
    for path, module in plain.named_modules():
        for name, value in module.named_parameters(recurse=False):
            there = modules[path]._parameters[name]
            if "base_layer" not in path and ("lora_" in path or "trainable_tokens" in path):
                modules[path]._parameters[name] = nn.Parameter(value.detach().clone())
            elif name == "bias":
                store = there if not there.is_meta else modules[path]._hf_hook.weights_map[name]
                store.data.copy_(value)
    return model


def host(base: Path, adapter: Path, offload: Path) -> Any:
    """Weights in the host's memory, brought in for each layer."""
    model = cpu_offload(AutoModelForCausalLM.from_pretrained(base), execution_device=torch.device("cpu"))
    return attached(model, base, adapter)


def disk(base: Path, adapter: Path, offload: Path) -> Any:
    """accelerate's own files on disk, written when the model is dispatched."""
    model = AutoModelForCausalLM.from_pretrained(base)
    return attached(dispatch_model(model, MAP, offload_dir=offload, force_hooks=True), base, adapter)


def whole(base: Path, adapter: Path, offload: Path) -> Any:
    """The model is dispatched with its adapter, so the adapter is offloaded too."""
    model = load_peft_on_rank(base, adapter)
    places = {f"base_model.model.{name}": place for name, place in MAP.items()}
    return dispatch_model(model, places, offload_dir=offload, force_hooks=True)


def mapped(base: Path, adapter: Path, offload: Path) -> Any:
    """transformers points into the checkpoint for what is offloaded to disk."""
    model = AutoModelForCausalLM.from_pretrained(base, device_map=MAP, offload_folder=offload)
    return attached(model, base, adapter)


OFFLOADED_KINDS = ("all linear", "dora", "embedding", "trainable tokens")
STORES = {"host": host, "disk": disk, "whole": whole, "mapped": mapped}


def everything(model: Any) -> dict[str, torch.Tensor]:
    """All parameters, those that are offloaded as their hooks would bring them in."""
    found = {}
    for path, module in model.named_modules():
        for name, tensor in module.named_parameters(recurse=False):
            value = module._hf_hook.weights_map[name] if tensor.is_meta else tensor
            found[f"{path}.{name}"] = value.detach().clone()
    return found


@pytest.mark.parametrize(
    ("store", "kind"),
    [
        *(pytest.param(*case, marks=pytest.mark.slow) for case in itertools.product(STORES, OFFLOADED_KINDS)),
        ("host", "dora"),
        ("disk", "all linear"),
        ("whole", "embedding"),
        ("mapped", "trainable tokens"),
    ],
)
def test_an_offloaded_model_becomes_the_same_bits_and_no_file_is_written_through(
    tmp_path: Path, store: str, kind: str
) -> None:
    base = save_llama(tmp_path / "base", attention_bias=True)
    adapter = save_adapter(tmp_path / "adapter", base, **KINDS[kind])
    expected = merge_lora_inplace(load_peft_on_rank(base, adapter))
    model = STORES[store](base, adapter, tmp_path / "offload").eval()
    assert any(tensor.is_meta for tensor in model.parameters())
    before = hashes(tmp_path)
    with torch.no_grad():
        runs = kind in ("all linear", "embedding")  # peft's DoRA and trainable tokens do not run offloaded
        logits = model(input_ids=TOKENS).logits if runs else None
        merged = merge_lora_inplace(model)
        after = merged(input_ids=TOKENS).logits
    assert logits is None or torch.allclose(after, logits, atol=1e-5)
    ours, theirs = everything(merged), dict(expected.named_parameters())
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())
    assert {file: digest for file, digest in hashes(tmp_path).items() if file in before} == before
    moved = [finding.code for finding in merged.merge_report.findings]
    assert moved == ([] if store == "host" else ["offloaded-to-new-files"])
    assert any(tensor.is_meta for tensor in merged.parameters())  # what was offloaded stays so
    tokens = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(merged.generate(TOKENS, **tokens), expected.generate(TOKENS, **tokens))


def adapter_of(base: Path, folder: Path, kind: str = "all linear") -> Path:
    return save_adapter(folder, base, **KINDS[kind])


@pytest.mark.parametrize("store", ["host", "mapped"])
def test_a_refused_merge_leaves_every_store(tmp_path: Path, store: str) -> None:
    base = save_llama(tmp_path / "base")
    model = STORES[store](base, adapter_of(base, tmp_path / "adapter"), tmp_path / "offload")
    last = model.base_model.model.model.layers[2].mlp.down_proj
    last.lora_B["default"].weight.data.view(-1)[-1] = torch.nan
    values, before = everything(model), hashes(tmp_path)
    parameters = {name: id(tensor) for name, tensor in model.named_parameters()}
    with pytest.raises(MergeError, match=r"layers\.2\.mlp\.down_proj\.weight: .*NaN") as refused:
        merge_lora_inplace(model)
    assert len(refused.value.problems) == 1
    assert {name: id(tensor) for name, tensor in model.named_parameters()} == parameters
    assert all(
        torch.equal(a, b)
        for a, b in zip(values.values(), everything(model).values(), strict=True)
        if a.isfinite().all()
    )
    assert hashes(tmp_path) == before
    last.lora_B["default"].weight.data.view(-1)[-1] = 0
    merge_lora_inplace(model)


def test_a_disk_without_room_is_seen_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = save_llama(tmp_path / "base")
    model = mapped(base, adapter_of(base, tmp_path / "adapter"), tmp_path / "offload")
    before = hashes(tmp_path)
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(MergeError, match=r"offload: the merged weights that are offloaded to disk need .*1000 B"):
        merge_lora_inplace(model)
    assert hashes(tmp_path) == before


def test_a_full_disk_keeps_the_layer_and_a_second_call_merges_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = save_llama(tmp_path / "base")
    adapter = adapter_of(base, tmp_path / "adapter")
    model = mapped(base, adapter, tmp_path / "offload")
    calls: list[Any] = []

    def failing(*arguments: Any) -> None:
        calls.append(arguments)
        if len(calls) == 3:
            raise OSError(28, "No space left on device")
        save_file(*arguments)

    with torch.no_grad():
        logits = model(input_ids=TOKENS).logits
        with monkeypatch.context() as patched:
            patched.setattr("safe_loading._merging.weights.offloaded.save_file", failing)
            with pytest.raises(MergeError, match="No space left"):
                merge_lora_inplace(model)
        assert torch.allclose(model(input_ids=TOKENS).logits, logits, atol=1e-5)
        merged = merge_lora_inplace(model)
    expected = dict(merge_lora_inplace(load_peft_on_rank(base, adapter)).named_parameters())
    assert all(torch.equal(tensor, expected[name]) for name, tensor in everything(merged).items())


def test_merging_twice_leaves_one_copy_and_saving_writes_the_merged_weights(tmp_path: Path) -> None:
    base = save_llama(tmp_path / "base", torch.bfloat16)
    adapter = adapter_of(base, tmp_path / "adapter")
    files, models = [], []
    # in another dtype than on disk, so that what is mapped is not what is merged
    for options in ({"device_map": MAP, "offload_folder": tmp_path / "offload"}, {}):
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, **options)
        model = attached(model, base, adapter)
        model.add_adapter("second", LoraConfig.from_pretrained(adapter))
        for module in model.modules():
            if isinstance(module, LoraLayer):
                module.lora_A["second"], module.lora_B["second"] = module.lora_A["default"], module.lora_B["default"]
        merge_lora_inplace(model, adapter_names=["default"], unload=False)
        files.append(len(hashes(tmp_path / "offload")))
        models.append(merge_lora_inplace(model, adapter_names=["second"]))
        files.append(len(hashes(tmp_path / "offload")))
    assert files == files[:1] * 4
    merged, expected = models
    assert all(torch.equal(everything(merged)[name], tensor) for name, tensor in expected.named_parameters())
    merged.save_pretrained(tmp_path / "saved")
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype="auto")
    ours = everything(merged)
    assert all(torch.equal(ours[name], tensor) for name, tensor in saved.named_parameters())


@needs("transformers", "5.10")
@pytest.mark.parametrize(("store", "target"), [("disk", "embed_tokens"), ("mapped", "lm_head")])
def test_one_of_two_tied_weights_on_disk_is_refused(tmp_path: Path, store: str, target: str) -> None:
    base = save_llama(tmp_path / "base", tie_word_embeddings=True)
    adapter = save_adapter(tmp_path / "adapter", base, target_modules=[target])
    places = {name: "disk" if name in ("model.embed_tokens", "lm_head") else "cpu" for name in MAP}
    offload = tmp_path / "offload"
    if store == "mapped":
        model = AutoModelForCausalLM.from_pretrained(base, device_map=places, offload_folder=offload)
    else:
        model = AutoModelForCausalLM.from_pretrained(base)
        model = dispatch_model(model, places, offload_dir=offload, force_hooks=True)
    with pytest.raises(MergeError, match=r"shares its memory.*device_map={'': 'cpu'}.*merge_lora_checkpoint"):
        merge_lora_inplace(attached(model, base, adapter))
    whole = AutoModelForCausalLM.from_pretrained(base, device_map={"": "cpu"})
    model = PeftModel.from_pretrained(whole, str(adapter))
    with torch.no_grad():
        expected = model(input_ids=TOKENS).logits
        merged: Any = merge_lora_inplace(model)
        assert torch.allclose(merged(input_ids=TOKENS).logits, expected, atol=1e-5)
        merge_lora_checkpoint(base, adapter, tmp_path / "out")
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
        assert torch.allclose(merged(input_ids=TOKENS).logits, expected, atol=1e-5)


def test_an_adapter_that_peft_left_on_meta_is_named(tmp_path: Path) -> None:
    base = save_llama(tmp_path / "base")
    adapter = adapter_of(base, tmp_path / "adapter", "dora")
    model = cpu_offload(AutoModelForCausalLM.from_pretrained(base), execution_device=torch.device("cpu"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = PeftModel.from_pretrained(model, adapter)
    with pytest.raises(MergeError, match="its adapter is on meta"):
        merge_lora_inplace(model)
