"""The advice of findings about files, taken: what the fix names is done, and the folder is what it was."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from faults import folders
from faults.folders import first
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from safe_loading import (
    ArgumentError,
    CheckpointError,
    CheckpointNotFound,
    PickleRefused,
    check_checkpoint,
    load_peft_on_rank,
    meta_model,
)
from safe_loading._checkpoint import header
from safe_loading._checkpoint.files import open_regular
from safe_loading._checkpoint.hub import adapter_files, base_files, resolve
from safe_loading._checkpoint.index import read_checkpoint

Step = Callable[[Path, Path], Any]  # of the folder, and of a sound one


class Case(NamedTuple):
    """What is wrong with a folder, words of the fix, and what it says, done."""

    spoil: Callable[[Path], Any]
    code: str
    advice: str
    mend: Step
    is_model: bool = True


def again(folder: Path, sound: Path) -> None:
    """Download, copy or save the files again, over those that are there."""
    for path in sound.iterdir():
        (folder / path.name).unlink(missing_ok=True)
        shutil.copy(path, folder)


def the_file(folder: Path, sound: Path) -> None:
    """Put the file itself where something else is."""
    path = next(path for path in folder.iterdir() if path.is_symlink() or not path.is_file())
    path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
    shutil.copy(sound / path.name, path)


def target(folder: Path, _: Path) -> None:
    """Put the file itself at the place of the link to it."""
    path = next(path for path in folder.iterdir() if path.is_symlink())
    real = path.resolve()
    path.unlink()
    real.rename(path)


def fields(name: str, **entries: Any) -> Step:
    return lambda folder, _: folders._json_fields(name, entries)(folder)


def inside(folder: Path, _: Path) -> None:
    """Move the file into the folder, and let the index name it there."""
    document = json.loads((folder / folders.INDEX).read_text())
    (away,) = {name for name in document["weight_map"].values() if "/" in name}
    (folder / away).rename(folder / Path(away).name)
    names = {tensor: Path(name).name for tensor, name in document["weight_map"].items()}
    (folder / folders.INDEX).write_text(json.dumps({**document, "weight_map": names}))


def total_size(folder: Path, sound: Path) -> None:
    size = sum(tensor.nbytes for path in sound.glob("*.safetensors") for tensor in load_file(path).values())
    folders.index(lambda document: document.update(metadata={"total_size": size}))(folder)


def pickled(**how: Any) -> folders.Change:
    """Save the first weight file with torch under its own name."""

    def change(folder: Path) -> None:
        tensors = {name: tensor.clone() for name, tensor in load_file(first(folder)).items()}  # which are mapped
        torch.save(tensors, first(folder), **how)

    return change


def to_safetensors(folder: Path, _: Path) -> None:
    path = first(folder)
    pickle = path.rename(folder.parent / "pytorch_model.bin")
    save_file(torch.load(pickle, weights_only=True), path, metadata={"format": "pt"})


WEIGHTS, INDEXES, CONFIGS, OF_ADAPTERS = folders.WEIGHTS, folders.INDEXES, folders.CONFIGS, folders.ADAPTER_CONFIGS
CUT = "download or copy the file again; the download was probably cut off"
SAVE_FILE = "download or copy the file again, or save it again"
WRITE = "write the file again with the program that made it, or download it again"
CORRECT = "correct it, or save the model again with `save_pretrained`"
CORRECT_NUMBER = "correct the number, or save the adapter again with `save_pretrained` of peft"
CORRECT_CONFIG = "correct adapter_config.json to what it was trained with, or save the adapter again"
ENCODE = "save it as UTF-8 without a byte order mark, or download it again"
WHOLE = "download or copy the whole folder again, or save it again"
INDEX_AGAIN = "save or download the index again"
CASES: dict[str, Case] = {
    "cut file": Case(WEIGHTS["cut tail"].change, "truncated", CUT, again),
    "empty file": Case(WEIGHTS["no bytes"].change, "truncated", SAVE_FILE, again),
    "wrong bytes": Case(WEIGHTS["hole"].change, "hole", SAVE_FILE, again),
    "a zip": Case(pickled(), "header-length", "convert it to safetensors", to_safetensors),
    "a pickle": Case(
        pickled(_use_new_zipfile_serialization=False), "header-length", "convert it to safetensors", to_safetensors
    ),
    "a web page": Case(
        folders.put_first(lambda _: b"<!DOCTYPE html>" + bytes(60)), "header-length", "download the file again", again
    ),
    "JSON alone": Case(folders.put_first(lambda data: data[8:]), "header-length", "save the file again", again),
    "of TensorFlow": Case(WEIGHTS["saved by TensorFlow"].change, "other-format", "or load its 'pt' files", again),
    "a pointer": Case(WEIGHTS["Git LFS pointer"].change, "lfs-pointer", "or download the file again", again),
    "a link to nothing": Case(WEIGHTS["dangling link"].change, "missing-shard", "download the file again", again),
    "a broken link": Case(
        lambda folder: folders.instead(lambda path: path.symlink_to("blob"))(folder),
        "missing-shard",
        "or repair the link",
        lambda folder, sound: shutil.copy(sound / first(folder).name, folder / "blob"),
    ),
    "a circle": Case(
        lambda folder: folders.instead(lambda path: path.symlink_to(path.name))(folder),
        "missing-shard",
        "download the file again",
        again,
    ),
    "a folder": Case(
        WEIGHTS["folder in its place"].change, "not-regular", "put the file itself (or a link) there", the_file
    ),
    "a link outside": Case(
        WEIGHTS["link out of the folder"].change, "outside-link", "put the file itself there", target
    ),
    "a missing shard": Case(INDEXES["missing shard"].change, "missing-shard", "download or copy", again),
    "an index that leaves": Case(
        INDEXES["index leaves the folder"].change, "index-path", "name it relative to the folder", inside
    ),
    "no weight map": Case(INDEXES["index without weight_map"].change, "index-weight-map", INDEX_AGAIN, again),
    "a number for a file": Case(
        folders.index(lambda document: document["weight_map"].update({folders.NORM: 3})),
        "index-weight-map",
        INDEX_AGAIN,
        again,
    ),
    "an index of pickles": Case(
        folders.index(lambda document: document["weight_map"].update({folders.NORM: "pytorch_model.bin"})),
        "index-path",
        "save the model again with safetensors",
        again,
    ),
    "no metadata": Case(
        folders.index(lambda document: document.pop("metadata")),
        "index-metadata",
        'add "metadata": {"total_size": <bytes of all tensors>} to the index',
        total_size,
    ),
    "another size": Case(
        folders.index(lambda document: document["metadata"].update(total_size=1)),
        "total-size",
        "unless shared tensors explain the difference",
        total_size,
    ),
    "exchanged shards": Case(INDEXES["two shards exchanged"].change, "tensor-missing", WHOLE, again),
    "no tensor": Case(
        lambda folder: [
            (folder / folders.INDEX).unlink(),
            *(path.unlink() for path in folder.glob("*.safetensors")),
            save_file({}, folder / "model.safetensors"),
        ],
        "no-tensors",
        "save or download it again",
        lambda folder, sound: [(folder / "model.safetensors").unlink(), again(folder, sound)],
    ),
    "a shard left over": Case(
        lambda folder: shutil.copy(first(folder), folder / "model-00009-of-00009.safetensors"),
        "stray-shard",
        "delete it if it is left over from an earlier save",
        lambda folder, _: (folder / "model-00009-of-00009.safetensors").unlink(),
    ),
    "two checkpoints": Case(
        folders.single_beside,
        "two-checkpoints",
        "delete the one that you do not need",
        lambda folder, _: (folder / "model.safetensors").unlink(),
    ),
    "no weights": Case(
        lambda folder: [path.unlink() for path in (*folder.glob("*.safetensors"), folder / folders.INDEX)],
        "weights-missing",
        "download or copy the weights",
        again,
    ),
    "weights of another name": Case(
        folders.config(transformers_weights="../weights.bin"),
        "config-weights",
        "name a safetensors file or index of this folder",
        fields("config.json", transformers_weights=folders.INDEX),
    ),
    "an entry for weights": Case(
        folders.config(transformers_weights=3),
        "config-weights",
        "or remove the entry",
        fields("config.json", transformers_weights=...),
    ),
    "JSON that is cut": Case(CONFIGS["config cut"].change, "json-invalid", WRITE, again),
    "JSON of 17 MB": Case(
        CONFIGS["config of 17 MB"].change, "json-too-large", "check that it is the right file", again
    ),
    "a list of classes": Case(
        folders.config(architectures={"0": "LlamaForCausalLM"}),
        "config-class",
        CORRECT,
        fields("config.json", architectures=["LlamaForCausalLM"]),
    ),
    "no number of layers": Case(
        folders.config(num_hidden_layers=-1), "config-size", CORRECT, fields("config.json", num_hidden_layers=3)
    ),
    "a backbone of another": Case(
        folders.config(backbone="who/model", backbone_config=None),
        "config-path",
        "write its config into backbone_config",
        fields("config.json", backbone=..., backbone_config={"model_type": "resnet"}),
    ),
    "patterns of a quantizer": Case(
        CONFIGS["config with slow patterns of a quantizer"].change,
        "config-pattern",
        "name the modules in it",
        fields("config.json", quantization_config={"quant_method": "bitnet", "modules_to_not_convert": ["model.norm"]}),
    ),
    "a quantization that is left over": Case(
        folders.config(quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True}),
        "quantization-left-over",
        "delete quantization_config from config.json",
        fields("config.json", quantization_config=...),
    ),
    "an unknown quantizer": Case(
        folders.config(quantization_config={"quant_method": "magic"}),
        "quantization-unknown",
        "or remove quantization_config if the weights are plain",
        fields("config.json", quantization_config=...),
    ),
    "a module to import": Case(
        OF_ADAPTERS["adapter with a module to import"].change,
        "config-code",
        "or megatron_config to null",
        fields("adapter_config.json", megatron_config=None),
        False,
    ),
    "a rank beyond all": Case(
        OF_ADAPTERS["adapter with a rank beyond all"].change,
        "config-size",
        CORRECT_NUMBER,
        fields("adapter_config.json", r=4),
        False,
    ),
    "an alpha under another name": Case(
        OF_ADAPTERS["adapter with an alpha under another name"].change,
        "adapter-config",
        CORRECT_CONFIG,
        fields("adapter_config.json", lora_alpha=8, alpha=...),
        False,
    ),
    "a byte order mark": Case(
        lambda folder: (folder / "config.json").write_text((folder / "config.json").read_text(), "utf-8-sig"),
        "json-invalid",
        ENCODE,
        lambda folder, _: (folder / "config.json").write_text((folder / "config.json").read_text("utf-8-sig"), "utf-8"),
    ),
    "UTF-16": Case(OF_ADAPTERS["adapter with a config of Windows"].change, "json-utf8", ENCODE, again, False),
}
LOADED = {"a backbone of another", "patterns of a quantizer"}  # of other models than the tiny one


@pytest.mark.parametrize("kind", CASES)
def test_a_folder_is_sound_once_the_finding_is_mended(
    tmp_path: Path, tiny_llama: Path, tiny_adapter: Path, kind: str
) -> None:
    case = CASES[kind]
    sound = tiny_llama if case.is_model else tiny_adapter
    folder = Path(shutil.copytree(sound, tmp_path / "run" / "folder"))
    case.spoil(folder)
    fixes = [
        finding.fix + finding.message for finding in check_checkpoint(folder).findings if finding.code == case.code
    ]
    assert any(case.advice in fix for fix in fixes), check_checkpoint(folder)
    case.mend(folder, sound)
    report = check_checkpoint(folder)
    assert report.ok, report
    assert report.findings == check_checkpoint(sound).findings
    if kind not in LOADED:
        adapter, base = (tiny_adapter, folder) if case.is_model else (folder, tiny_llama)
        loaded, plain = load_peft_on_rank(base, adapter), load_peft_on_rank(tiny_llama, tiny_adapter)
        assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), plain.parameters(), strict=True))


def test_links_of_ones_own_lead_to_folders_that_are_named(
    tmp_path: Path, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody who keeps weights elsewhere names that folder; every other one stays closed."""
    weights, folder = tmp_path / "weights", tmp_path / "model"
    shutil.copytree(tiny_llama, weights)
    folder.mkdir()
    for file in weights.iterdir():
        (folder / file.name).symlink_to(file)
    assert not check_checkpoint(folder).ok
    for named in ("", "weights", str(tmp_path / "weight"), str(tmp_path / "other"), os.pathsep):
        monkeypatch.setenv("SAFE_LOADING_LINKED_FOLDERS", named)
        assert not check_checkpoint(folder).ok, named
    monkeypatch.setenv("SAFE_LOADING_LINKED_FOLDERS", os.pathsep.join([str(tmp_path / "other"), str(weights)]))
    assert check_checkpoint(folder).ok
    loaded, plain = meta_model(folder), meta_model(weights)
    assert [*loaded.state_dict()] == [*plain.state_dict()]
    (weights / "private").symlink_to("/etc/hostname")  # a link may not lead on from there
    (folder / "generation_config.json").unlink(missing_ok=True)
    (folder / "generation_config.json").symlink_to(weights / "private")
    assert "outside-link" in [finding.code for finding in check_checkpoint(folder).findings]


