"""merge_lora_checkpoint into the codes of a base: fp8 with block scales and MXFP4 keep their format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import before, needs
from faults.operations import disk_full, operations
from models import save_adapter, save_llama
from peft import PeftModel
from safetensors.torch import load_file, save_file
from test_lora_update import nearest
from test_merge_lora_checkpoint_quantized import loaded_with_info, on_disk
from transformers import AutoConfig, AutoModelForCausalLM, FineGrainedFP8Config

from safe_loading import ArgumentError, MergeError, check_checkpoint, merge_lora_checkpoint, merge_lora_inplace
from safe_loading.__main__ import main
from safe_loading._checkpoint.header import TensorInfo
from safe_loading._merging.disk import write_codes, write_files
from safe_loading._merging.disk.changes import ChangedRows, Changes
from safe_loading._merging.disk.kept_format import why_not_kept
from safe_loading._merging.weights.update import Term, Update
from safe_loading._model.formats.stored import QuantizedTensor

E4M3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double().nan_to_num(0).unique()
SCALE = "_scale_inv"


def spread(scale: torch.Tensor, block: list[int] | None, shape: torch.Size) -> torch.Tensor:
    """The scale of each element, in float64."""
    if scale.dtype == torch.uint8:
        scale = scale.view(torch.float8_e8m0fnu)
    scale = scale.float().double()
    if block is None:
        return scale.expand(shape)
    return scale.repeat_interleave(block[0], 0)[: shape[0]].repeat_interleave(block[1], 1)[:, : shape[1]]


def quantize(weight: torch.Tensor, block: list[int] | None, fmt: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales as DeepSeek's and transformers' own code makes them: largest absolute value / 448."""
    rows, columns = weight.shape
    high, wide = block or (rows, columns)
    scale = torch.zeros(-(-rows // high), -(-columns // wide))
    for i, j in torch.cartesian_prod(*map(torch.arange, scale.shape)).tolist():
        scale[i, j] = weight[i * high : i * high + high, j * wide : j * wide + wide].abs().max().float() / 448
    if fmt != "float":
        scale = torch.exp2(torch.ceil(torch.log2(scale)))
    codes = (weight.double() / spread(scale, [high, wide], weight.shape)).clamp(-448, 448).to(torch.float8_e4m3fn)
    dtypes = {"e8m0": torch.float8_e8m0fnu, "bytes": torch.float8_e8m0fnu, "bfloat16": torch.bfloat16}
    scale = scale.to(dtypes.get(fmt, torch.float32))
    scale = scale.view(torch.uint8) if fmt == "bytes" else scale
    return codes, scale.reshape(()) if block is None else scale


def save_fp8(folder: Path, block: list[int] | None, fmt: str = "float", *, apart: bool = False, **sizes: Any) -> Path:
    """A Llama with its layers in fp8; ``apart`` puts all scales into a file of their own."""
    base = save_llama(folder, torch.bfloat16, **sizes)
    index, scales = json.loads((base / "model.safetensors.index.json").read_text()), {}
    for file in sorted(base.glob("*.safetensors")):
        tensors = load_file(file)
        for name in [name for name in tensors if name.endswith("_proj.weight")]:
            tensors[name], scale = quantize(tensors[name], block, fmt)
            index["weight_map"][name + SCALE] = "scales.safetensors" if apart else file.name
            (scales if apart else tensors)[name + SCALE] = scale
        save_file(tensors, file, metadata={"format": "pt"})
    if apart:
        save_file(scales, base / "scales.safetensors", metadata={"format": "pt"})
    index["metadata"]["total_size"] = sum(tensor.nbytes for tensor in on_disk(base).values())
    (base / "model.safetensors.index.json").write_text(json.dumps(index))
    config = json.loads((base / "config.json").read_text())
    scale_fmt = {} if fmt in ("float", "bfloat16") else {"scale_fmt": "ue8m0"}
    quantization = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": block, **scale_fmt}
    (base / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}, indent=2))
    return base


