"""Right merges are told from wrong ones, and wrong ones are named: `verify_merge` on seeded mistakes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from engines import needs
from models import Made, save_adapter, save_llama, save_tokenizer
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForCausalLM

import safe_loading
from safe_loading import ArgumentError, MergeCheck, merge_lora_checkpoint, verify_merge
from safe_loading.__main__ import main
from safe_loading._merging.disk.compare_tensors import TensorComparer

Tensors = dict[str, torch.Tensor]
Q, UP, GATE = "model.layers.1.self_attn.q_proj.weight", "mlp.up_proj.weight", "mlp.gate_proj.weight"
DOWN, EMBED, HEAD = "model.layers.0.mlp.down_proj.weight", "model.embed_tokens.weight", "lm_head.weight"
LINEAR = {"target_modules": "all-linear", "r": 4, "lora_alpha": 8}


def tensors_of(folder: Path) -> Tensors:
    return {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()}


def rewritten(folder: Path, target: Path, tensors: Tensors) -> Path:
    """A copy of a folder with other tensors, all in one file."""
    shutil.copytree(folder, target, ignore=shutil.ignore_patterns("*.safetensors*", "merge_report.json"))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, target / "model.safetensors")
    return target


def codes(check: MergeCheck) -> set[str]:
    return {finding.code for finding in check.findings if finding.severity != "info"}


def verdicts(check: MergeCheck, *but: str) -> set[str]:
    return {tensor.verdict for tensor in check.tensors} - set(but)


# ------------------------------------------------------------------------------------------------- right merges


def by_peft(base: Path, adapter: Path, target: Path, loaded: torch.dtype | str = "auto", **options: Any) -> Path:
    """Merge as plain peft does, and save."""
    dtype = options.pop("cast", None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=loaded), adapter, **options)
        (model.to(dtype) if dtype else model).merge_and_unload().save_pretrained(target)
    return target


def by_sums(base: Path, adapter: Path, target: Path, *, wide: bool) -> Path:
    """Merge tensor by tensor: a sum in float32 with one rounding, or all in the dtype of the base."""
    config = json.loads((adapter / "adapter_config.json").read_text())
    factors, tensors = load_file(adapter / "adapter_model.safetensors"), tensors_of(base)
    for name, weight in tensors.items():
        module = f"base_model.model.{name.removesuffix('.weight')}.lora_"
        if f"{module}A.weight" in factors:
            dtype = torch.float32 if wide else weight.dtype
            a, b = factors[f"{module}A.weight"].to(dtype), factors[f"{module}B.weight"].to(dtype)
            tensors[name] = (weight.to(dtype) + (b @ a) * (config["lora_alpha"] / config["r"])).to(weight.dtype)
    return rewritten(base, target, tensors)


MERGERS: dict[str, Callable[[Path, Path, Path], object]] = {
    "this package": lambda base, adapter, target: merge_lora_checkpoint(base, adapter, target),
    "peft": by_peft,
    "peft in the dtype of the base": lambda base, adapter, target: by_peft(
        base, adapter, target, autocast_adapter_dtype=False, cast=next(iter(tensors_of(base).values())).dtype
    ),
    "shard by shard in 16 bits": lambda base, adapter, target: by_sums(base, adapter, target, wide=False),
    "a float32 sum, rounded once": lambda base, adapter, target: by_sums(base, adapter, target, wide=True),
}


@pytest.mark.parametrize("merger", MERGERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_right_merges_raise_no_alarm(made: Made, tmp_path: Path, merger: str, dtype: torch.dtype) -> None:
    base = made.llama(dtype)
    adapter = made.adapter(base, **LINEAR)
    MERGERS[merger](base, adapter, tmp_path / "merged")
    check = verify_merge(base, adapter, tmp_path / "merged")
    assert check.ok, str(check)
    assert not codes(check), str(check)
    right = {"exact"} if merger == "this package" else {"exact", "rounding"}
    assert verdicts(check) <= right
    assert len(check.tensors) == len(tensors_of(base))
    assert check.of("exact")


@pytest.mark.each_value
@pytest.mark.parametrize(
    "lora",
    [
        {"use_dora": True},
        {"use_rslora": True},
        {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"v_proj": 3}},
        {"modules_to_save": ["lm_head"]},
        {"bias": "lora_only"},
        {"trainable_token_indices": [1, 5, 7]},
        {"target_modules": ["embed_tokens", "lm_head", "q_proj"]},
        {"init_lora_weights": "pissa"},
        {"target_modules": ["embed_tokens", "q_proj"], "ensure_weight_tying": True},
        {"target_modules": ["lm_head", "q_proj"]},
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_kinds_of_adapters_that_were_merged_right(made: Made, tmp_path: Path, lora: Any, dtype: torch.dtype) -> None:
    tied = {"tie_word_embeddings": True} if "ensure_weight_tying" in lora or lora.get("bias") else {}
    base = made.llama(dtype, attention_bias=True, **tied)
    adapter = made.adapter(base, dtype=dtype, **lora)
    merge_lora_checkpoint(base, adapter, tmp_path / "ours")
    check = verify_merge(base, adapter, tmp_path / "ours")
    assert check.ok, str(check)
    assert not codes(check)
    assert verdicts(check) == {"exact"}
    # peft does not undo what the init subtracted from another base, and adds to a tied weight once for each name.
    if lora.get("init_lora_weights") == "pissa" or "ensure_weight_tying" in lora:
        return
    in_16_bits = {"autocast_adapter_dtype": False, "cast": dtype}
    for number, options in enumerate(({}, in_16_bits) if dtype is torch.bfloat16 else ({},)):
        check = verify_merge(base, adapter, by_peft(base, adapter, tmp_path / f"peft {number}", **options))
        assert check.ok, str(check)
        assert not codes(check), str(check)


@pytest.mark.each_value
@pytest.mark.parametrize("dora", [False, True], ids=["LoRA", "DoRA"])
@pytest.mark.parametrize("part", [1.0, 0.1, 0.01])
@pytest.mark.parametrize(
    ("stored", "loaded"),
    [
        (torch.float32, torch.bfloat16),
        (torch.float16, torch.bfloat16),
        (torch.float32, torch.float16),
        (torch.bfloat16, torch.float16),
    ],
    ids=str,
)
def test_a_base_that_is_loaded_in_another_dtype_is_rounded_before_the_sum(
    tmp_path: Path, stored: torch.dtype, loaded: torch.dtype, part: float, dora: bool
) -> None:
    """The usual road: `from_pretrained(dtype=)`, `merge_and_unload`, `save_pretrained`."""
    base = save_llama(tmp_path / "base", stored)
    adapter = save_adapter(tmp_path / "adapter", base, use_dora=dora)
    path = adapter / "adapter_model.safetensors"
    factors = {name: tensor * part if "lora_B" in name else tensor for name, tensor in load_file(path).items()}
    save_file(factors, path, metadata={"format": "pt"})
    merged = by_peft(base, adapter, tmp_path / "merged", loaded)
    check = verify_merge(base, adapter, merged)
    assert check.ok, str(check)
    assert verdicts(check) <= {"exact", "rounding"}
    if part > 0.05 and not dora:  # a smaller update is lost in the rounding itself
        AutoModelForCausalLM.from_pretrained(base, dtype=loaded).save_pretrained(tmp_path / "without")
        assert "update-absent" in codes(verify_merge(base, adapter, tmp_path / "without"))


@pytest.mark.parametrize(("r", "alpha"), [(1, 64), (4, 1024)])
def test_products_below_the_normal_numbers_of_float16_are_rounded_by_more_than_their_share(
    made: Made, tmp_path: Path, r: int, alpha: int
) -> None:
    """The product is rounded before it is scaled, so that the scaling multiplies what a subnormal number loses."""
    base = made.llama(torch.float16)
    adapter = tmp_path / "adapter"
    shutil.copytree(made.adapter(base, target_modules="all-linear", r=r, lora_alpha=alpha), adapter)
    path = adapter / "adapter_model.safetensors"
    factors = {name: tensor / alpha if "lora_B" in name else tensor for name, tensor in load_file(path).items()}
    save_file(factors, path, metadata={"format": "pt"})
    for number, options in enumerate(({}, {"autocast_adapter_dtype": False, "cast": torch.float16})):
        check = verify_merge(base, adapter, by_peft(base, adapter, tmp_path / str(number), **options))
        assert check.ok, str(check)
        assert not codes(check), str(check)
    wrong = rewritten(base, tmp_path / "wrong", tensors_of(base))
    assert codes(verify_merge(base, adapter, wrong)) <= {"update-absent", "values-differ", "update-scaled"}
    assert not verify_merge(base, adapter, wrong).ok


def test_several_adapters_with_weights(made: Made, tmp_path: Path) -> None:
    base = made.llama(torch.bfloat16)
    adapters = [made.adapter(base, seed=seed) for seed in (1, 2)]
    merge_lora_checkpoint(base, adapters, tmp_path / "merged", adapter_weights=[0.5, 2.0])
    assert verify_merge(base, adapters, tmp_path / "merged", adapter_weights=[0.5, 2.0]).ok
    check = verify_merge(base, adapters, tmp_path / "merged")
    assert not check.ok
    assert codes(check) <= {"update-scaled", "values-differ"}


def test_another_dtype_of_the_output_is_judged_in_it(made: Made, tmp_path: Path) -> None:
    base = made.llama(torch.float32)
    adapter = made.adapter(base, **LINEAR)
    merge_lora_checkpoint(base, adapter, tmp_path / "merged", dtype=torch.bfloat16)
    check = verify_merge(base, adapter, tmp_path / "merged")
    assert check.ok
    assert verdicts(check) == {"exact"}
    assert "merged-dtype" in {finding.code for finding in check.findings}


def test_a_tied_head_may_be_left_out_and_must_not_be_forgotten(tmp_path: Path) -> None:
    base = save_llama(tmp_path / "base", torch.bfloat16, tie_word_embeddings=True)
    adapter = save_adapter(tmp_path / "adapter", base)
    tensors = tensors_of(base)
    assert HEAD not in tensors
    both = rewritten(base, tmp_path / "both", {**tensors, HEAD: tensors[EMBED].clone()})
    merge_lora_checkpoint(both, adapter, tmp_path / "merged")
    merged = tensors_of(tmp_path / "merged")
    del merged[HEAD]
    check = verify_merge(both, adapter, rewritten(tmp_path / "merged", tmp_path / "without", merged))
    assert check.ok
    assert [tensor.name for tensor in check.of("left out")] == [HEAD]
    extra = rewritten(tmp_path / "merged", tmp_path / "extra", {**merged, HEAD: merged[EMBED].clone()})
    assert verify_merge(base, adapter, extra).ok
    broken = rewritten(tmp_path / "merged", tmp_path / "broken", {**merged, HEAD: merged[EMBED] * 2})
    check = verify_merge(base, adapter, broken)
    assert [tensor.name for tensor in check.of("other")] == [HEAD]
    config = json.loads((tmp_path / "without" / "config.json").read_text())
    (tmp_path / "without" / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    assert [tensor.name for tensor in verify_merge(both, adapter, tmp_path / "without").of("missing")] == [HEAD]


# ------------------------------------------------------------------------------------------------- wrong merges


def exact_update(base: Tensors, adapter: Path, name: str) -> torch.Tensor:
    factors = load_file(adapter / "adapter_model.safetensors")
    module = f"base_model.model.{name.removesuffix('.weight')}.lora_"
    a, b = factors[f"{module}A.weight"].double(), factors[f"{module}B.weight"].double()
    return (b @ a) * 2.0  # lora_alpha / r


def with_update(base: Tensors, adapter: Path, change: Callable[[torch.Tensor], torch.Tensor], *names: str) -> Tensors:
    """The base's tensors plus a changed update, rounded once; of all layers that have one where none is named."""
    factors = load_file(adapter / "adapter_model.safetensors")
    every = [n for n in base if f"base_model.model.{n.removesuffix('.weight')}.lora_A.weight" in factors]
    return {
        name: (base[name].double() + change(exact_update(base, adapter, name))).to(base[name].dtype)
        for name in names or every
    }


