from __future__ import annotations

import itertools
import json
import logging
import random
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import needs
from faults import adapters as faults
from models import KINDS, Made, save_adapter, save_llama
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import safe_loading
from safe_loading import (
    AdapterError,
    ArgumentError,
    CheckpointError,
    MergeError,
    OutputError,
    PickleRefused,
    load_peft_on_rank,
    merge_lora_checkpoint,
    merge_lora_inplace,
)
from safe_loading._checkpoint.index import read_checkpoint
from safe_loading._merging.disk import write_tensors as blocks

TOKENS = torch.arange(1, 25).reshape(2, 12)


def on_disk(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()}


def tensor_bytes(folder: Path) -> int:
    return sum(info.nbytes for info in read_checkpoint(folder).tensors.values())


def loaded(folder: Path, auto_class: Any = AutoModelForCausalLM) -> Any:
    """The model in the output, which transformers must find complete, with nothing left over."""
    model, info = auto_class.from_pretrained(folder, output_loading_info=True, dtype="auto")
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs")), info
    return model


def reference(base: Path, adapter: Path | list[Path], target: Path, **options: Any) -> Path:
    """What merge_lora_inplace makes of the same: the folder `target`, for a comparison tensor by tensor."""
    adapters = [adapter] if isinstance(adapter, Path) else adapter
    names = {f"a{number}": path for number, path in enumerate(adapters)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = load_peft_on_rank(base, names, **options)
        merged = merge_lora_inplace(model, adapter_names=list(names))
        merged.save_pretrained(target)
    return target


def check_same(base: Path, adapter: Path | list[Path], root: Path, auto_class: Any = AutoModelForCausalLM) -> Any:
    """Merge on disk and in memory: every tensor that both write must be the same to the last bit.

    The check for a new kind of adapter or layout: save a tiny base and an adapter of it, and call this. It also makes
    sure that the names and dtypes are the base's, that nothing changed but what the report calls merged or replaced,
    and that transformers loads the output without a missing or unexpected key. Returns the report.
    """
    report = merge_lora_checkpoint(base, adapter, root / "out")
    options = {} if auto_class is AutoModelForCausalLM else {"auto_class": auto_class}
    expected = on_disk(reference(base, adapter, root / "reference", **options))
    found, before = on_disk(root / "out"), on_disk(base)
    assert found.keys() == before.keys()
    assert expected.keys() <= found.keys()
    merged = {tensor.name for tensor in report.of("merged")}
    for name, tensor in expected.items():
        kept = tensor.dtype == torch.float32 and name not in merged  # as transformers loads some routers
        assert kept or found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name].to(tensor.dtype), tensor), name
    changed = {name for name in found if found[name].dtype != before[name].dtype or not _equal(found, before, name)}
    assert changed == {tensor.name for tensor in (*report.of("merged"), *report.of("replaced"))} - _unmoved(report)
    assert changed
    loaded(root / "out", auto_class)
    return report


def _equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], name: str) -> bool:
    return torch.equal(one[name], other[name])


def _unmoved(report: Any) -> set[str]:
    """Tensors that an adapter brings along as they were (save_embedding_layers does that)."""
    before, after = on_disk(Path(report.base["source"])), on_disk(Path(report.output))
    return {t.name for t in report.of("replaced") if _equal(before, after, t.name)}


# ---------------------------------------------------------------------------------------------------- every kind


DTYPES = (torch.float32, torch.bfloat16)
CHOSEN = dict(zip(KINDS, random.Random(11).choices(DTYPES, k=len(KINDS)), strict=True))  # each kind in one of them


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        pytest.param(kind, dtype, marks=() if CHOSEN[kind] is dtype else pytest.mark.slow)
        for kind, dtype in itertools.product(KINDS, DTYPES)
    ],
)
def test_every_kind_is_bit_for_bit_the_merge_in_memory(
    tmp_path: Path, made: Made, kind: str, dtype: torch.dtype
) -> None:
    base = made.llama(dtype, attention_bias=kind == "trained bias")
    adapter = made.adapter(base, dtype=dtype, **KINDS[kind])
    check_same(base, adapter, tmp_path)