def adapter_of(folder: Path, alpha: float = 8, **config: Any) -> Path:
    """An adapter trained on the plain model."""
    return save_adapter(folder / "adapter", save_llama(folder / "plain", torch.bfloat16), lora_alpha=alpha, **config)


def in_memory(base: Path, adapter: Path) -> Any:
    """The merge of merge_lora_inplace into transformers' own FP8Linear."""
    from transformers.integrations.finegrained_fp8 import replace_with_fp8_linear

    config = AutoConfig.from_pretrained(base)
    settings = {k: v for k, v in config.quantization_config.items() if k != "quant_method"}
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    replace_with_fp8_linear(model, ["lm_head"], FineGrainedFP8Config(**settings))
    for module in model.modules():
        if type(module).__name__ == "FP8Linear":
            module.to_empty(device="cpu")
    held = {n: t.view(torch.float8_e8m0fnu) if t.dtype == torch.uint8 else t for n, t in on_disk(base).items()}
    for name, parameter in model.named_parameters():
        if parameter.dtype == torch.float8_e8m0fnu:  # by scale_fmt, whatever the dtype in the file
            parameter.data.copy_(held[name].float())
        else:
            parameter.data = held[name].clone()
    return merge_lora_inplace(PeftModel.from_pretrained(model, adapter))


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)


def delta_of(adapter: Path, name: str, scaling: float) -> torch.Tensor | None:
    factors = load_file(adapter / "adapter_model.safetensors")
    prefix = f"base_model.model.{name.removesuffix('weight')}"
    if f"{prefix}lora_A.weight" not in factors:
        return None
    a, b = factors[f"{prefix}lora_A.weight"].double(), factors[f"{prefix}lora_B.weight"].double()
    return scaling * b @ a


CASES = [
    ([16, 16], "float"),
    ([16, 24], "float"),
    ([12, 16], "bfloat16"),
    ([1, 32], "bytes"),
    ([16, 16], "e8m0"),
    ([16, 16], "ue8m0 in float32"),
    (None, "float"),
]


def test_a_config_that_names_no_block_has_that_of_transformers(tmp_path: Path) -> None:
    base = save_fp8(tmp_path / "base", [128, 128], "float", intermediate_size=192)
    plain = save_llama(tmp_path / "plain", torch.bfloat16, intermediate_size=192)
    adapter = save_adapter(tmp_path / "adapter", plain, target_modules=["up_proj", "down_proj"])
    merge_lora_checkpoint(base, adapter, tmp_path / "named")
    config = json.loads((base / "config.json").read_text())
    del config["quantization_config"]["weight_block_size"]
    (base / "config.json").write_text(json.dumps(config))
    merge_lora_checkpoint(base, adapter, tmp_path / "unnamed")
    named, unnamed = on_disk(tmp_path / "named"), on_disk(tmp_path / "unnamed")
    assert [name for name, tensor in named.items() if not torch.equal(as_bytes(tensor), as_bytes(unnamed[name]))] == []


