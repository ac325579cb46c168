"""``check_checkpoint`` with a model on meta: what a load refuses, and nothing of models that are as they should be."""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from faults import adapters as faults
from faults.folders import tensors
from models import save_adapter, save_llama
from peft import IA3Config, OFTConfig, PeftConfig, VeraConfig, get_peft_model
from tiny_models import causal_lm_classes, image_text_classes, tiny_config
from transformers import AutoModelForCausalLM

from safe_loading import (
    AdapterError,
    ArgumentError,
    CheckpointError,
    CheckpointNotFound,
    EngineError,
    check_checkpoint,
    load_peft_on_rank,
)
from safe_loading.__main__ import main
from safe_loading._core import engines
from safe_loading._model.meta_model import build_on_meta

EVERY = sorted({*causal_lm_classes(), *image_text_classes()})
SAMPLE = {*random.Random(3).sample(EVERY, 5), "Gemma3nForCausalLM", "GitForCausalLM", "DeepseekV3ForCausalLM"}
Change = Callable[[dict[str, torch.Tensor]], Any]
Q, NORM = "model.layers.1.self_attn.q_proj.weight", "model.norm.weight"


def write_sparse(folder: Path, model: Any) -> Path:
    """Save a model on meta as ``save_pretrained`` names it, with a hole in place of the weights."""
    folder.mkdir()
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    held: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end, seen = 0, set[int]()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            dtype = {torch.float32: "F32", torch.int64: "I64", torch.bool: "BOOL"}[tensor.dtype]
            held[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [end, end + tensor.nbytes]}
            end += tensor.nbytes
    header = json.dumps(held).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + end)
    return folder


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in SAMPLE else [pytest.mark.slow]) for n in EVERY])
def test_a_model_that_transformers_makes_is_as_it_should_be(tmp_path: Path, name: str) -> None:
    model = build_on_meta(getattr(transformers, name), tiny_config(name), torch.float32)
    report = check_checkpoint(write_sparse(tmp_path / "model", model))
    assert [finding for finding in report.findings if finding.severity == "error"] == []
    assert report.checked_on == f"{name} on meta"


def two_layers(folder: Path) -> Path:
    return save_llama(folder, num_hidden_layers=2)


@pytest.mark.parametrize(
    ("pick", "change", "words"),
    [
        (Q, lambda held: held.pop(Q), "has no tensor of that name"),
        (NORM, lambda held: held.pop(NORM), "has no tensor of that name"),
        (Q, lambda held: held.update({Q: held[Q][:31]}), "[31, 32]"),
        (Q, lambda held: held.update({Q: held[Q].view(16, 64)}), "[16, 64]"),
        (NORM, lambda held: held.update({NORM: held[NORM].to(torch.int8)}), "as I8"),
        (Q, lambda held: held.update({Q.replace(".1.", ".2."): held[Q].clone()}), "has a layer 2"),
    ],
)
def test_a_model_of_two_layers_is_judged_as_a_load_judges_it(
    tmp_path: Path, pick: str, change: Change, words: str
) -> None:
    folder = two_layers(tmp_path / "llama")
    assert check_checkpoint(folder).findings == ()
    tensors(change, pick)(folder)
    report = check_checkpoint(folder)
    assert {finding.code for finding in report.findings} == {"load-refused"}
    assert words in report.findings[0].message
    assert pick.replace(".1.", ".2.") in report.findings[0].message or pick in report.findings[0].message
    assert str(report).splitlines()[0].endswith("NOT OK (a load), 1 error")
    headers = check_checkpoint(folder, headers=True)
    assert headers.ok
    assert headers.checked_on == "headers alone"


def test_a_refusal_that_holds_its_fix_is_given_no_empty_one(tmp_path: Path, tiny_adapter: Path) -> None:
    folder = shutil.copytree(tiny_adapter, tmp_path / "renamed")
    (folder / "adapter_model.safetensors").rename(folder / "adapters.safetensors")
    (finding,) = check_checkpoint(folder).findings
    assert finding.code == "load-refused"
    assert str(finding).endswith("Copy or download it, too.")


def test_every_weight_that_is_missing_is_a_finding(tmp_path: Path) -> None:
    folder = two_layers(tmp_path / "llama")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    report = check_checkpoint(folder)
    assert len(report.findings) == 9
    assert all("model.layers.2." in finding.message for finding in report.findings)