@pytest.mark.parametrize("kind", ["all linear", "dora"])
def test_the_logits_are_those_of_base_and_adapter(tmp_path: Path, made: Made, kind: str) -> None:
    base = made.llama(attention_bias=False)
    adapter = made.adapter(base, dtype=torch.float32, **KINDS[kind])
    merge_lora_checkpoint(base, adapter, tmp_path / "out")
    with torch.no_grad():
        ours = loaded(tmp_path / "out")(input_ids=TOKENS).logits
        theirs = load_peft_on_rank(base, adapter)(input_ids=TOKENS).logits
        plain = AutoModelForCausalLM.from_pretrained(base)(input_ids=TOKENS).logits
    assert torch.allclose(ours, theirs, atol=1e-5)
    assert not torch.allclose(ours, plain, atol=1e-3)


def test_float16_and_a_float32_adapter_on_bfloat16(tmp_path: Path) -> None:
    for name, base_dtype, dtype in (("a", torch.float16, torch.float16), ("b", torch.bfloat16, torch.float32)):
        base = save_llama(tmp_path / name / "base", base_dtype)
        adapter = save_adapter(tmp_path / name / "adapter", base, dtype=dtype, target_modules="all-linear")
        check_same(base, adapter, tmp_path / name)


def test_odd_shapes_and_blocks_of_a_few_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    odd = {"hidden_size": 60, "intermediate_size": 97, "vocab_size": 103, "num_attention_heads": 5, "head_dim": 6}
    base = save_llama(tmp_path / "base", torch.bfloat16, **odd, num_key_value_heads=1)
    config = {"target_modules": "all-linear", "r": 5, "use_dora": True, "dtype": torch.bfloat16}
    adapter = save_adapter(tmp_path / "adapter", base, **config)
    check_same(base, adapter, tmp_path)
    whole = on_disk(tmp_path / "out")
    for number, (size, threads) in enumerate(itertools.product((1, 999, 5000), (1, 3))):
        monkeypatch.setattr(blocks, "BLOCK_BYTES", size)
        merge_lora_checkpoint(base, adapter, tmp_path / str(number), threads=threads)
        assert all(torch.equal(tensor, whole[name]) for name, tensor in on_disk(tmp_path / str(number)).items())


def test_several_adapters_are_summed_before_the_one_rounding(tmp_path: Path) -> None:
    base = save_llama(tmp_path / "base", torch.bfloat16)
    one = save_adapter(tmp_path / "one", base, seed=1, target_modules="all-linear")
    two = save_adapter(tmp_path / "two", base, seed=2, r=2, lora_alpha=3)
    report = check_same(base, [one, two], tmp_path)
    assert [adapter["source"] for adapter in report.adapters] == [str(one), str(two)]
    merge_lora_checkpoint(base, one, tmp_path / "first")
    merge_lora_checkpoint(tmp_path / "first", two, tmp_path / "second")
    after, summed = on_disk(tmp_path / "second"), on_disk(tmp_path / "out")
    assert any(not torch.equal(after[name], summed[name]) for name in after)  # rounded twice


def test_embeddings_that_one_adapter_brings_are_there_where_the_next_one_adapts_them(tmp_path: Path) -> None:
    base = save_llama(tmp_path / "base")
    one, own = save_adapter(tmp_path / "one", base, seed=1), on_disk(base)
    brought = {f"base_model.model.{name}": own[name] * 2 for name in ("model.embed_tokens.weight", "lm_head.weight")}
    file = one / "adapter_model.safetensors"
    save_file({**load_file(file), **brought}, file, metadata={"format": "pt"})
    two = save_adapter(tmp_path / "two", base, seed=2, target_modules=["embed_tokens"])
    text = "model.embed_tokens.weight: it is replaced twice, by different values"  # two has the base's own
    refused(tmp_path, base, [one, two], MergeError, text)
    file = two / "adapter_model.safetensors"
    factors = {name: tensor for name, tensor in load_file(file).items() if ".lora_" in name}
    save_file(factors, file, metadata={"format": "pt"})
    check_same(base, [one, two], tmp_path)