@pytest.mark.parametrize("tied", [True, False])
def test_an_adapter_for_features_may_be_merged_into_the_body_alone(tmp_path: Path, tied: bool) -> None:
    base = save_llama(tmp_path / "base", tie_word_embeddings=tied)
    adapter = save_adapter(tmp_path / "adapter", base, auto_class=AutoModel, task_type="FEATURE_EXTRACTION")
    merged: Any = PeftModel.from_pretrained(AutoModel.from_pretrained(base), adapter)
    merged.merge_and_unload().save_pretrained(tmp_path / "merged")
    check = verify_merge(base, adapter, tmp_path / "merged")
    assert check.ok, str(check)


@needs("transformers", "5.10")
def test_the_text_part_alone_may_be_merged(tmp_path: Path) -> None:
    tiny_models.saved("Qwen3_5ForConditionalGeneration", tmp_path / "base")
    adapter = save_adapter(tmp_path / "adapter", tmp_path / "base")
    by_peft(tmp_path / "base", adapter, tmp_path / "merged")
    check = verify_merge(tmp_path / "base", adapter, tmp_path / "merged")
    assert check.ok, str(check)
    assert "merged-left-out" in {finding.code for finding in check.findings}  # the tower


def test_a_merge_in_16_bits_that_is_stored_in_32_is_told(made: Made, tmp_path: Path) -> None:
    base = made.llama(torch.float32)
    adapter = made.adapter(base, **LINEAR)
    merge_lora_checkpoint(base, adapter, tmp_path / "right")
    right = tensors_of(tmp_path / "right")
    for dtype in (torch.float16, torch.bfloat16):
        narrow = {name: tensor.to(dtype).float() for name, tensor in right.items()}
        check = verify_merge(base, adapter, rewritten(tmp_path / "right", tmp_path / str(dtype), narrow))
        assert codes(check) == {"values-narrowed"}
        assert check.ok
        assert {tensor.name for tensor in check.of("narrowed")} == {n for n in right if "norm" not in n}