def test_two_values_of_what_the_config_ties_are_told(tmp_path: Path) -> None:
    folder = two_layers(tmp_path / "llama")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    report = check_checkpoint(folder)
    assert report.ok
    assert [finding.code for finding in report.findings] == ["base-untied"]


def test_a_model_of_codes_is_left_to_its_quantizer(tmp_path: Path) -> None:
    folder = two_layers(tmp_path / "llama")
    config = json.loads((folder / "config.json").read_text())
    quantization = {"quant_method": "fp8", "weight_block_size": [16, 16], "modules_to_not_convert": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
    tensors(lambda held: held.update({Q: held[Q].to(torch.float8_e4m3fn)}), Q)(folder)
    assert check_checkpoint(folder).checked_on == "headers alone: a quantizer makes the modules during the load"


def test_an_adapter_is_checked_with_its_base_where_that_is_there(tmp_path: Path) -> None:
    base = two_layers(tmp_path / "base")
    adapter = save_adapter(tmp_path / "adapter", base)
    report = check_checkpoint(adapter)
    assert report.ok
    assert report.checked_on == "LlamaForCausalLM on meta"
    other = save_llama(tmp_path / "other", hidden_size=16, num_attention_heads=2)
    refused = check_checkpoint(adapter, base_model=other)
    assert [finding.code for finding in refused.findings[:1]] == ["load-refused"]
    assert "shape-mismatch" in refused.findings[0].message
    config = json.loads((adapter / "adapter_config.json").read_text())
    for named, reason in (("nobody/base", "is not on this machine"), (None, "names no base")):
        (adapter / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": named}))
        alone = check_checkpoint(adapter)
        assert alone.ok
        assert alone.checked_on.startswith("headers alone: ")
        assert reason in alone.checked_on
        assert check_checkpoint(adapter, base_model=base).checked_on == "LlamaForCausalLM on meta"
    lost = check_checkpoint(adapter, base_model=tmp_path / "nowhere")
    assert not lost.ok
    with pytest.raises(ArgumentError, match="base_model"):
        check_checkpoint(adapter, base_model=3)  # type: ignore[arg-type]  # what it refuses


def test_without_engines_headers_are_checked_and_the_report_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise EngineError("safe_loading cannot run.", ["peft>=0.18 is required, and peft is not installed"])

    monkeypatch.setattr(engines, "require_engines", fail)
    report = check_checkpoint(two_layers(tmp_path / "llama"))
    assert report.ok
    assert report.checked_on == "headers alone: peft>=0.18 is required, and peft is not installed"


def test_the_command_says_what_a_load_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = two_layers(tmp_path / "base")
    adapter = save_adapter(tmp_path / "adapter", base)
    assert main(["check", str(adapter), "--base", str(base)]) == 0
    assert "ok (LlamaForCausalLM on meta)" in capsys.readouterr().out
    tensors(lambda held: held.pop(Q), Q)(base)
    assert main(["check", str(base)]) == 1
    assert "error[load-refused]" in capsys.readouterr().out
    assert main(["check", str(base), "--headers"]) == 0
    assert "ok (headers alone)" in capsys.readouterr().out


def test_nothing_at_the_path_is_still_raised(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFound):
        check_checkpoint(tmp_path / "none")


def test_a_tensor_under_two_names_is_an_error_of_the_headers(tmp_path: Path) -> None:
    folder = two_layers(tmp_path / "llama")
    tensors(lambda held: held.update({"norm.weight": held[NORM].clone()}), NORM)(folder)
    assert [finding.code for finding in check_checkpoint(folder).findings] == ["tensor-two-names"]


@pytest.mark.parametrize(
    "wrong", [{"hidden_act": "nonsense"}, {"rope_parameters": {"rope_type": "nonsense"}}, {"dtype": "float8_e4m3fn"}]
)
def test_a_config_of_which_transformers_builds_nothing_is_an_error(
    wrong: dict[str, Any], tmp_path: Path, tiny_adapter: Path
) -> None:
    base = save_llama(tmp_path / "base")
    config = base / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | wrong))
    with pytest.raises(CheckpointError):
        load_peft_on_rank(base, tiny_adapter)
    assert [finding.code for finding in check_checkpoint(base).findings] == ["load-refused"]
    assert not check_checkpoint(tiny_adapter, base_model=base).ok