@pytest.mark.parametrize(
    "config", [{}, {"use_dora": True}, {"lora_bias": True}], ids=["plain", "dora in two passes", "lora_bias"]
)
def test_weights_that_are_stored_transposed(tmp_path: Path, config: dict[str, Any]) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"n_embd": 24, "n_layer": 2, "n_head": 3, "vocab_size": 101, "bos_token_id": 1, "eos_token_id": 2}
    GPT2LMHeadModel(GPT2Config(**sizes)).save_pretrained(tmp_path / "base")
    targets = {"target_modules": ["c_attn", "c_fc"], "fan_in_fan_out": True, **config}
    adapter = save_adapter(tmp_path / "adapter", tmp_path / "base", **targets)
    check_same(tmp_path / "base", adapter, tmp_path)


# ------------------------------------------------------------------------------------------- names and layouts


def mixture(folder: Path, kind: str) -> Path:
    import transformers

    sizes: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 101}
    sizes |= {"intermediate_size": 44, "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2}
    if kind == "Mixtral":
        sizes |= {"num_local_experts": 3}
    else:
        sizes |= {"num_experts": 12, "moe_intermediate_size": 20, "head_dim": 8}  # 12: "10" sorts before "2" as text
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**sizes))
    model.save_pretrained(folder, max_shard_size="20KB")
    return folder


@pytest.mark.parametrize("kind", ["Mixtral", "Qwen3Moe"])
def test_a_delta_of_fused_experts_goes_to_the_experts_on_disk(tmp_path: Path, kind: str) -> None:
    base = mixture(tmp_path / "base", kind)
    names = read_checkpoint(base).tensors
    assert any(".experts.2." in name for name in names)
    targets = {"target_modules": ["q_proj"], "target_parameters": ["gate_up_proj", "down_proj"]}
    adapter = save_adapter(tmp_path / "adapter", base, **targets)
    report = check_same(base, adapter, tmp_path)
    experts = {name for name in names if ".experts." in name}
    assert experts <= {tensor.name for tensor in report.of("merged")}


@needs("peft", "0.20")
@needs("transformers", "5.10")
def test_an_adapter_of_single_experts_goes_to_the_experts_on_disk(tmp_path: Path) -> None:
    base = mixture(tmp_path / "base", "Mixtral")
    plain = save_adapter(tmp_path / "plain", base, target_modules=["q_proj"])
    shapes = {"w1": (32, 44), "w3": (32, 44), "w2": (44, 32)}
    experts = [f"base_model.model.model.layers.{n}.block_sparse_moe.experts.{e}" for n in (0, 1) for e in range(3)]
    torch.manual_seed(1)

    def add(tensors: faults.Tensors) -> None:
        for expert, (name, (inputs, outputs)) in itertools.product(experts, shapes.items()):
            tensors[f"{expert}.{name}.lora_A.weight"] = torch.randn(4, inputs) / 8
            tensors[f"{expert}.{name}.lora_B.weight"] = torch.randn(outputs, 4) / 8

    targets = ["q_proj", *shapes]
    adapter = faults.edited(
        plain, tmp_path / "adapter", tensors=add, config=lambda config: config.update(target_modules=targets)
    )
    check_same(base, adapter, tmp_path)
    before, after, factors = on_disk(base), on_disk(tmp_path / "out"), load_file(adapter / faults.WEIGHTS)
    for expert, name in itertools.product(experts, shapes):
        key = f"{expert.removeprefix('base_model.model.')}.{name}"
        a, b = (factors[f"{expert}.{name}.lora_{x}.weight"].double() for x in "AB")
        wanted = (before[f"{key}.weight"].double() + 2 * b @ a).float()
        assert torch.equal(after[f"{key}.weight"], wanted), key