def test_missing_and_extra_tensors(made: Made, tmp_path: Path) -> None:
    base = made.llama(torch.bfloat16)
    adapter = made.adapter(base, **LINEAR)
    merge_lora_checkpoint(base, adapter, tmp_path / "right")
    right = tensors_of(tmp_path / "right")
    del right[HEAD]
    folder = rewritten(tmp_path / "right", tmp_path / "wrong", {**right, "visual.weight": torch.ones(3)})
    check = verify_merge(base, adapter, folder)
    assert [tensor.name for tensor in check.of("missing")] == [HEAD]
    assert [tensor.name for tensor in check.of("extra")] == ["visual.weight"]
    assert codes(check) >= {"merged-missing", "merged-extra"}
    messages = [finding.message for finding in check.findings]
    assert "1 tensor is missing." in messages
    assert "1 tensor is neither of the base nor of the adapter." in messages
    assert not check.ok


def test_a_stale_shard_is_named(made: Made, tmp_path: Path) -> None:
    base = made.llama(torch.bfloat16)
    adapter = made.adapter(base, **LINEAR)
    merge_lora_checkpoint(base, adapter, tmp_path / "wrong")
    shard = sorted((tmp_path / "wrong").glob("model-*.safetensors"))[1].name
    shutil.copyfile(base / shard, tmp_path / "wrong" / shard)
    check = verify_merge(base, adapter, tmp_path / "wrong")
    (finding,) = (finding for finding in check.findings if finding.severity == "error")
    assert finding.code == "update-absent"
    assert f"all are in {shard}" in finding.message
    merge_lora_checkpoint(base, adapter, tmp_path / "wrong", overwrite=True)
    assert verify_merge(base, adapter, tmp_path / "wrong").ok