def test_a_tokenizer_with_words_beyond_the_rows_is_an_error(tmp_path: Path) -> None:
    base = two_layers(tmp_path / "base")
    rows = json.loads((base / "config.json").read_text())["vocab_size"]
    added = base / "added_tokens.json"
    added.write_text(json.dumps({"<tool>": rows - 1, "<image_soft_token>": rows}))
    assert check_checkpoint(base).findings == ()
    added.write_text(json.dumps({"<tool>": rows}))
    for headers in (True, False):
        (finding,) = check_checkpoint(base, headers=headers).findings
        assert finding.code == "tokenizer-ids"
        assert f"'<tool>' with the id {rows}, and the embeddings have {rows} rows" in finding.message


def test_a_tokenizer_of_an_adapter_is_held_against_the_rows_of_its_base(tmp_path: Path) -> None:
    base = two_layers(tmp_path / "base")
    adapter = save_adapter(tmp_path / "adapter", base)
    rows = json.loads((base / "config.json").read_text())["vocab_size"]
    (adapter / "added_tokens.json").write_text(json.dumps({"<tool>": rows}))
    assert [finding.code for finding in check_checkpoint(adapter).findings] == ["tokenizer-ids"]
    (base / "added_tokens.json").write_text(json.dumps({"<tool>": rows}))  # published so, and nothing of the adapter's
    assert check_checkpoint(adapter).findings == ()
    (base / "added_tokens.json").unlink()
    base = save_llama(tmp_path / "larger", num_hidden_layers=2, vocab_size=rows + 1)
    larger = save_adapter(tmp_path / "of larger", base, modules_to_save=["embed_tokens", "lm_head"])
    (larger / "added_tokens.json").write_text(json.dumps({"<tool>": rows}))
    assert check_checkpoint(larger).findings == ()


@pytest.mark.parametrize(
    ("kind", "options"),
    [(IA3Config, {"feedforward_modules": []}), (VeraConfig, {}), (OFTConfig, {"oft_block_size": 8})],
    ids=["IA3", "VeRA", "OFT"],
)
@pytest.mark.parametrize("base_is_there", [True, False])
@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"some_future_field": True}, "field 'some_future_field' = True does not exist"),
        ({"peft_type": "FINEGATES"}, "which peft .* does not know"),
        ({"target_modules": ["to_out.0"]}, r"has none of the target_modules \['to_out.0'\]"),
    ],
    ids=["field", "method", "targets"],
)
def test_an_adapter_of_any_method_is_ok_only_if_it_loads(
    tmp_path: Path,
    kind: type[PeftConfig],
    options: dict[str, Any],
    base_is_there: bool,
    fields: dict[str, Any],
    words: str,
) -> None:
    base = two_layers(tmp_path / "base")
    config = kind(task_type="CAUSAL_LM", target_modules=["q_proj"], **options)  # type: ignore[call-arg]  # of each kind
    get_peft_model(AutoModelForCausalLM.from_pretrained(base), config).save_pretrained(tmp_path / "saved")
    named = {"base_model_name_or_path": str(base) if base_is_there else "org/not-here"}
    adapter = faults.edited(tmp_path / "saved", tmp_path / "adapter", config=lambda c: c.update(named))
    report = check_checkpoint(adapter)
    assert report.ok
    assert "where" in report.checked_on if base_is_there else "headers alone" in report.checked_on
    load_peft_on_rank(adapter, base)
    adapter = faults.edited(adapter, tmp_path / "changed", config=lambda c: c.update(fields))
    with pytest.raises(AdapterError, match=words):
        load_peft_on_rank(adapter, base)
    if base_is_there or "target_modules" not in fields:  # only the base says which modules it has
        (found,) = [finding for finding in check_checkpoint(adapter).findings if finding.severity == "error"]
        assert re.search(words, found.message)
    assert not check_checkpoint(adapter, base_model=base).ok


def test_targets_of_another_base_are_named_before_it_is_read(tmp_path: Path) -> None:
    base = two_layers(tmp_path / "base")
    config = IA3Config(task_type="CAUSAL_LM", target_modules=["k_proj"], feedforward_modules=[])
    get_peft_model(AutoModelForCausalLM.from_pretrained(base), config).save_pretrained(tmp_path / "adapter")
    sizes: dict[str, Any] = {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 101, "n_positions": 64}
    other = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=1, eos_token_id=2))
    other.save_pretrained(tmp_path / "other")
    with pytest.raises(AdapterError, match=r"GPT2LMHeadModel has none of the target_modules \['k_proj'\]"):
        load_peft_on_rank(tmp_path / "adapter", tmp_path / "other")
    load_peft_on_rank(tmp_path / "adapter", base)  # the advice