def llava(folder: Path, layout: str) -> Path:
    """A tiny Llava: in the names of the published checkpoints, which are saved to this day, or in those at run time."""
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    text = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    vision = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlavaConfig(
        text_config=LlamaConfig(**text, num_key_value_heads=2, vocab_size=103),
        vision_config=CLIPVisionConfig(**vision, image_size=16, patch_size=8, projection_dim=8),
        image_token_index=102,
    )
    torch.manual_seed(0)
    model = LlavaForConditionalGeneration(config)
    model.save_pretrained(folder)
    if layout == "run time":
        save_file(model.state_dict(), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("layout", ["published", "run time"])
def test_a_vision_model_under_other_names(tmp_path: Path, layout: str) -> None:
    from transformers import AutoModelForImageTextToText

    base = llava(tmp_path / "base", layout)
    names = set(read_checkpoint(base).tensors)
    assert ("lm_head.weight" in names) == (layout == "run time")
    assert ("language_model.lm_head.weight" in names) == (layout == "published")
    adapter = save_adapter(
        tmp_path / "adapter",
        base,
        auto_class=AutoModelForImageTextToText,
        task_type=None,
        target_modules=["q_proj", "down_proj", "linear_1"],
    )
    report = merge_lora_checkpoint(base, adapter, tmp_path / "out")
    reference(base, adapter, tmp_path / "reference", auto_class=AutoModelForImageTextToText)
    ours = loaded(tmp_path / "out", AutoModelForImageTextToText).state_dict()
    theirs = loaded(tmp_path / "reference", AutoModelForImageTextToText).state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
    assert set(on_disk(tmp_path / "out")) == names
    assert len(report.of("merged")) == 2 * 3 + 1  # q_proj of both towers (text: down_proj too), and linear_1


def test_tensors_that_the_class_does_not_know_pass_through(tmp_path: Path) -> None:
    base = save_llama(tmp_path / "base")
    adapter = save_adapter(tmp_path / "adapter", base)
    shard = sorted(base.glob("*.safetensors"))[-1]
    tensors = {**load_file(shard), "mtp.layers.0.q_proj.weight": torch.randn(7, 5), "mtp.empty": torch.zeros(0, 3)}
    save_file(tensors, shard, metadata={"format": "pt", "by": "hand"})
    index = base / "model.safetensors.index.json"
    document = json.loads(index.read_text())
    document["weight_map"] |= dict.fromkeys(tensors, shard.name)
    document["metadata"]["total_size"] += 7 * 5 * 4
    index.write_text(json.dumps(document))
    merge_lora_checkpoint(base, adapter, tmp_path / "out")
    assert torch.equal(on_disk(tmp_path / "out")["mtp.layers.0.q_proj.weight"], tensors["mtp.layers.0.q_proj.weight"])
    assert (tmp_path / "out" / index.name).read_bytes() == index.read_bytes()
    assert read_checkpoint(tmp_path / "out").headers[shard.name].metadata == {"format": "pt", "by": "hand"}


# ------------------------------------------------------------------------------------------------------ ties


@pytest.mark.parametrize("kind", ["all linear", "trainable tokens"])
def test_tied_weights_stay_tied(tmp_path: Path, kind: str) -> None:
    base = save_llama(tmp_path / "base", tie_word_embeddings=True)
    adapter = save_adapter(tmp_path / "adapter", base, **KINDS[kind])
    check_same(base, adapter, tmp_path)
    assert "lm_head.weight" not in on_disk(tmp_path / "out")
    model = loaded(tmp_path / "out")
    assert model.lm_head.weight is model.model.embed_tokens.weight


# ------------------------------------------------------------------------------------------------ files


def test_headers_names_and_other_files_are_the_base_s(tmp_path: Path) -> None:
    base = save_llama(tmp_path / "base", torch.bfloat16)
    adapter = save_adapter(tmp_path / "adapter", base, target_modules=["q_proj"], layers_to_transform=[0])
    extra = {"tokenizer.json": b"{}", "LICENSE": b"mit", "chat_template.jinja": b"{{ x }}", "modeling_x.py": b"x = 1"}
    extra["adapter_blocks.py"] = b"x = 1"  # code that modeling_x.py may import
    left = {"training_args.bin": b"x", "optimizer.pt": b"x", "adapter_config.json": b"{}", "model.gguf": b"GGUF"}
    left |= dict.fromkeys(["model.onnx", "model.onnx_data", "model.tflite", "__0_0.distcp"], b"x")
    for name, data in {**extra, **left, ".gitattributes": b"x", "additional_chat_templates/a.jinja": b"a"}.items():
        (base / name).parent.mkdir(exist_ok=True)
        (base / name).write_bytes(data)
    report = merge_lora_checkpoint(base, adapter, tmp_path / "out")
    assert set(report.left_out) == set(left)
    for name in (*extra, "config.json", "generation_config.json", "additional_chat_templates/a.jinja"):
        assert (tmp_path / "out" / name).read_bytes() == (base / name).read_bytes()
    assert not [name for name in (*left, ".gitattributes") if (tmp_path / "out" / name).exists()]
    touched = {tensor.file for tensor in report.of("merged")}
    shards = read_checkpoint(base).headers
    assert 0 < len(touched) < len(shards)
    for name, header in shards.items():
        ours, theirs = (tmp_path / "out" / name).read_bytes(), header.path.read_bytes()
        assert ours[: header.data_start] == theirs[: header.data_start]
        assert (ours == theirs) == (name not in touched)


def test_a_replaced_tensor_of_another_dtype_gets_a_header_of_its_own(tmp_path: Path) -> None:
    base = save_llama(tmp_path / "base", torch.bfloat16)
    adapter = save_adapter(tmp_path / "adapter", base, dtype=torch.float32, modules_to_save=["lm_head"])
    merge_lora_checkpoint(base, adapter, tmp_path / "out")
    in_memory = on_disk(reference(base, adapter, tmp_path / "reference"))  # the head in the dtype of the base
    found = on_disk(tmp_path / "out")
    assert found.keys() == in_memory.keys()
    assert all(torch.equal(tensor, found[name].to(tensor.dtype)) for name, tensor in in_memory.items())
    assert torch.equal(loaded(tmp_path / "out").lm_head.weight, in_memory["lm_head.weight"])
    out = read_checkpoint(tmp_path / "out")  # every offset fits
    assert out.tensors["lm_head.weight"].dtype == "F32"
    assert out.index.total_size == tensor_bytes(tmp_path / "out") == tensor_bytes(base) + 101 * 32 * 2
    assert not out.findings


def test_a_base_of_one_file(tmp_path: Path) -> None:
    save_llama(tmp_path / "shards", torch.bfloat16)
    AutoModelForCausalLM.from_pretrained(tmp_path / "shards").save_pretrained(tmp_path / "base")
    assert (tmp_path / "base" / "model.safetensors").is_file()
    adapter = save_adapter(tmp_path / "adapter", tmp_path / "base", dtype=torch.bfloat16)
    check_same(tmp_path / "base", adapter, tmp_path)


def test_the_report_names_every_tensor_and_its_hash(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    import xxhash

    base = save_llama(tmp_path / "base")
    adapter = save_adapter(tmp_path / "adapter", base)
    with caplog.at_level(logging.INFO, "safe_loading"):
        report = merge_lora_checkpoint(base, adapter, tmp_path / "out")
    assert str(report) in caplog.text
    out = read_checkpoint(tmp_path / "out")
    assert {tensor.name for tensor in report.tensors} == set(out.tensors)
    document = json.loads((tmp_path / "out" / "merge_report.json").read_text())
    for tensor in report.tensors:
        info = out.tensors[tensor.name]
        data = out.file_of[tensor.name].read_bytes()[info.start : info.stop]
        found = xxhash.xxh3_128(data).hexdigest()
        assert found == tensor.xxh3_128 == document["tensors"][tensor.name]["xxh3_128"]
        assert tensor.bytes == info.nbytes
    assert report.bytes_read == tensor_bytes(base)
    assert report.bytes_written == sum(header.nbytes for header in out.headers.values())
    assert len(report.of("merged")) == 9
    assert json.loads(report.to_json())["resumed"] == []
    assert "<table>" in report._repr_html_()
    bare = merge_lora_checkpoint(base, adapter, tmp_path / "bare", verify=False)
    assert {tensor.xxh3_128 for tensor in bare.tensors} == {None}
    repeat = merge_lora_checkpoint(base, adapter, tmp_path / "again", threads=3)
    assert repeat.tensors == report.tensors
    for path in (tmp_path / "out").iterdir():
        assert (tmp_path / "again" / path.name).read_bytes() == path.read_bytes()


def test_the_base_and_the_adapter_are_not_touched(tmp_path: Path) -> None:
    base = save_llama(tmp_path / "base")
    adapter = save_adapter(tmp_path / "adapter", base)
    files = {path: path.read_bytes() for path in (*base.iterdir(), *adapter.iterdir())}
    for path in files:
        path.chmod(0o444)
    threads = torch.get_num_threads()
    merge_lora_checkpoint(base, adapter, tmp_path / "out")
    assert {path: path.read_bytes() for path in (*base.iterdir(), *adapter.iterdir())} == files
    assert torch.get_num_threads() == threads


# ------------------------------------------------------------------------------------------------ what is refused


def refused(
    tmp_path: Path, base: Path, adapter: Path | list[Path], kind: type[Exception], text: str, **options: Any
) -> None:
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(kind, match=text):
        merge_lora_checkpoint(base, adapter, options.pop("output", tmp_path / "out"), **options)
    assert sorted(path.name for path in tmp_path.iterdir()) == before


@pytest.mark.parametrize("start", ["corda", "lora_ga", "lora-ga", "pissa_niter_4"])
def test_a_start_that_changed_the_base_by_data_or_chance_is_refused(
    tmp_path: Path, tiny_llama: Path, tiny_adapter: Path, start: str
) -> None:
    adapter = faults.edited(tiny_adapter, tmp_path / "adapter", config=lambda c: c.update(init_lora_weights=start))
    refused(tmp_path, tiny_llama, adapter, MergeError, f"init_lora_weights='{start}'.*path_initial_model_for")


def test_what_is_no_safe_or_plain_base_is_refused(tmp_path: Path, tiny_llama: Path, tiny_adapter: Path) -> None:
    base = Path(shutil.copytree(tiny_llama, tmp_path / "base"))
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "gptq"}}))
    refused(tmp_path, base, tiny_adapter, CheckpointError, r"delete quantization_config from config\.json")
    shard = next(base.glob("*.safetensors"))
    save_file({name: tensor.int() for name, tensor in load_file(shard).items()}, shard, metadata={"format": "pt"})
    refused(tmp_path, base, tiny_adapter, MergeError, r"quantized \(gptq\).*merge_lora_checkpoint\(that_base")
    (base / "config.json").write_text(json.dumps(config))
    for path in base.glob("*.safetensors*"):
        path.unlink()
    torch.save({}, base / "pytorch_model.bin")
    refused(tmp_path, base, tiny_adapter, PickleRefused, "python -c")


