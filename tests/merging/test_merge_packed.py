"""Merges of adapters into packed bases, as QLoRA is used: after a forward, after kbit training, and saved."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from allocator import peak_above_start
from models import save_adapter
from peft import LoraConfig, PeftModel, get_peft_model, prepare_model_for_kbit_training
from peft.tuners.lora import LoraLayer
from test_merge_lora_inplace_quantized import packed_for_cpu
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, GPT2Config, GPT2LMHeadModel

from safe_loading import (
    ArgumentError,
    MergeError,
    check_checkpoint,
    load_peft_on_rank,
    merge_lora_checkpoint,
    merge_lora_inplace,
)
from safe_loading._model.quantized.decode import decoded_weight

pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")

from packed import load, packing, save_packed, save_plain

TOKENS = torch.arange(24).view(2, 12) % 101
Folders = Callable[[str, int], tuple[Path, Path, Path]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """Return the plain base of a width, that base packed, and an adapter; each is saved once."""
    root, made = tmp_path_factory.mktemp("packed"), dict[Any, Path]()

    def of(kind: str, width: int) -> tuple[Path, Path, Path]:
        if width not in made:
            made[width] = save_plain(root / f"plain {width}", width)
            made[-width] = save_adapter(root / f"adapter {width}", made[width])
        if (kind, width) not in made:
            made[kind, width] = save_packed(made[width], root / f"{kind} {width}", kind)
        return made[width], made[kind, width], made[-width]

    return of


def load_packed(base: Path) -> Any:
    """Load a packed base, and put its codes into the order for CPUs."""
    model = load(base)
    packed_for_cpu(model, state_dict=False)
    return model


def save_packed_state(model: Any, folder: Path) -> Path:
    """Save a packed base as transformers does, without the conversions that it cannot revert."""
    model.save_pretrained(folder, save_original_format=False)
    return folder


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model.eval()(TOKENS).logits.float()
    return found


@pytest.mark.parametrize("width", [128, 256])
@pytest.mark.parametrize(("trained", "dtype"), [(False, torch.bfloat16), (True, torch.float32)])
def test_a_dequantized_model_has_the_dtype_of_the_model(
    folders: Folders, width: int, trained: bool, dtype: torch.dtype
) -> None:
    """BitsAndBytesConfig computes in float32 by default; ``prepare_model_for_kbit_training`` casts the other layers."""
    plain, _, adapter = folders("nf4", width)
    default: Any = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")  # type: ignore[no-untyped-call]
    options: dict[str, Any] = {"quantization_config": default, "device_map": "cpu", "dtype": torch.bfloat16}
    model: Any = AutoModelForCausalLM.from_pretrained(plain, **options)
    if trained:
        model = prepare_model_for_kbit_training(model)
    model = PeftModel.from_pretrained(model, adapter)
    expected = logits(model)
    merged = merge_lora_inplace(model, dequantize=True)
    assert {parameter.dtype for parameter in merged.parameters()} == {dtype}
    assert (logits(merged) - expected).abs().max() < 0.03


@pytest.mark.parametrize("kind", ["nf4", "nf4 nested", "int8"])
def test_a_dora_that_is_merged_into_codes_says_what_that_loses(folders: Folders, tmp_path: Path, kind: str) -> None:
    _, base, _ = folders(kind, 128)
    torch.manual_seed(0)
    config = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], use_dora=True, init_lora_weights=False)
    made = get_peft_model(load(base), config)
    made.save_pretrained(tmp_path / "adapter")
    report = merge_lora_inplace(made).merge_report
    findings = {finding.code: finding for finding in report.findings}
    assert "of what the adapters add" in findings["requantized"].message
    whole = merge_lora_inplace(load_peft_on_rank(tmp_path / "adapter", base), dequantize=True)  # the advice
    assert "requantized" not in {finding.code for finding in whole.merge_report.findings}


@pytest.mark.parametrize("dequantize", [False, True])
@pytest.mark.parametrize("alpha", [4, 8])
def test_a_trained_bias_without_a_place_is_refused_with_a_road(
    folders: Folders, tmp_path: Path, dequantize: bool, alpha: int
) -> None:
    plain, base, _ = folders("nf4", 128)
    config = LoraConfig(r=4, lora_alpha=alpha, target_modules=["q_proj"], lora_bias=True, init_lora_weights=False)
    with pytest.raises(MergeError, match=r"no bias to add it to.*attention_bias=True") as refused:
        merge_lora_inplace(get_peft_model(load(base), config), dequantize=dequantize)
    assert "dequantize=True" not in str(refused.value)
    options: dict[str, Any] = {"attention_bias": True, "dtype": torch.bfloat16}
    AutoModelForCausalLM.from_pretrained(plain, **options).save_pretrained(tmp_path / "plain")
    model = get_peft_model(load(save_packed(tmp_path / "plain", tmp_path / "packed", "nf4")), config)
    expected = logits(model)
    assert (logits(merge_lora_inplace(model, dequantize=True)) - expected).abs().max() < 0.05


@pytest.mark.each_value
@pytest.mark.parametrize("width", [128, 256])
@pytest.mark.parametrize("forward", [False, True])
@pytest.mark.parametrize("kind", ["nf4", "nf4 nested", "nf4 as bfloat16", "int8"])
def test_what_is_merged_into_codes_is_saved_as_it_is(
    folders: Folders, tmp_path: Path, kind: str, forward: bool, width: int
) -> None:
    _, base, adapter = folders(kind, width)
    model = load_peft_on_rank(adapter, base)
    if forward:
        logits(model)
    merged: Any = merge_lora_inplace(model)
    merged.save_pretrained(tmp_path / "saved")
    assert check_checkpoint(tmp_path / "saved", values=True).findings == ()
    assert torch.equal(logits(load(tmp_path / "saved")), logits(merged))


@pytest.mark.parametrize("width", [128, 256])
@pytest.mark.parametrize("kind", ["nf4", "nf4 nested"])
def test_codes_in_the_order_for_cpus_are_named_and_saved_right(
    folders: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, width: int
) -> None:
    """No CPU with AVX-512 is needed: the conversion is plain torch, only the product is not."""
    _, base, adapter = folders(kind, width)
    expected = merge_lora_inplace(load_peft_on_rank(adapter, base))
    monkeypatch.setattr("bitsandbytes.nn.modules.has_avx512bf16", lambda: False)
    model: Any = load_peft_on_rank(adapter, base)
    assert "codes-reordered" not in {finding.code for finding in model.load_report.findings}
    monkeypatch.setattr("bitsandbytes.nn.modules.has_avx512bf16", lambda: True)
    model = load_peft_on_rank(adapter, base)
    assert "codes-reordered" in {finding.code for finding in model.load_report.findings}
    packed_for_cpu(model, state_dict=False)
    # what the finding says of the engine: of its own save, check refuses what is plain, and what is nested is rounded
    if kind == "nf4":
        folder = save_packed_state(load_packed(base), tmp_path / "wrong")
        assert [finding.code for finding in check_checkpoint(folder).findings] == ["packed-statistics"]
    merged: Any = merge_lora_inplace(model)
    assert "codes-reordered" in {finding.code for finding in merged.merge_report.findings}
    merged.save_pretrained(tmp_path / "saved")
    assert check_checkpoint(tmp_path / "saved").findings == ()
    monkeypatch.undo()
    # the order for CPUs keeps the scales in bfloat16
    assert (logits(load(tmp_path / "saved")) - logits(expected)).abs().max() < 0.06


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("quantization_config", "quantize the output when it is loaded"),
        ("load_in_4bit", "quantize the output when it is loaded"),
        ("key_mapping", "save the base under the names of its class first"),
        ("nonsense", "no argument of that name"),
    ],
)
def test_arguments_that_a_merge_on_disk_would_ignore_are_refused(
    folders: Folders, tmp_path: Path, argument: str, words: str
) -> None:
    plain, _, adapter = folders("nf4", 128)
    values = {"quantization_config": packing("nf4"), "key_mapping": {"a": "b"}}
    with pytest.raises(ArgumentError, match=words) as refused:
        merge_lora_checkpoint(plain, adapter, tmp_path / "out", base_kwargs={argument: values.get(argument, True)})
    assert f"base_kwargs[{argument!r}]" in str(refused.value)
    assert not (tmp_path / "out").exists()
    merge_lora_checkpoint(plain, adapter, tmp_path / "out", base_kwargs={"num_labels": 2, "variant": None})
    if "quantize the output" in words:
        assert load(tmp_path / "out", "nf4").is_quantized


@pytest.mark.parametrize("kind", ["nf4", "nf4 nested", "int8"])
def test_an_olora_start_on_codes_is_repeated_as_peft_repeats_it(folders: Folders, tmp_path: Path, kind: str) -> None:
    _, base, _ = folders(kind, 128)
    config = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights="olora", task_type="CAUSAL_LM")
    trained = get_peft_model(load(base), config)
    with torch.no_grad():
        for name, parameter in trained.named_parameters():
            if "lora_" in name:
                parameter += 0.01
    trained.save_pretrained(tmp_path / "adapter")
    expected = logits(PeftModel.from_pretrained(load(base), tmp_path / "adapter"))
    loaded: Any = load_peft_on_rank(tmp_path / "adapter", base)
    assert torch.equal(logits(loaded), expected)
    assert torch.equal(expected, logits(trained))
    assert "base-changed" in {finding.code for finding in loaded.load_report.findings}


@pytest.mark.each_value
@pytest.mark.parametrize("dequantize", [False, True])
@pytest.mark.parametrize("width", [128, 256])
@pytest.mark.parametrize("kind", ["nf4", "nf4 nested", "int8"])
def test_transposed_layers_are_merged_and_saved_as_their_class_has_them(
    tmp_path: Path, kind: str, width: int, dequantize: bool
) -> None:
    """GPT-2's Conv1D, which a quantizer takes for a Linear; a merge on disk names this road."""
    sizes: dict[str, Any] = {"n_embd": width, "n_layer": 2, "n_head": 4, "vocab_size": 101, "n_positions": 64}
    torch.manual_seed(0)
    model: Any = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=1, eos_token_id=2))
    model.to(torch.bfloat16).save_pretrained(tmp_path / "plain")
    targets: dict[str, Any] = {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}
    adapter = save_adapter(tmp_path / "adapter", tmp_path / "plain", **targets)
    base = save_packed(tmp_path / "plain", tmp_path / "base", kind)
    with pytest.raises(MergeError, match="merge it with merge_lora_inplace and save it with save_pretrained"):
        merge_lora_checkpoint(base, adapter, tmp_path / "out", dequantize=True)
    loaded: Any = load_peft_on_rank(adapter, base)
    expected = logits(loaded)
    merged: Any = merge_lora_inplace(loaded, dequantize=dequantize)
    # codes are rounded again, and 8 bits round the inputs; a weight that lies the wrong way is off by more than 1
    assert (logits(merged) - expected).norm() < (0.05 if dequantize else 0.5) * expected.norm()
    merged.save_pretrained(tmp_path / "saved")
    assert torch.equal(logits(load(tmp_path / "saved")), logits(merged))


