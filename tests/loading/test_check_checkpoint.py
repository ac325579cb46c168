from __future__ import annotations

import dataclasses
import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from faults.checkpoints import BAD_FILES, LFS_POINTER, entry, safetensors, shard, write_adapter, write_model

from safe_loading import CheckpointError, CheckpointNotFound, CheckpointReport
from safe_loading import check_checkpoint as check_as_a_load
from safe_loading.__main__ import main
from safe_loading._checkpoint.header import read_header
from safe_loading._core.report import format_bytes

ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
check_checkpoint = functools.partial(check_as_a_load, headers=True)  # of tensors that are in no model
SHARDS = {ONE: {"a": 4, "b": 2}, TWO: {"c": 3}}
LORA = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "base_model_name_or_path": "some/base"}


def codes(report: CheckpointReport) -> dict[str, str]:
    return {finding.code: finding.severity for finding in report.findings}


def test_a_sound_model_is_ok_and_its_facts_are_told(tmp_path):
    report = check_checkpoint(str(write_model(tmp_path, SHARDS)))
    assert report.ok
    assert report.findings == ()
    assert (report.path, report.kind, report.tensors, report.bytes) == (str(tmp_path), "model", 3, 9)
    assert [(file.name, file.tensors, file.bytes) for file in report.files] == [(ONE, 2, 6), (TWO, 1, 3)]
    assert report.dtypes == {"U8": 9}
    assert report.metadata == {"format": "pt"}


@pytest.mark.parametrize(
    ("size", "text"), [(1023, "1023 B"), (1536, "1.5 KiB"), ((1 << 20) - 1, "1.0 MiB"), (-(1 << 40) + 1, "-1.0 TiB")]
)
def test_a_size_is_written_in_the_unit_that_fits(size, text):
    assert format_bytes(size) == text


