from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint
from accelerate.utils import merge_fsdp_weights
from faults.checkpoints import LFS_POINTER, entry, safetensors, shard, write_adapter, write_model
from safetensors.torch import load_file

from safe_loading import CheckpointError, CheckpointNotFound, PickleRefused
from safe_loading._checkpoint.index import inspect_checkpoint, read_checkpoint, read_index, require_unchanged

ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
SHARDS = {ONE: {"a": 4, "b": 2}, TWO: {"c": 3}}


def codes(folder: Path) -> dict[str, str]:
    return {finding.code: finding.severity for finding in inspect_checkpoint(folder)[1]}


def refusal(folder: Path, **kwargs) -> str:
    with pytest.raises(CheckpointError) as caught:
        read_checkpoint(folder, **kwargs)
    assert "Fix:" in str(caught.value)
    return str(caught.value)


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    """A real checkpoint of several shards, with tied embeddings."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, vocab_size=64,
        tie_word_embeddings=True,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("llama")
    LlamaForCausalLM(config).save_pretrained(folder, max_shard_size="8KB")
    return folder


def test_a_sharded_model_of_transformers_is_read_whole(llama):
    checkpoint = read_checkpoint(llama)
    assert checkpoint.kind == "model"
    assert checkpoint.index is not None
    assert len(checkpoint.files) > 2
    assert checkpoint.findings == ()
    stored = {}
    for file in checkpoint.files:
        stored |= load_file(file)
    assert {name: info.shape for name, info in checkpoint.tensors.items()} == {
        k: tuple(v.shape) for k, v in stored.items()
    }
    nbytes = sum(info.nbytes for info in checkpoint.tensors.values())
    assert nbytes == sum(tensor.nbytes for tensor in stored.values()) == checkpoint.index.total_size
    for name, file in checkpoint.file_of.items():
        assert file == llama / checkpoint.index.weight_map[name]


def test_a_single_file_and_an_adapter_are_read(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(shard({"a": 4}))
    checkpoint = read_checkpoint(tmp_path)
    assert (checkpoint.kind, checkpoint.index, list(checkpoint.headers)) == ("model", None, ["model.safetensors"])
    adapter = read_checkpoint(write_adapter(tmp_path / "adapter"))
    assert (adapter.kind, list(adapter.headers)) == ("adapter", ["adapter_model.safetensors"])


def test_shards_may_be_links_and_may_lie_in_folders_below(tmp_path):
    folder = write_model(tmp_path / "m", {"sub/x.safetensors": {"a": 1}, "y.safetensors": {"b": 1}})
    (folder / "y.safetensors").rename(folder / "sub" / "blob")
    (folder / "y.safetensors").symlink_to("sub/blob")
    assert sorted(read_checkpoint(folder).tensors) == ["a", "b"]


@pytest.mark.parametrize("place", ["models--a--b/snapshots/abc", "downloads"])
def test_links_to_blobs_of_a_hub_cache_are_followed_from_anywhere(tmp_path, place):
    blobs = tmp_path / "models--a--b" / "blobs"
    folder = write_model(tmp_path / place, {"x.safetensors": {"a": 1}, "y.safetensors": {"b": 1}})
    blobs.mkdir(parents=True)
    for number, path in enumerate(sorted(folder.iterdir())):
        path.rename(blobs / f"{number:040x}")
        path.symlink_to(os.path.relpath(blobs / f"{number:040x}", folder))
    assert sorted(read_checkpoint(folder).tensors) == ["a", "b"]
    (tmp_path / "link").symlink_to(folder)
    assert sorted(read_checkpoint(tmp_path / "link").tensors) == ["a", "b"]


def test_a_link_out_of_the_folder_is_not_followed(tmp_path):
    folder = write_model(tmp_path / "m", {"x.safetensors": {"a": 1}, "sub/y.safetensors": {"b": 1}})
    (folder / "x.safetensors").rename(tmp_path / "secret")
    (folder / "x.safetensors").symlink_to("../secret")
    with pytest.raises(CheckpointError, match=r"x.safetensors: is a symbolic link out of its folder, to '.*/secret'"):
        read_checkpoint(folder)
    (folder / "sub").rename(tmp_path / "other")
    (folder / "sub").symlink_to(tmp_path / "other")
    with pytest.raises(CheckpointError, match=r"'sub/y.safetensors' passes through a link that leads out"):
        read_checkpoint(folder)


def test_a_single_file_goes_before_an_index_and_says_so(tmp_path):
    folder = write_model(tmp_path, SHARDS)
    (folder / "model.safetensors").write_bytes(shard({"a": 4}))
    checkpoint = read_checkpoint(folder)
    assert list(checkpoint.tensors) == ["a"]
    assert {finding.code for finding in checkpoint.findings} == {"two-checkpoints", "stray-shard"}


def test_a_variant_is_read_under_the_names_of_transformers(tmp_path):
    (tmp_path / "model.fp16.safetensors").write_bytes(shard({"a": 4}))
    assert list(read_checkpoint(tmp_path, variant="fp16").headers) == ["model.fp16.safetensors"]
    message = refusal(tmp_path)
    assert "'model.safetensors' or 'model.safetensors.index.json' does not exist" in message
    assert "'model.fp16.safetensors'" in message
    write_model(tmp_path, SHARDS)
    (tmp_path / "model.safetensors.index.json").rename(tmp_path / "model.safetensors.index.bf16.json")
    assert len(read_checkpoint(tmp_path, variant="bf16").headers) == 2


def test_the_file_that_config_json_asks_for_goes_first_and_stays_inside(tmp_path):
    write_model(tmp_path, SHARDS)
    (tmp_path / "other.safetensors").write_bytes(shard({"z": 1}))
    (tmp_path / "config.json").write_text('{"transformers_weights": "other.safetensors"}')
    assert list(read_checkpoint(tmp_path).tensors) == ["z"]
    for asked in ("../other.safetensors", "weights.bin", 3):
        (tmp_path / "config.json").write_text(json.dumps({"transformers_weights": asked}))
        assert repr(asked) in refusal(tmp_path)


def test_an_index_deeper_down_names_files_relative_to_the_folder_as_in_transformers(tmp_path):
    write_model(tmp_path, SHARDS)
    (tmp_path / "sub").mkdir()
    (tmp_path / "model.safetensors.index.json").rename(tmp_path / "sub" / "x.safetensors.index.json")
    (tmp_path / "config.json").write_text('{"transformers_weights": "sub/x.safetensors.index.json"}')
    assert list(read_checkpoint(tmp_path).headers) == [ONE, TWO]


def test_a_missing_shard_is_named_with_the_tensors_that_are_lost(tmp_path):
    folder = write_model(tmp_path, SHARDS)
    (folder / ONE).unlink()
    message = refusal(folder)
    for word in (str(folder / ONE), "model.safetensors.index.json places 2 tensors in it", "'a', 'b'"):
        assert word in message
    checkpoint, _ = inspect_checkpoint(folder)
    assert checkpoint is not None
    assert list(checkpoint.tensors) == ["c"]


def test_a_shard_that_is_a_broken_link_names_its_target(tmp_path):
    folder = write_model(tmp_path, SHARDS)
    (folder / ONE).unlink()
    (folder / ONE).symlink_to("../../blobs/gone")
    message = refusal(folder)
    assert "blobs/gone" in message
    assert "'a', 'b'" in message


def test_every_fault_of_a_folder_is_in_one_error(tmp_path):
    folder = write_model(tmp_path, {**SHARDS, "model-3.safetensors": {"d": 1}, "model-4.safetensors": {"e": 1}})
    (folder / ONE).unlink()
    (folder / TWO).write_bytes(LFS_POINTER)
    (folder / "model-3.safetensors").write_bytes(safetensors({"d": entry("X"), "f": entry(shape=[7])}, b"x"))
    (folder / "model-4.safetensors").unlink()
    os.mkfifo(folder / "model-4.safetensors")
    with pytest.raises(CheckpointError) as caught:
        read_checkpoint(folder)
    assert len(caught.value.problems) == 5
    assert list(codes(folder)) == ["missing-shard", "lfs-pointer", "dtype", "tensor-size", "not-regular"]


def test_a_tensor_that_is_not_in_its_shard_and_one_that_the_index_does_not_name(tmp_path):
    folder = write_model(tmp_path, SHARDS, weight_map={"a": ONE, "b": ONE, "x": ONE, "y": TWO})
    assert codes(folder) == {"tensor-missing": "error", "tensor-unindexed": "error"}
    message = refusal(folder)
    assert f"{folder / ONE}: does not hold 1 tensor that model.safetensors.index.json places in it: 'x'" in message
    assert f"{folder / TWO}: does not hold 1 tensor" in message
    assert f"{folder / TWO}: holds 1 tensor that model.safetensors.index.json does not name: 'c'" in message


def test_a_tensor_placed_in_the_wrong_shard_is_missing_there(tmp_path):
    folder = write_model(tmp_path, SHARDS, weight_map={"a": ONE, "b": TWO, "c": TWO})
    assert codes(folder) == {"tensor-missing": "error"}
    assert f"{folder / TWO}: does not hold 1 tensor" in refusal(folder)


def test_a_tensor_in_two_shards_names_both(tmp_path):
    folder = write_model(tmp_path, {ONE: {"a": 1, "z": 1}, TWO: {"a": 1, "b": 1}})
    message = refusal(folder)
    assert f"{folder / TWO}: holds 1 tensor that '{folder / ONE}' holds too: 'a'" in message


def test_many_names_are_counted_and_only_some_are_shown(tmp_path):
    lost = {f"t{i}": ONE for i in range(1000)}
    folder = write_model(tmp_path, {ONE: {"a": 1}}, weight_map={"a": ONE, **lost})
    message = refusal(folder)
    assert "does not hold 1000 tensors" in message
    assert "and 994 more" in message
    assert len(message) < 1000


def test_total_size_that_differs_is_a_warning_with_both_sides(tmp_path):
    folder = write_model(tmp_path, SHARDS, metadata={"total_size": 11})
    (finding,) = read_checkpoint(folder).findings
    assert (finding.code, finding.severity, finding.bytes) == ("total-size", "warning", 2)
    assert "11 bytes" in finding.message
    assert "take 9" in finding.message


@pytest.mark.parametrize(
    "metadata", [[], "x", {"total_size": "9"}, {"total_size": -1}, {"total_size": 9.5}, {"total_size": True}]
)
def test_metadata_that_is_no_metadata_is_a_warning(tmp_path, metadata):
    folder = write_model(tmp_path, SHARDS, metadata=metadata)
    assert codes(folder) == {"index-metadata": "warning"}
    index = read_index(folder / "model.safetensors.index.json")
    assert index.total_size is None
    assert index.weight_map == {"a": ONE, "b": ONE, "c": TWO}


def test_metadata_may_say_nothing_of_the_size(tmp_path):
    assert codes(write_model(tmp_path, SHARDS, metadata={})) == {}


@pytest.mark.parametrize("weight_map", [{}, [], "x", {"a": 3, "b": ONE}, {"a": None}])
def test_a_weight_map_that_maps_no_text_to_text_is_refused(tmp_path, weight_map):
    folder = write_model(tmp_path, SHARDS, weight_map=weight_map)
    assert codes(folder) == {"index-weight-map": "error"}
    message = refusal(folder)
    assert "weight_map" in message
    assert "model.safetensors.index.json" in message


@pytest.mark.parametrize("file", ["../x.safetensors", "/etc/x.safetensors", "a\\x.safetensors", "C:x", "", "a/../../b"])
def test_a_weight_map_that_leaves_the_folder_is_refused_before_a_file_is_touched(tmp_path, monkeypatch, file):
    folder = write_model(tmp_path / "m", SHARDS, weight_map={"a": file, "b": ONE})
    opened = []
    real = os.open
    monkeypatch.setattr(os, "open", lambda path, *rest: (opened.append(Path(path).name), real(path, *rest))[1])
    message = refusal(folder)
    assert repr(file) in message
    assert str(folder) in message
    assert set(opened) == {"config.json", "model.safetensors.index.json"}


def test_every_bad_path_of_a_weight_map_is_named(tmp_path):
    folder = write_model(tmp_path, SHARDS, weight_map={"a": "../a", "b": "/b", "c": "c.bin", "d": 1})
    with pytest.raises(CheckpointError) as caught:
        read_index(folder / "model.safetensors.index.json")
    assert len(caught.value.problems) == 4
    assert "'c.bin', which is not a safetensors file" in str(caught.value)


def test_an_index_that_is_no_strict_json_is_refused(tmp_path):
    path = tmp_path / "model.safetensors.index.json"
    for data, word in ((b'{"weight_map": {"a": "x", "a": "y"}}', "twice"), (LFS_POINTER, "LFS"), (b"[]", "list")):
        path.write_bytes(data)
        assert word in refusal(tmp_path)
    with pytest.raises(CheckpointNotFound):
        read_index(tmp_path / "none.index.json")


def test_a_stray_shard_is_a_warning_with_its_bytes(tmp_path):
    folder = write_model(tmp_path, SHARDS)
    (folder / "model-00001-of-00009.safetensors").write_bytes(shard({"old": 5}))
    (finding,) = read_checkpoint(folder).findings
    assert (finding.code, finding.severity) == ("stray-shard", "warning")
    assert finding.bytes == (folder / "model-00001-of-00009.safetensors").stat().st_size


def test_a_checkpoint_without_a_tensor_is_refused(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(safetensors({}))
    assert "no tensor at all" in refusal(tmp_path)


def test_files_that_changed_since_their_headers_were_read_are_refused(tmp_path):
    folder = write_model(tmp_path, {"model-1.safetensors": {"a": 4}, "model-2.safetensors": {"b": 2}})
    checkpoint = read_checkpoint(folder)
    require_unchanged(checkpoint)
    os.utime(folder / "model-2.safetensors", ns=(1, 1))
    with pytest.raises(CheckpointError, match=r"model-2.safetensors.*\(safe-loading explain changed\)"):
        require_unchanged(checkpoint)
    require_unchanged(read_checkpoint(folder))  # loaded again when its writer is done


def test_folders_that_are_not_there_or_hold_nothing_are_not_found(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointNotFound, match="no such file"):
        read_checkpoint(tmp_path / "none")
    with pytest.raises(CheckpointNotFound, match="holds no weights"):
        read_checkpoint(tmp_path)
    said = refusal(tmp_path / "file")
    assert "is not a folder" in said
    assert said.endswith(" (safe-loading explain not-a-folder)")


def test_a_folder_of_both_is_a_model_unless_asked(tmp_path):
    folder = write_adapter(write_model(tmp_path, SHARDS))
    assert read_checkpoint(folder).kind == "model"
    assert read_checkpoint(folder, kind="adapter").kind == "adapter"


# --- pickles -------------------------------------------------------------------------------------------------------


def command_in(message: str) -> list[str]:
    """Return the command of a message as a shell would split it, with the interpreter of the tests."""
    words = shlex.split(message[message.index("python -c ") :])
    return [sys.executable, *words[1:]]


@pytest.mark.parametrize("name", ["pytorch_model", "adapter_model"])
def test_a_pickle_is_refused_with_a_command_that_converts_it(tmp_path, name):
    folder = tmp_path / "it's a folder"
    folder.mkdir()
    weight = torch.randn(4, 6)
    torch.save({"w": weight.T, "tied": weight.T}, folder / f"{name}.bin")
    with pytest.raises(PickleRefused) as caught:
        read_checkpoint(folder)
    assert str(folder / f"{name}.bin") in str(caught.value)
    assert "weights_only=True" in str(caught.value)
    subprocess.run(command_in(str(caught.value)), check=True, timeout=120)
    checkpoint = read_checkpoint(folder)
    stored = load_file(checkpoint.files[0])
    assert torch.equal(stored["w"], weight.T)
    assert torch.equal(stored["tied"], weight.T)


def test_weights_that_other_programs_keep_for_themselves_are_named_with_their_road(tmp_path):
    write_model(tmp_path, {"model.safetensors": {"w": 4}})
    for name in ("model.safetensors", "model.safetensors.index.json"):
        (tmp_path / name).unlink()
    for name, road in (
        ("model_world_size_8_rank_0.pt", "merge these shards with verl (verl.model_merger)"),
        ("lit_model.pth.lora", "convert this model of LitGPT (merge_lora, then convert_from_litgpt)"),
        ("consolidated.00.pth", "take the files in the format of transformers"),
        ("common.pt", "convert this checkpoint of Megatron"),
        ("global_step100", "run `python zero_to_fp32.py . OUTPUT --safe_serialization`"),
        ("__0_0.distcp", "merge these shards with `accelerate merge-weights FOLDER OUTPUT`"),
    ):
        (tmp_path / name).touch()
        _, (found, *_) = inspect_checkpoint(tmp_path)
        assert found.code == "weights-missing"
        assert found.fix.startswith(road)
        (tmp_path / name).unlink()
    torch.save({"w": torch.ones(4)}, tmp_path / "model.pth")  # what convert_from_litgpt writes
    _, (found, *_) = inspect_checkpoint(tmp_path)
    subprocess.run(command_in(found.fix), check=True, timeout=120)
    assert torch.equal(load_file(read_checkpoint(tmp_path).files[0])["w"], torch.ones(4))


def test_shards_of_torch_are_merged_as_the_advice_says(tmp_path):
    shards = tmp_path / "pytorch_model_fsdp_0"
    torch.distributed.checkpoint.save({"model": {"w": torch.ones(4)}}, checkpoint_id=str(shards), no_dist=True)
    for folder in (tmp_path, shards):
        _, (found, *_) = inspect_checkpoint(folder)
        assert "merge these shards with `accelerate merge-weights FOLDER OUTPUT`" in found.fix
    merge_fsdp_weights(str(shards), str(tmp_path / "merged"))
    assert torch.equal(load_file(tmp_path / "merged" / "model.safetensors")["w"], torch.ones(4))


@pytest.mark.parametrize(
    "name", ["pytorch_model.bin", "adapter_model.bin", "pytorch_model-00001-of-00002.bin", "model.pth"]
)
def test_a_pickle_that_is_a_pointer_is_pulled_before_it_is_converted(tmp_path, name):
    """As in most clones of older models, whose conversion would fail with an UnpicklingError."""
    (tmp_path / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 474373095\n")
    if "-of-" in name:
        (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(PickleRefused, match=r"is a pointer of Git LFS. Fix: run `git lfs pull`.* and then convert it"):
        read_checkpoint(tmp_path)


def test_a_sharded_pickle_is_refused_with_a_command_that_converts_all_of_it(tmp_path):
    files = {"a": "pytorch_model-00001-of-00002.bin", "b": "pytorch_model-00002-of-00002.bin"}
    tensors = {name: torch.randn(3) for name in files}
    for name, file in files.items():
        torch.save({name: tensors[name]}, tmp_path / file)
    index = {"metadata": {"total_size": 24}, "weight_map": files}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    with pytest.raises(PickleRefused) as caught:
        read_checkpoint(tmp_path)
    subprocess.run(command_in(str(caught.value)), check=True, timeout=120)
    checkpoint = read_checkpoint(tmp_path)
    assert list(checkpoint.headers) == [ONE, TWO]
    assert checkpoint.findings == ()
    for name, file in checkpoint.file_of.items():
        assert torch.equal(load_file(file)[name], tensors[name])


def test_a_pickle_beside_safetensors_does_not_matter_here(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80")
    (tmp_path / "model.safetensors").write_bytes(shard({"a": 4}))
    assert codes(tmp_path) == {}


@pytest.mark.parametrize(
    ("held", "said"), [({}, "missing"), ({"weight_map": None}, "null"), ({"weight_map": {}}, "empty")]
)
def test_what_stands_in_the_place_of_the_weight_map_is_said(tmp_path: Path, held: dict[str, object], said: str) -> None:
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps(held))
    with pytest.raises(CheckpointError, match=f"weight_map is {said};"):
        read_index(index)