@needs("transformers", "5.10")
@pytest.mark.parametrize(("block", "fmt"), CASES)
def test_fp8_keeps_its_format_and_has_the_codes_of_the_merge_in_memory(
    tmp_path: Path, block: list[int] | None, fmt: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, adapter = save_fp8(tmp_path / "base", block, fmt), adapter_of(tmp_path)
    monkeypatch.setattr(write_codes, "_ELEMENTS", 300)  # so that a weight is written in several parts
    report = merge_lora_checkpoint(base, adapter, tmp_path / "out")
    model = in_memory(base, adapter)
    before, found, memory = on_disk(base), on_disk(tmp_path / "out"), model.state_dict()
    assert {path.name for path in base.iterdir()} <= {path.name for path in (tmp_path / "out").iterdir()}
    assert (tmp_path / "out" / "config.json").read_bytes() == (base / "config.json").read_bytes()
    merged = {tensor.name for tensor in report.of("merged")}
    assert len(merged) == len(report.of("rescaled")) == 9
    losses = {weight.name: weight.rounding for weight in model.merge_report.weights}
    for tensor in report.of("merged"):
        assert vars(losses[tensor.name]) == pytest.approx(vars(tensor.rounding), rel=1e-4), tensor.name
    grown = 0
    for name, tensor in found.items():
        assert tensor.dtype == before[name].dtype, name
        held = memory[name] if tensor.dtype == torch.uint8 else memory[name].to(tensor.dtype)
        assert torch.equal(as_bytes(tensor), as_bytes(held)), name
        if name.removesuffix(SCALE) not in merged:
            assert torch.equal(as_bytes(tensor), as_bytes(before[name])), name
        elif name.endswith(SCALE):
            grown += int((as_bytes(tensor) != as_bytes(before[name])).sum())
    assert grown  # scales that would not hold the sum
    assert check_checkpoint(tmp_path / "out", values=True).ok


@pytest.mark.parametrize("block", [[16, 16], None])
def test_each_code_is_the_nearest_and_the_loss_is_measured(tmp_path: Path, block: list[int] | None) -> None:
    base, adapter = save_fp8(tmp_path / "base", block), adapter_of(tmp_path, alpha=1)
    report = merge_lora_checkpoint(base, adapter, tmp_path / "out")
    before, found = on_disk(base), on_disk(tmp_path / "out")
    recorded = json.loads((tmp_path / "out" / "merge_report.json").read_text())["tensors"]
    for tensor in report.of("merged"):
        name, delta = tensor.name, delta_of(adapter, tensor.name, 0.25)
        assert delta is not None
        was = before[name].double() * spread(before[name + SCALE], block, delta.shape)
        scales = spread(found[name + SCALE], block, delta.shape)
        exact, written = was + delta, found[name].double() * scales
        nearest = (exact.unsqueeze(-1) - E4M3 * scales.unsqueeze(-1)).abs().amin(-1)
        assert torch.allclose((exact - written).abs(), nearest, rtol=0, atol=1e-15), name
        loss = tensor.rounding
        assert loss is not None
        assert loss.error == pytest.approx(float((written - exact).norm() / exact.norm()), rel=1e-5)
        kept = float(((written - was) * delta).sum() / delta.square().sum())
        assert loss.update_kept == pytest.approx(kept, rel=1e-4)
        plain = load_plain(tmp_path / "plain", name)
        assert loss.base_error == pytest.approx(float((was - plain).norm() / plain.norm()), rel=0.15)
        assert tensor.max_delta == pytest.approx(float(delta.abs().max()), rel=1e-12)
        assert recorded[name]["rounding"]["error"] == loss.error
        assert recorded[name]["action"] == "merged"
        assert recorded[name + SCALE]["action"] == "rescaled"


def load_plain(folder: Path, name: str) -> torch.Tensor:
    return on_disk(folder)[name].double()


@needs("transformers", "5.10")
@before("transformers", "5.24")
def test_a_base_that_transformers_wrote_is_read_back_by_it(tmp_path: Path) -> None:
    """transformers dequantizes fp8 on a CPU when it loads, and quantizes again, by its own code, when it saves."""
    first, base, adapter = save_fp8(tmp_path / "first", [16, 16]), tmp_path / "base", adapter_of(tmp_path)
    AutoModelForCausalLM.from_pretrained(first).save_pretrained(base)
    # It leaves out of config.json that these are codes, without which nothing could read them.
    settings = {name: json.loads((first / "config.json").read_text())[name] for name in ("quantization_config",)}
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**config, **settings}))
    assert any(tensor.dtype == torch.float8_e4m3fn for tensor in on_disk(base).values())
    merge_lora_checkpoint(base, adapter, tmp_path / "out")
    found, factors = on_disk(tmp_path / "out"), 0
    model, info = loaded_with_info(tmp_path / "out")
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    for name, tensor in model.state_dict().items():
        if name + SCALE in found:
            values = found[name].double() * spread(found[name + SCALE], [16, 16], tensor.shape)
            assert torch.equal(tensor, values.float().to(tensor.dtype)), name
            factors += not torch.equal(as_bytes(found[name]), as_bytes(on_disk(base)[name]))
    assert factors == 9