def test_arguments_and_paths_are_refused(tmp_path: Path, tiny_llama: Path, tiny_adapter: Path) -> None:
    refused(tmp_path, tiny_llama, tiny_adapter, ArgumentError, "threads=0", threads=0)
    with pytest.raises(ArgumentError, match="empty"):
        merge_lora_checkpoint(tiny_llama, [], tmp_path / "out")
    for output in (tiny_llama, tiny_llama / "merged", tiny_llama.parent):
        refused(tmp_path, tiny_llama, tiny_adapter, OutputError, "the base", output=output, overwrite=True)
    refused(tmp_path, tiny_llama, tiny_adapter, OutputError, "adapter 'default' itself", output=tiny_adapter)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    refused(tmp_path, tiny_llama, tiny_adapter, OutputError, "overwrite=True", output=tmp_path / "full")
    merge_lora_checkpoint(tiny_llama, tiny_adapter, tmp_path / "full", overwrite=True)
    assert not (tmp_path / "full" / "x").exists()


def test_an_adapter_of_another_base_is_refused_with_all_its_reasons(tmp_path: Path, tiny_llama: Path) -> None:
    other = save_llama(tmp_path / "other", hidden_size=16)
    adapter = save_adapter(tmp_path / "adapter", other)
    refused(tmp_path, tiny_llama, adapter, AdapterError, "the file has")