def test_the_folder_of_a_file_is_named(tmp_path: Path, tiny_llama: Path) -> None:
    """The other half of the advice about a link: name the folder that the file is in."""
    link = tmp_path / "model.safetensors"
    link.symlink_to(first(tiny_llama))
    assert [finding.code for finding in check_checkpoint(link).findings] == ["outside-link"]
    assert check_checkpoint(link.resolve()).ok


def test_many_tensors_are_read_from_several_files(
    tmp_path: Path, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_llama)
    model.save_pretrained(tmp_path / "one")
    monkeypatch.setattr(header, "MAX_TENSORS", 20)
    (finding,) = check_checkpoint(tmp_path / "one").findings
    assert (finding.code, finding.fix.startswith("save it in several files")) == ("header-bomb", True)
    model.save_pretrained(tmp_path / "several", max_shard_size="24KB")
    assert check_checkpoint(tmp_path / "several").ok


def test_a_file_may_be_read_after_chmod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "config.json"
    path.write_text("{}")
    path.chmod(0)
    opened = os.open

    def as_a_user(name: Any, *flags: Any) -> int:
        if not Path(name).stat().st_mode & 0o400:
            raise PermissionError(13, "Permission denied")
        return opened(name, *flags)

    monkeypatch.setattr(os, "open", as_a_user)
    with pytest.raises(CheckpointError, match=r"run `chmod u\+r` on it"):
        open_regular(path)
    path.chmod(path.stat().st_mode | 0o400)
    with open_regular(path) as file:
        assert file.read() == b"{}"