@pytest.mark.parametrize("stopped", [0, 1, 2])
def test_weights_and_scales_in_two_files_are_continued_after_an_interrupt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stopped: int
) -> None:
    """Whichever of the two files was complete, the other one is written from the same base."""
    base, adapter = save_fp8(tmp_path / "base", [16, 16], apart=True), adapter_of(tmp_path)
    whole = merge_lora_checkpoint(base, adapter, tmp_path / "whole", threads=1)
    done: list[str] = []
    original = write_files.Stage.record

    def record(stage: Any, file: str, *arguments: Any) -> None:
        if stopped == 0 and file == "scales.safetensors":
            raise KeyboardInterrupt
        original(stage, file, *arguments)
        done.append(file)
        if (stopped == 1 and file == "scales.safetensors") or (stopped == 2 and len(done) == 3):
            raise KeyboardInterrupt

    if stopped == 1:  # the scales are complete first: all codes are written by the time, but one file is not synced
        monkeypatch.setattr(write_files, "_in_lanes", _scales_first(write_files._in_lanes))
    monkeypatch.setattr(write_files.Stage, "record", record)
    with pytest.raises(KeyboardInterrupt):
        merge_lora_checkpoint(base, adapter, tmp_path / "out", threads=1)
    monkeypatch.undo()
    report = merge_lora_checkpoint(base, adapter, tmp_path / "out", threads=1)
    assert set(report.resumed) == set(done)
    assert ("scales.safetensors" in done) == (stopped == 1)
    assert report.tensors == whole.tensors
    for path in (tmp_path / "whole").iterdir():
        assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes(), path.name


def _scales_first(original: Any) -> Any:
    def in_lanes(files: Any, threads: int) -> Any:
        return sorted(original(files, threads), key=lambda task: task[0].plan.name != "scales.safetensors")

    return in_lanes


@pytest.mark.parametrize("options", [{"max_shard_size": "8KB"}, {"threads": 3, "verify": False}, {"device": "cpu"}])
def test_options_change_no_byte_of_a_tensor(tmp_path: Path, options: dict[str, Any]) -> None:
    base, adapter = save_fp8(tmp_path / "base", [16, 16]), adapter_of(tmp_path)
    merge_lora_checkpoint(base, adapter, tmp_path / "whole")
    merge_lora_checkpoint(base, adapter, tmp_path / "out", **options)
    whole, found = on_disk(tmp_path / "whole"), on_disk(tmp_path / "out")
    assert whole.keys() == found.keys()
    for name, tensor in found.items():
        assert torch.equal(as_bytes(tensor), as_bytes(whole[name])), name


def test_an_adapter_that_adds_nothing_changes_no_byte(tmp_path: Path) -> None:
    base, adapter = save_fp8(tmp_path / "base", [16, 16]), adapter_of(tmp_path)
    factors = {n: t * ("lora_A" in n) for n, t in load_file(adapter / "adapter_model.safetensors").items()}
    save_file(factors, adapter / "adapter_model.safetensors", metadata={"format": "pt"})
    report = merge_lora_checkpoint(base, adapter, tmp_path / "out")
    for file in base.glob("*.safetensors"):
        assert (tmp_path / "out" / file.name).read_bytes() == file.read_bytes()
    assert {(t.rounding.error, t.rounding.update_kept) for t in report.of("merged") if t.rounding} == {(0.0, 1.0)}
    assert [finding.code for finding in report.findings] == ["lora-b-zero", "requantized"]