def test_keys_that_find_no_module_are_named_with_those_that_are_near(
    tmp_path: Path, tiny_llama: Path, tiny_adapter: Path
) -> None:
    names = {"layers.0.self_attn.q_proj": "layers.0.self_attn.q_porj", "layers.1.": "layers.11."}

    def rename(tensors: dict[str, torch.Tensor]) -> None:
        for key in list(tensors):
            for old, new in names.items():
                if old in key:
                    tensors[key.replace(old, new)] = tensors.pop(key)

    adapter = faults.edited(tiny_adapter, tmp_path / "adapter", tensors=rename)
    near = r"q_porj' \(nearest: model.layers.0.self_attn.q_proj, .*'model.layers.11.\S+ \(nearest: model.layers.1, "
    refused(tmp_path, tiny_llama, adapter, AdapterError, f"(?s){near}")


def test_numbers_of_eight_bits_without_scales_are_refused_and_widened_as_the_error_says(tmp_path: Path) -> None:
    base = save_llama(tmp_path / "base")
    adapter = save_adapter(tmp_path / "adapter", base)
    for path in base.glob("*.safetensors"):
        tensors = {n: t.to(torch.float8_e4m3fn) if "q_proj" in n else t for n, t in load_file(path).items()}
        save_file(tensors, path, metadata={"format": "pt"})
    refused(tmp_path, base, adapter, MergeError, r"q_proj.weight: it is F8_E4M3 on disk.*Widen the base first:")
    AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16).save_pretrained(tmp_path / "new_base")
    check_same(tmp_path / "new_base", adapter, tmp_path)