@pytest.mark.parametrize("width", [128, 256])
def test_an_adapter_of_a_packed_base_is_told_of_the_two_merges(folders: Folders, tmp_path: Path, width: int) -> None:
    plain, base, adapter = folders("nf4", width)
    adapter = Path(shutil.copytree(adapter, tmp_path / "adapter"))
    path = adapter / "adapter_config.json"
    config = json.loads(path.read_text())
    for name, told in {"me/llama-bnb-4bit": True, "me/llama-4bit": True, "me/4bit/llama-8B": False}.items():
        path.write_text(json.dumps({**config, "base_model_name_or_path": name}))
        reports = [
            merge_lora_checkpoint(plain, adapter, tmp_path / "original", overwrite=True),
            merge_lora_inplace(load_peft_on_rank(adapter, plain)).merge_report,
        ]
        for report in reports:
            assert ("trained-on-packed" in {finding.code for finding in report.findings}) is told, name
    trained = logits(PeftModel.from_pretrained(load(base), adapter))
    report = merge_lora_checkpoint(base, adapter, tmp_path / "packed", dequantize=True)
    assert "trained-on-packed" not in {finding.code for finding in report.findings}
    original, packed = ((logits(load(tmp_path / name)) - trained).norm() for name in ("original", "packed"))
    assert packed < original / 4  # as the finding says


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_a_merge_into_codes_holds_one_layer_more_than_the_codes(kind: str) -> None:
    """What peft's merge holds, and the codes of before, which undo it; the layers are large beside the blocks."""
    count, width = 5, 1024
    values, codes = 4 * width**2, width**2 // (2 if kind == "nf4" else 1)
    peaks = {}
    for name, merge in {
        "peft": lambda model: model.merge_and_unload(safe_merge=True),
        "codes": merge_lora_inplace,
        "plain": lambda model: merge_lora_inplace(model, dequantize=True),
    }.items():
        model = wide_layers(kind, count, width)
        peaks[name] = peak_above_start(lambda merge=merge, model=model: merge(model))
    scratch, scales = 4 << 20, codes // 4
    assert peaks["codes"] <= peaks["peft"] + count * (codes + scales) + scratch, peaks
    # int8 is decoded by bitsandbytes, which holds the values twice; a block of sums is three times in float64
    assert peaks["plain"] <= count * values + 2 * values + 3 * scratch, peaks