def test_a_shard_of_another_run_is_named(made: Made, tmp_path: Path) -> None:
    base = made.llama(torch.bfloat16)
    adapter, other = made.adapter(base, **LINEAR), made.adapter(base, seed=9, **LINEAR)
    merge_lora_checkpoint(base, adapter, tmp_path / "wrong")
    merge_lora_checkpoint(base, other, tmp_path / "other")
    shard = sorted((tmp_path / "wrong").glob("model-*.safetensors"))[1].name
    shutil.copyfile(tmp_path / "other" / shard, tmp_path / "wrong" / shard)
    check = verify_merge(base, adapter, tmp_path / "wrong")
    (finding,) = (finding for finding in check.findings if finding.severity == "error")
    assert finding.code == "values-differ"
    assert f"all are in {shard}" in finding.message


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_base_and_merge_in_each_other_s_place_are_told(made: Made, tmp_path: Path, dtype: torch.dtype) -> None:
    """To merge again over "merged" would overwrite the base."""
    base = made.llama(dtype)
    adapter = made.adapter(base, **LINEAR)
    merge_lora_checkpoint(base, adapter, tmp_path / "merged")
    (finding,) = verify_merge(tmp_path / "merged", adapter, base).findings
    assert finding.fix.startswith("pass the base first and the merged folder last")
    assert verify_merge(base, adapter, tmp_path / "merged").ok