def test_a_merged_value_that_overflows_is_refused(tmp_path: Path) -> None:
    base = save_llama(tmp_path / "base", torch.float16)
    adapter = save_adapter(tmp_path / "adapter", base, target_modules=["q_proj"])

    def large(tensors: faults.Tensors) -> None:
        tensors["base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight"] *= 1e7

    edited = faults.edited(adapter, tmp_path / "large", tensors=large)
    refused(tmp_path, base, edited, MergeError, r"layers.1.self_attn.q_proj.weight.*beyond the largest")


def test_there_is_one_arithmetic() -> None:
    """The merge on disk adds nothing itself: it slices, and calls what the merge in memory calls.

    `verify_merge`, which writes nothing, carries out and bounds what other merges round by arithmetic of its own.
    """
    files = [*(Path(safe_loading.__file__).parent / "_merging" / "disk").glob("*.py")]
    assert files
    for path in files:
        if path.name.startswith("compare_"):  # of verify_merge
            continue
        text = path.read_text()
        assert not [word for word in ("addmm", "matmul", "einsum", " @ ", ".add_(") if word in text], path


def test_the_command_line(
    tmp_path: Path, tiny_llama: Path, tiny_adapter: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from safe_loading.__main__ import main

    command = ["merge", str(tiny_llama), str(tiny_adapter), str(tmp_path / "out")]
    assert main([*command, "--json", "--threads", "1"]) == 0
    assert json.loads(capsys.readouterr().out)["output"] == str(tmp_path / "out")
    assert main(command) == 1
    assert "is not empty" in capsys.readouterr().err
    assert main([*command, "--overwrite", "--no-verify", "--no-resume"]) == 0
    assert "merged " in capsys.readouterr().out