def test_an_update_that_rounding_loses_is_told_and_dequantized_it_is_kept(tmp_path: Path) -> None:
    base, adapter = save_fp8(tmp_path / "base", [16, 16]), adapter_of(tmp_path, alpha=0.01)
    report = merge_lora_checkpoint(base, adapter, tmp_path / "out")
    (lost,) = [finding for finding in report.findings if finding.code == "update-lost"]
    assert lost.severity == "warning"
    assert "9 of 9 weights" in lost.message
    assert "dequantize=True" in lost.fix
    again = merge_lora_checkpoint(base, adapter, tmp_path / "plain_out", dequantize=True, dtype="float32")
    assert not [finding for finding in again.findings if finding.code in ("requantized", "update-lost")]
    assert {tensor.rounding for tensor in again.tensors} == {None}
    before, found = on_disk(base), on_disk(tmp_path / "plain_out")
    for tensor in report.of("merged"):
        delta = delta_of(adapter, tensor.name, 0.01 / 4)
        assert delta is not None
        was = before[tensor.name].double() * spread(before[tensor.name + SCALE], [16, 16], delta.shape)
        kept = float(((found[tensor.name].double() - was) * delta).sum() / delta.square().sum())
        assert kept == pytest.approx(1, abs=0.01)
        assert tensor.rounding is not None
        assert tensor.rounding.update_kept < 0.5


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"modules_to_save": ["down_proj"], "target_modules": ["q_proj"]}, "replaces values of it"),
        ({"init_lora_weights": "olora"}, "needs values of the whole weight"),
        ({"init_lora_weights": "pissa"}, "needs values of the whole weight"),
    ],
)
def test_what_codes_cannot_take_is_refused_and_a_plain_output_takes_it(
    tmp_path: Path, config: dict[str, Any], words: str
) -> None:
    base, adapter = save_fp8(tmp_path / "base", [16, 16]), adapter_of(tmp_path, **config)
    with pytest.raises(MergeError, match=rf"down_proj.weight: .*{words}.*fp8 codes. Pass dequantize=True"):
        merge_lora_checkpoint(base, adapter, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert merge_lora_checkpoint(base, adapter, tmp_path / "out", dequantize=True).ok


def test_a_dtype_is_for_plain_outputs(tmp_path: Path) -> None:
    base, adapter = save_fp8(tmp_path / "base", [16, 16]), adapter_of(tmp_path)
    with pytest.raises(ArgumentError, match=r"quantized \(fp8\).*Leave it out; or pass dequantize=True"):
        merge_lora_checkpoint(base, adapter, tmp_path / "out", dtype="float32")
    merge_lora_checkpoint(base, adapter, tmp_path / "out", dtype="float32", dequantize=True)
    assert {tensor.dtype for tensor in on_disk(tmp_path / "out").values()} == {torch.float32}


@pytest.mark.parametrize("where", ["base", "adapter"])
def test_what_is_not_finite_is_refused_and_leaves_nothing(tmp_path: Path, where: str) -> None:
    base, adapter = save_fp8(tmp_path / "base", [16, 16]), adapter_of(tmp_path)
    name, factors = "model.layers.0.mlp.down_proj.weight", load_file(adapter / "adapter_model.safetensors")
    if where == "adapter":
        prefix = f"base_model.model.{name.removesuffix('weight')}"
        factors[f"{prefix}lora_A.weight"].fill_(3e38)
        factors[f"{prefix}lora_B.weight"].fill_(3e38)
        save_file(factors, adapter / "adapter_model.safetensors", metadata={"format": "pt"})
    for file in base.glob("*.safetensors") if where == "base" else ():
        tensors = load_file(file)
        if name in tensors:
            tensors[name].view(torch.uint8)[3, 3] = 0x7F
        save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(MergeError, match=r"down_proj.weight: in the rows from 0 to \d+.*fp8 codes under a scale"):
        merge_lora_checkpoint(base, adapter, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / ".out.staged").exists()


@pytest.mark.parametrize("init", ["olora", "pissa"])
def test_an_init_that_changes_the_base_is_repeated_on_the_dequantized_weight(tmp_path: Path, init: str) -> None:
    """As it was trained: on the base in the dtype of its config, which is what transformers' dequantizing makes."""
    base = save_fp8(tmp_path / "base", [16, 16])
    model: Any = AutoModelForCausalLM.from_pretrained(base)
    model._weight_conversions = []  # else transformers would save it as codes again
    model.save_pretrained(tmp_path / "plain_base", save_original_format=False)
    adapter = save_adapter(tmp_path / "adapter", tmp_path / "plain_base", init_lora_weights=init)
    merge_lora_checkpoint(base, adapter, tmp_path / "out", dequantize=True)
    merge_lora_checkpoint(tmp_path / "plain_base", adapter, tmp_path / "expected")
    found, expected = on_disk(tmp_path / "out"), on_disk(tmp_path / "expected")
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize(("block", "fmt"), [([1, 32], "bytes"), ([16, 16], "e8m0"), ([16, 16], "float")])
def test_scales_that_are_exponents_are_read_as_such(tmp_path: Path, block: list[int], fmt: str) -> None:
    """MXFP8 saves them as bytes, which are no factors."""
    base, adapter = save_fp8(tmp_path / "base", block, fmt), adapter_of(tmp_path)
    merge_lora_checkpoint(base, adapter, tmp_path / "out", dequantize=True)
    before, found = on_disk(base), on_disk(tmp_path / "out")
    for name, tensor in found.items():
        if name + SCALE in before:
            exact = before[name].double() * spread(before[name + SCALE], block, tensor.shape)
            delta = delta_of(adapter, name, 2)
            assert torch.equal(tensor, nearest(exact if delta is None else exact + delta, torch.bfloat16)), name


def test_a_full_disk_leaves_nothing_and_a_second_call_completes(tmp_path: Path) -> None:
    base, adapter = save_fp8(tmp_path / "base", [16, 16], apart=True), adapter_of(tmp_path)
    with operations() as log:
        merge_lora_checkpoint(base, adapter, tmp_path / "whole", threads=1)
    before = sorted(path.name for path in tmp_path.iterdir())
    for n in range(3, len(log.log), max(1, len(log.log) // 12)):
        with pytest.raises(OSError, match="No space left"), operations(n, disk_full):
            merge_lora_checkpoint(base, adapter, tmp_path / "out", threads=1)
        assert sorted(path.name for path in tmp_path.iterdir()) == before, n
    merge_lora_checkpoint(base, adapter, tmp_path / "out")
    for path in (tmp_path / "whole").iterdir():
        assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes(), path.name


def test_the_command_keeps_the_format_unless_it_is_told_to_dequantize(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base, adapter = save_fp8(tmp_path / "base", [16, 16]), adapter_of(tmp_path)
    assert main(["merge", str(base), str(adapter), str(tmp_path / "kept")]) == 0
    assert "requantized" in capsys.readouterr().out
    assert main(["merge", str(base), str(adapter), str(tmp_path / "plain_out"), "--dequantize"]) == 0
    assert "requantized" not in capsys.readouterr().out
    name = "model.layers.0.mlp.down_proj.weight"
    assert on_disk(tmp_path / "kept")[name].dtype == torch.float8_e4m3fn
    assert on_disk(tmp_path / "plain_out")[name].dtype == torch.bfloat16


def test_what_does_not_follow_the_blocks_is_refused_by_name() -> None:
    """Changes that no adapter of a known model makes of such weights, and that could be merged wrongly."""
    codes = TensorInfo("w_blocks", "U8", (2, 8, 1, 16), 0, 256)
    fp8 = TensorInfo("f", "F8_E4M3", (8, 32), 0, 256)
    quantized = {
        "w": QuantizedTensor("mxfp4", codes, (2, 32, 8), {}, {}),
        "f": QuantizedTensor("fp8", fp8, (8, 32), {}, {}),
    }
    term = Term(torch.ones(32, 1), torch.ones(1, 8), 1.0)
    dora = Term(torch.ones(8, 1), torch.ones(1, 32), 1.0, magnitude=torch.ones(32))
    whole, late = ChangedRows(0, 32, Update((32, 8), (term,))), ChangedRows(32, 64, Update((32, 8), (term,)), 1)
    norms = ChangedRows(0, 8, Update((8, 32), (dora,), axis=1))
    assert not list(why_not_kept(quantized, Changes(merges={"w": ((whole,), 8)})))
    wrong = Changes(merges={"w": ((whole, late), 8), "f": ((norms,), 32)}, added={"head": "f", "other": None})
    found = list(why_not_kept(quantized, wrong))
    assert [problem.split(":")[0] for problem in found] == ["w", "f", "head"]
    assert all("Pass dequantize=True" in problem for problem in found)
    assert "along another dimension than the mxfp4 blocks" in found[0]
    assert "the base holds f in fp8 codes" in found[2]