def test_wrong_rows_that_follow_one_another_are_told_by_their_ends(made: Made, tmp_path: Path) -> None:
    base = made.llama()
    adapter = made.adapter(base, **LINEAR)
    merge_lora_checkpoint(base, adapter, tmp_path / "right")
    right = tensors_of(tmp_path / "right")
    name = next(key for key in right if "q_proj" in key)
    right[name][3:7] = right[name][3:7] + 1
    check = verify_merge(base, adapter, rewritten(tmp_path / "right", tmp_path / "wrong", right))
    assert f"({name}: rows 3 to 6)" in check.findings[0].message


def test_a_whole_number_that_differs_is_told_without_values(made: Made, tmp_path: Path) -> None:
    base = rewritten(made.llama(), tmp_path / "base", {**tensors_of(made.llama()), "steps": torch.arange(3)})
    adapter = made.adapter(made.llama(), **LINEAR)
    merge_lora_checkpoint(base, adapter, tmp_path / "ours")
    changed = {**tensors_of(tmp_path / "ours"), "steps": torch.tensor([0, 1, 5])}
    check = verify_merge(base, adapter, rewritten(tmp_path / "ours", tmp_path / "merged", changed))
    assert [(tensor.name, tensor.detail) for tensor in check.of("other")] == [("steps", "")]


def test_a_rank_pattern_that_was_not_heeded_is_a_factor(made: Made, tmp_path: Path) -> None:
    base = made.llama(torch.bfloat16)
    adapter = made.adapter(base, rank_pattern={"q_proj": 2}, **LINEAR)
    merge_lora_checkpoint(base, adapter, tmp_path / "right")
    right, before = tensors_of(tmp_path / "right"), tensors_of(base)
    every = [name for name in before if name.endswith("q_proj.weight")]
    wrong = {**right, **with_update(before, adapter, lambda update: update, *every)}  # alpha / r of the others
    check = verify_merge(base, adapter, rewritten(tmp_path / "right", tmp_path / "wrong", wrong))
    assert codes(check) == {"update-scaled"}
    assert {tensor.name for tensor in check.of("scaled")} == set(every)
    for tensor in check.of("scaled"):
        assert tensor.scale == pytest.approx(0.5, rel=0.02)