@pytest.mark.parametrize("kind", ["nf4", "nf4 nested"])
def test_an_adapter_that_loftq_starts_on_codes_arrives_and_is_merged_as_any_other(
    folders: Folders, tmp_path: Path, kind: str
) -> None:
    """The factors make up for the rounding of the codes, which stay; by hand, as peft's function needs a card."""
    plain, base, _ = folders(kind, 128)
    weights = dict(AutoModelForCausalLM.from_pretrained(plain).named_parameters())
    trained: Any = get_peft_model(load(base), LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"))
    for path, layer in trained.base_model.model.named_modules():
        if isinstance(layer, LoraLayer):
            lost = weights[f"{path}.weight"].detach().float() - decoded_weight(layer.get_base_layer())
            left, size, right = torch.linalg.svd(lost, full_matrices=False)
            layer.lora_B["default"].weight.data = left[:, :8] * size[:8].sqrt()
            layer.lora_A["default"].weight.data = right[:8] * size[:8].sqrt()[:, None]
    truth = logits(trained)
    trained.save_pretrained(tmp_path / "adapter")
    model = load_peft_on_rank(tmp_path / "adapter", base)
    assert torch.equal(logits(model), truth)
    start = (logits(load(base)) - truth).norm()
    merged = merge_lora_inplace(model, dequantize=True)
    assert (logits(merged) - truth).norm() < 0.3 * start  # bfloat16 rounds what is merged


def wide_layers(kind: str, count: int, width: int) -> Any:
    """Return packed layers of one size with adapters."""
    bnb = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed").nn
    layers = [
        bnb.Linear8bitLt(width, width, bias=False, has_fp16_weights=False)
        if kind == "int8"
        else bnb.Linear4bit(width, width, bias=False, quant_type=kind, compress_statistics=False)
        for _ in range(count)
    ]
    model: Any = torch.nn.Sequential(*layers).to("cpu")
    model.is_loaded_in_8bit, model.is_loaded_in_4bit = kind == "int8", kind != "int8"
    config = LoraConfig(r=4, target_modules=[str(n) for n in range(count)], init_lora_weights=False)
    return get_peft_model(model, config)