def test_what_a_folder_is_not_is_left_out(tiny_adapter: Path) -> None:
    with pytest.raises(ArgumentError, match=r"Pass the name of one, or leave it out\."):
        resolve("owner/name", adapter_files, revision="../main")
    with pytest.raises(ArgumentError, match=r"'v2' is for hub ids, .*\. Leave it out\."):
        resolve(tiny_adapter, adapter_files, revision="v2")
    with pytest.raises(CheckpointNotFound, match=r"is not a folder\. Pass the folder that holds the files\."):
        resolve(tiny_adapter, adapter_files, subfolder="inner")
    assert resolve(tiny_adapter, adapter_files).folder == tiny_adapter


def test_the_folder_of_a_checkpoint_is_passed(tiny_llama: Path) -> None:
    with pytest.raises(CheckpointError, match="pass the folder that holds the checkpoint"):
        read_checkpoint(tiny_llama / "config.json")
    assert read_checkpoint(tiny_llama).findings == ()


def test_a_base_of_pickles_is_saved_once_as_transformers_saves_it(
    tmp_path: Path, tiny_llama: Path, tiny_adapter: Path
) -> None:
    with pytest.raises(
        PickleRefused, match=r"load it with from_pretrained\(\.\.\., use_safetensors=False\), call save_pre"
    ):
        base_files({})(frozenset({"config.json", "pytorch_model.bin"}), tmp_path.joinpath)
    model = AutoModelForCausalLM.from_pretrained(tiny_llama)
    shutil.copy(tiny_llama / "config.json", tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    AutoModelForCausalLM.from_pretrained(tmp_path, use_safetensors=False).save_pretrained(tmp_path / "safe")
    loaded, plain = load_peft_on_rank(tmp_path / "safe", tiny_adapter), load_peft_on_rank(tiny_llama, tiny_adapter)
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), plain.parameters(), strict=True))