def test_the_files_beside_the_weights(made: Made, tmp_path: Path) -> None:
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    shutil.copytree(made.llama(torch.bfloat16), base)
    save_tokenizer(base)
    (base / "generation_config.json").write_text('{"do_sample": true}')
    shutil.copytree(made.adapter(made.llama(torch.bfloat16), **LINEAR), adapter)
    shutil.copyfile(base / "tokenizer.json", adapter / "tokenizer.json")
    settings = json.loads((base / "tokenizer_config.json").read_text())
    (adapter / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": "{{ messages }}"}))
    wrong = tmp_path / "wrong"
    merge_lora_checkpoint(base, adapter, wrong)
    assert not codes(verify_merge(base, adapter, wrong))
    shutil.copyfile(base / "tokenizer_config.json", wrong / "tokenizer_config.json")
    (wrong / "generation_config.json").unlink()
    config = json.loads((wrong / "config.json").read_text())
    changed = {"vocab_size": 7, "quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}
    (wrong / "config.json").write_text(json.dumps({**config, **changed}))
    found = codes(verify_merge(base, adapter, wrong))
    assert found >= {"merged-tokenizer-of-base", "merged-files-lost", "merged-config", "quantization-left-over"}
    shutil.copyfile(adapter / "tokenizer_config.json", wrong / "tokenizer_config.json")
    shutil.copyfile(base / "generation_config.json", wrong / "generation_config.json")
    (wrong / "config.json").write_text(json.dumps(config))
    assert not codes(verify_merge(base, adapter, wrong))


def test_a_stale_index_and_a_folder_that_is_not_there(made: Made, tmp_path: Path) -> None:
    base = made.llama(torch.bfloat16)
    adapter = made.adapter(base, **LINEAR)
    merge_lora_checkpoint(base, adapter, tmp_path / "merged")
    index = tmp_path / "merged" / "model.safetensors.index.json"
    document = json.loads(index.read_text())
    first, *_, last = sorted(set(document["weight_map"].values()))
    document["weight_map"][HEAD] = first if document["weight_map"][HEAD] != first else last
    index.write_text(json.dumps(document))
    check = verify_merge(base, adapter, tmp_path / "merged")
    assert not check.ok
    assert codes(check) == {"tensor-missing", "stray-shard", "total-size", "merged-missing"}
    assert {tensor.name for tensor in check.tensors if tensor.verdict != "exact"} == {HEAD}
    with pytest.raises(safe_loading.CheckpointNotFound):
        verify_merge(base, adapter, tmp_path / "nothing")
    with pytest.raises(ArgumentError, match="threads"):
        verify_merge(base, adapter, base, threads=0)
    with pytest.raises(ArgumentError, match="base_kwargs"):
        verify_merge(base, adapter, base, base_kwargs=3)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="tokenizer"):
        verify_merge(base, adapter, base, tokenizer="mine")  # type: ignore[arg-type]


def test_the_command(made: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = made.llama(torch.bfloat16)
    adapter = made.adapter(base, **LINEAR)
    merge_lora_checkpoint(base, adapter, tmp_path / "merged")
    assert main(["verify", str(base), str(adapter), str(tmp_path / "merged")]) == 0
    assert "30 of 30 tensors" in capsys.readouterr().out
    assert main(["verify", str(base), str(adapter), str(base), "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert not report["ok"]
    assert report["findings"][0]["code"] == "update-absent"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc/self/fd")
def test_ctrl_c_leaves_nothing_behind(made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = made.llama(torch.bfloat16)
    adapter = made.adapter(base, **LINEAR)
    merge_lora_checkpoint(base, adapter, tmp_path / "merged")
    descriptors, handler = len([*Path("/proc/self/fd").iterdir()]), signal.getsignal(signal.SIGINT)
    begun: list[str] = []
    real = TensorComparer.compare

    def compare(self: TensorComparer) -> Iterator[int]:
        begun.append(threading.current_thread().name)
        if len(begun) == 2:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.1)
        yield from real(self)

    monkeypatch.setattr(TensorComparer, "compare", compare)
    with pytest.raises(KeyboardInterrupt):
        verify_merge(base, adapter, tmp_path / "merged", threads=2)
    monkeypatch.undo()
    assert len(begun) < len(tensors_of(base))
    assert all(name.startswith("verify") for name in begun)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("verify")]
    assert len([*Path("/proc/self/fd").iterdir()]) == descriptors
    assert signal.getsignal(signal.SIGINT) is handler
    assert verify_merge(base, adapter, tmp_path / "merged").ok