def test_real_checkpoints_of_transformers_and_peft_are_ok(tmp_path):
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, vocab_size=64
    )
    model = LlamaForCausalLM(config)
    size = sum(parameter.nbytes for parameter in model.parameters())
    model.save_pretrained(tmp_path / "model", max_shard_size="8KB")
    get_peft_model(model, LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM")).save_pretrained(tmp_path / "a")
    report = check_as_a_load(tmp_path / "model")
    assert (report.ok, report.kind, len(report.files) > 2) == (True, "model", True)
    assert report.checked_on == "LlamaForCausalLM on meta"
    assert report.findings == ()
    assert report.bytes == size
    adapter = check_as_a_load(tmp_path / "a")
    assert (adapter.ok, adapter.kind, adapter.tensors) == (True, "adapter", 4)
    assert set(codes(adapter)) <= {"adapter-base"}  # a model made from a config has no name


def test_one_file_is_checked_by_itself(tmp_path):
    path = tmp_path / ONE
    path.write_bytes(shard({"a": 4}))
    report = check_checkpoint(path)
    assert (report.ok, report.kind, report.tensors, report.bytes) == (True, "file", 1, 4)


@pytest.mark.parametrize("name", BAD_FILES)
def test_each_bad_file_is_a_finding_and_no_exception(tmp_path, name):
    path = tmp_path / "model.safetensors"
    path.write_bytes(BAD_FILES[name].data)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    for place in (path, tmp_path):
        report = check_checkpoint(place)
        assert not report.ok
        assert codes(report) == {BAD_FILES[name].code: "error"}
        assert BAD_FILES[name].words[0] in str(report)


def test_what_is_not_there_is_the_only_thing_that_raises(tmp_path):
    (tmp_path / "link").symlink_to("gone")
    for path in (tmp_path / "none", tmp_path / "link", tmp_path / "none" / "below"):
        with pytest.raises(CheckpointNotFound, match="Fix:"):
            check_checkpoint(path)


def test_a_hub_id_is_told_how_to_be_downloaded(tmp_path):
    with pytest.raises(CheckpointNotFound, match="downloaded first: `hf download owner/name`"):
        check_checkpoint("owner/name")
    with pytest.raises(CheckpointNotFound, match=r"or copy the file\. \(safe"):
        check_checkpoint(tmp_path / "none")


def test_a_path_that_the_system_cannot_name_is_a_finding():
    assert codes(check_checkpoint("a\0b")) == {"unreadable": "error"}


def test_a_fifo_is_a_finding(tmp_path):
    os.mkfifo(tmp_path / "x.safetensors")
    assert codes(check_checkpoint(tmp_path / "x.safetensors")) == {"not-regular": "error"}


@pytest.mark.parametrize("of_lightning", [False, True])
def test_the_command_converts_the_weights_of_a_state_of_training_too(tmp_path, of_lightning):
    torch, read = pytest.importorskip("torch"), pytest.importorskip("safetensors.torch").load_file
    weights = {"model.weight": torch.ones(2)}
    torch.save({"epoch": 1, "state_dict": weights} if of_lightning else weights, tmp_path / "last.ckpt")
    (finding,) = check_checkpoint(tmp_path / "last.ckpt").findings
    command = finding.fix[finding.fix.index("python -c ") :].removesuffix(".").replace("python", sys.executable, 1)
    subprocess.run(command, shell=True, check=True, timeout=120)
    assert torch.equal(read(tmp_path / "last.safetensors")["model.weight"], weights["model.weight"])


def test_a_pickle_by_itself_is_an_error_with_the_command(tmp_path):
    path = tmp_path / "weights.pt"
    path.write_bytes(b"\x80")
    (finding,) = check_checkpoint(path).findings
    assert finding.code == "pickle-only"
    assert "weights.safetensors" in finding.fix
    assert "weights_only=True" in finding.fix


def test_a_folder_without_weights_is_a_finding(tmp_path):
    assert codes(check_checkpoint(tmp_path)) == {"weights-missing": "error", "config-missing": "error"}


def test_a_folder_that_cannot_be_listed_is_a_finding(tmp_path, monkeypatch):
    def deny(_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "iterdir", deny)
    assert codes(check_checkpoint(tmp_path)) == {"unreadable": "error"}


@pytest.mark.parametrize(
    ("text", "code", "severity"),
    [
        (None, "config-missing", "error"),
        ("{", "json-invalid", "error"),
        ('{"a": 1, "a": 2}', "duplicate-key", "error"),
        (LFS_POINTER.decode(), "lfs-pointer", "error"),
        ("{}", "config-model-type", "warning"),
    ],
)
def test_config_json_is_checked(tmp_path, text, code, severity):
    folder = write_model(tmp_path, SHARDS)
    (folder / "config.json").unlink()
    if text is not None:
        (folder / "config.json").write_text(text)
    report = check_checkpoint(folder)
    assert codes(report) == {code: severity}
    assert report.ok == (severity != "error")
    assert report.tensors == 3


def without(key: str) -> dict[str, object]:
    return {name: value for name, value in LORA.items() if name != key}


@pytest.mark.parametrize(
    ("config", "code", "severity", "word"),
    [
        ("{", "json-invalid", "error", "column"),
        (without("peft_type"), "adapter-config", "error", "peft_type is None"),
        ({**LORA, "peft_type": 3}, "adapter-config", "error", "peft_type is 3"),
        (without("r"), "adapter-config", "error", "r is missing"),
        (without("lora_alpha"), "adapter-config", "error", "lora_alpha is missing"),
        ({**LORA, "r": 0}, "adapter-config", "error", "r is 0"),
        ({**LORA, "r": True}, "adapter-config", "error", "r is True"),
        ({**LORA, "lora_alpha": "16"}, "adapter-config", "error", "lora_alpha is '16'"),
        (without("base_model_name_or_path"), "adapter-base", "warning", "names no base model"),
        ({**LORA, "base_model_name_or_path": None}, "adapter-base", "warning", "names no base model"),
    ],
)
def test_adapter_config_json_is_checked(tmp_path, config, code, severity, word):
    report = check_checkpoint(write_adapter(tmp_path, config))
    assert report.kind == "adapter"
    assert codes(report) == {code: severity}
    assert word in report.findings[0].message


def test_an_adapter_of_another_method_needs_no_rank(tmp_path):
    config = {"peft_type": "IA3", "base_model_name_or_path": "some/base"}
    assert check_checkpoint(write_adapter(tmp_path, config)).findings == ()


def test_an_adapter_without_its_config_or_without_its_weights_is_not_ok(tmp_path):
    folder = write_adapter(tmp_path)
    (folder / "adapter_config.json").rename(tmp_path / "kept")
    report = check_checkpoint(folder)
    assert (report.kind, codes(report)) == ("adapter", {"not-found": "error"})
    (tmp_path / "kept").rename(folder / "adapter_config.json")
    (folder / "adapter_model.safetensors").unlink()
    report = check_checkpoint(folder)
    assert (report.kind, codes(report)) == ("adapter", {"weights-missing": "error"})


def test_what_could_run_code_beside_the_weights_is_told(tmp_path):
    folder = write_model(tmp_path, SHARDS)
    (folder / "training_args.bin").write_bytes(b"12345")
    (folder / "modeling_x.py").touch()
    report = check_checkpoint(folder)
    assert report.ok
    assert codes(report) == {"pickle-beside": "warning", "custom-code": "info"}
    assert "'training_args.bin'" in report.findings[0].message
    assert report.findings[0].bytes == 5
    assert "trust_remote_code" in report.findings[1].message


def test_a_model_with_an_adapter_in_it_is_told(tmp_path):
    folder = write_adapter(write_model(tmp_path, SHARDS))
    assert codes(check_checkpoint(folder)) == {"adapter-beside": "warning"}


@pytest.mark.parametrize("pickled", [False, True])
def test_an_adapter_beside_the_config_of_its_base_is_an_adapter(tmp_path, pickled):
    folder = write_adapter(tmp_path)
    (folder / "config.json").write_text('{"model_type": "llama"}')  # as trainers save it, and no weights with it
    if pickled:
        (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    report = check_checkpoint(folder)
    assert (report.kind, report.ok) == ("adapter", not pickled)
    assert codes(report) == ({"pickle-only": "error", "pickle-beside": "warning"} if pickled else {})


@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model.bin.index.json"])
def test_an_adapter_beside_a_pickled_model_is_told_as_that_model(tmp_path, name):
    folder = write_adapter(tmp_path)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / name).write_text("{}")
    assert check_checkpoint(folder).kind == "model"


def test_errors_come_first_and_nothing_is_left_out(tmp_path):
    folder = write_model(tmp_path, SHARDS)
    (folder / "x.py").touch()
    (folder / "old.safetensors").write_bytes(shard({"z": 1}))
    (folder / TWO).unlink()
    (folder / "config.json").unlink()
    report = check_checkpoint(folder)
    assert [finding.severity for finding in report.findings] == ["error", "error", "warning", "info"]
    assert list(codes(report)) == ["missing-shard", "config-missing", "stray-shard", "custom-code"]
    assert [file.name for file in report.files] == [ONE]
    assert str(report).splitlines()[0].endswith("NOT OK (headers alone), 2 errors, 1 warning, 1 info")


def test_the_report_as_text_html_and_json(tmp_path):
    folder = write_model(tmp_path / "<b>", SHARDS)
    (folder / TWO).unlink()
    report = check_checkpoint(folder)
    text = str(report)
    assert "model, 2 tensors in 1 file, 6 B (U8 6 B): NOT OK" in text
    assert f"{ONE}        2    6 B" in text
    assert "error[missing-shard]" in text
    page = report._repr_html_()
    assert "<b>" not in page
    assert "missing-shard" in page
    value = json.loads(report.to_json())
    assert value["ok"] is False
    assert value["findings"][0]["code"] == "missing-shard"
    assert value.keys() == {field.name for field in dataclasses.fields(report)} | {"ok"}


def test_a_check_leaves_the_folder_as_it_was(tmp_path):
    folder = write_model(tmp_path, SHARDS)
    before = {path: path.stat() for path in folder.rglob("*")}
    check_checkpoint(folder)
    after = {path: path.stat() for path in folder.rglob("*")}
    assert before.keys() == after.keys()
    assert all(before[path].st_mtime_ns == after[path].st_mtime_ns for path in before)


def test_the_exceptions_are_those_that_people_expect(tmp_path):
    with pytest.raises(FileNotFoundError):
        check_checkpoint(tmp_path / "none")
    assert issubclass(CheckpointNotFound, CheckpointError)


@pytest.mark.parametrize("kind", ["model", "adapter", "file"])
def test_weights_that_zero_3_emptied_are_an_error_with_the_road(tmp_path, kind):
    name = "base_model.model.q.lora_A.weight" if kind == "adapter" else "model.q.weight"
    emptied = safetensors({name: entry("BF16", [0], 0, 0), "model.norm.bias": entry("BF16", [2], 0, 4)}, bytes(4))
    file = "adapter_model.safetensors" if kind == "adapter" else "model.safetensors"
    if kind == "adapter":
        write_adapter(tmp_path)
    (tmp_path / file).write_bytes(emptied)
    report = check_checkpoint(tmp_path / file if kind == "file" else tmp_path)
    assert codes(report)["tensor-empty"] == "error"
    assert not report.ok
    with pytest.raises(CheckpointError, match=r"ZeRO-3.*zero_to_fp32"):
        read_header(tmp_path / file)
    assert main(["check", str(tmp_path)]) == 1


@pytest.mark.parametrize(
    ("name", "facts"),
    [("q.weight", ("BF16", [0, 8])), ("q.bias", ("F32", [0])), ("q.g_idx", ("I32", [0])), ("q.weight", ("I8", [0]))],
)
def test_tensors_that_are_empty_by_right_are_read(tmp_path, name, facts):
    (tmp_path / "a.safetensors").write_bytes(safetensors({name: entry(*facts, 0, 0)}))
    assert "tensor-empty" not in codes(check_checkpoint(tmp_path / "a.safetensors"))


def test_a_tilde_is_the_home_folder_as_for_all_verbs(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    write_model(tmp_path / "model", SHARDS)
    assert check_checkpoint("~/model").ok
    assert check_checkpoint(f"~/model/{ONE}").ok
