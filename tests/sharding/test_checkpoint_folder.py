"""Folders as sources of a wrap: digests of copies that differ only in values, and the names of a user's own module."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel

from safe_loading import CheckpointError, meta_model, wrap_fsdp_meta_safe
from safe_loading._sharding.checkpoint_folder import _digest
from safe_loading._sharding.open_source import open_source

NAMES = [f"{number}.weight" for number in range(5)]


def layers() -> nn.Module:
    return nn.Sequential(*[nn.Linear(128, 256, bias=False) for _ in range(5)])


def digest(folder: Path) -> str:
    return _digest(open_source(folder, layers()))


@pytest.mark.parametrize("changed", [*NAMES, None])
def test_two_steps_of_a_training_have_two_digests(tmp_path: Path, changed: str | None) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    file = "model.safetensors"
    save_file(layers().state_dict(), first / file, metadata={"format": "pt"})
    shutil.copytree(first, second)
    assert digest(first) == digest(second)
    state = load_file(first / file)
    if changed is not None:
        state[changed] += 1e-3
    save_file(state, second / file, metadata={"format": "pt"})
    assert (digest(first) == digest(second)) == (changed is None)


def test_a_file_smaller_than_a_sample_is_hashed_whole(tmp_path: Path) -> None:
    for number in range(2):
        (tmp_path / str(number)).mkdir()
        save_file({"weight": torch.full((1, 1), float(number))}, tmp_path / str(number) / "model.safetensors")
    small = nn.Linear(1, 1, bias=False)
    one, other = (_digest(open_source(tmp_path / str(number), small)) for number in range(2))
    assert one != other


SIZES: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


class Flamingo(nn.Module):
    """A language model and a part of the user's own."""

    def __init__(self, *, adapted: bool, tied: bool) -> None:
        super().__init__()
        model: Any = LlamaForCausalLM(LlamaConfig(vocab_size=64, tie_word_embeddings=tied, **SIZES))
        self.lang_encoder = get_peft_model(model, LoraConfig(target_modules=["q_proj"])) if adapted else model
        self.perceiver = nn.Linear(32, 4)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("adapted", [False, True])
def test_a_folder_of_a_users_module_has_its_names(tmp_path: Path, adapted: bool, tied: bool) -> None:
    expected = {name: value.clone() for name, value in Flamingo(adapted=adapted, tied=tied).state_dict().items()}
    save_file(expected, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with torch.device("meta"):
        model = Flamingo(adapted=adapted, tied=tied)
    found = wrap_fsdp_meta_safe(model, tmp_path).state_dict()
    assert found.keys() == expected.keys()
    for name, value in found.items():
        assert torch.equal(value.full_tensor() if isinstance(value, DTensor) else value, expected[name])


class Scored(nn.Module):
    """A model under the name that classes of transformers give to the model under a head, and a head of the user's."""

    def __init__(self, kind: type[Any], labels: int = 1) -> None:
        super().__init__()
        self.model = kind(LlamaConfig(vocab_size=64, **SIZES))
        self.score = nn.Linear(32, labels)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("kind", [LlamaModel, LlamaForCausalLM])
def test_a_head_of_the_module_is_read_where_the_model_has_the_name_of_a_base(tmp_path: Path, kind: type[Any]) -> None:
    expected = {name: value.clone() for name, value in Scored(kind).state_dict().items()}
    save_file(expected, tmp_path / "model.safetensors", metadata={"format": "pt"})
    begun: list[nn.Module] = []
    for init_new in (None, begun.append):
        with torch.device("meta"):
            model = Scored(kind)
        found: Any = wrap_fsdp_meta_safe(model, tmp_path, init_new=init_new).state_dict()
        assert all(torch.equal(found[name].full_tensor(), value) for name, value in expected.items())
    assert not begun


@pytest.mark.usefixtures("one_rank")
def test_a_head_of_another_shape_is_the_modules_own(tmp_path: Path) -> None:
    expected = Scored(LlamaModel, labels=2).state_dict()
    save_file(expected, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with torch.device("meta"):
        model = Scored(LlamaModel)

    def threes(new: nn.Module) -> None:
        for parameter in new.parameters(recurse=False):
            nn.init.constant_(parameter, 3)

    found: Any = wrap_fsdp_meta_safe(model, tmp_path, init_new=threes)
    assert bool((found.score.weight.full_tensor() == 3).all())
    norm = "model.norm.weight"
    assert torch.equal(found.state_dict()[norm].full_tensor(), expected[norm])


@pytest.mark.usefixtures("one_rank")
def test_a_tie_that_the_folder_of_a_users_module_has_not_is_cut(tmp_path: Path) -> None:
    expected = {name: value.clone() for name, value in Flamingo(adapted=False, tied=True).state_dict().items()}
    expected["lang_encoder.lm_head.weight"] += 1
    save_file(expected, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with torch.device("meta"):
        model = Flamingo(adapted=False, tied=True)
    wrapped: Any = wrap_fsdp_meta_safe(model, tmp_path)
    head, embeddings = wrapped.lang_encoder.lm_head.weight, wrapped.lang_encoder.model.embed_tokens.weight
    assert torch.equal(head.full_tensor(), embeddings.full_tensor() + 1)


@pytest.mark.usefixtures("one_rank")
def test_a_folder_with_more_than_a_users_module_is_refused(tmp_path: Path) -> None:
    saved = {name: value.clone() for name, value in Flamingo(adapted=False, tied=False).state_dict().items()}
    save_file({**saved, "other.weight": torch.ones(2)}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with torch.device("meta"):
        model = Flamingo(adapted=False, tied=False)
    with pytest.raises(CheckpointError, match=r"does not fit this Flamingo; .*:\n.*other\.weight: .*$") as refused:
        wrap_fsdp_meta_safe(model, tmp_path)
    assert "lang_encoder" not in str(refused.value)


class Compared(nn.Module):
    """A model, a reference of the same folder and one without its head, and a part of the user's own."""

    def __init__(self, load: Callable[..., Any], *, critic: bool = False) -> None:
        super().__init__()
        self.scale = nn.Linear(4, 4)
        self.first = load(LlamaConfig(vocab_size=64, **SIZES), LlamaForCausalLM)
        self.model = get_peft_model(load("base", LlamaForCausalLM), LoraConfig(target_modules=["q_proj"]))
        self.reference = load("base", LlamaForCausalLM).requires_grad_(False)
        if critic:
            self.critic = load("base", LlamaModel)


def ones(new: nn.Module) -> None:
    for parameter in new.parameters(recurse=False):
        nn.init.ones_(parameter)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("apart", [False, True])
def test_each_model_that_was_made_from_the_folder_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, apart: bool
) -> None:
    saved = LlamaForCausalLM(LlamaConfig(vocab_size=64, tie_word_embeddings=apart, **SIZES))
    values = {name: value.clone() for name, value in saved.state_dict().items()}
    values["lm_head.weight"] += 1
    saved.save_pretrained(tmp_path / "base")
    save_file(values, tmp_path / "base" / "model.safetensors", metadata={"format": "pt"})
    monkeypatch.chdir(tmp_path)
    with torch.device("meta"):
        model = Compared(meta_model)
    wrapped: Any = wrap_fsdp_meta_safe(model, tmp_path / "base", init_new=ones)
    for inner in (wrapped.model.get_base_model(), wrapped.reference):
        found = {name.replace(".base_layer", ""): value for name, value in inner.state_dict().items()}
        assert all(torch.equal(found[name].full_tensor(), value) for name, value in values.items())
    assert bool((wrapped.first.lm_head.weight.full_tensor() == 1).all())


@pytest.mark.usefixtures("one_rank")
def test_a_model_of_the_folder_that_is_unlike_the_first_is_not_begun_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    LlamaForCausalLM(LlamaConfig(vocab_size=64, **SIZES)).save_pretrained(tmp_path / "base")
    monkeypatch.chdir(tmp_path)
    with torch.device("meta"):
        model = Compared(meta_model, critic=True)
    with pytest.raises(CheckpointError, match=r"critic \(LlamaModel\)"):
        wrap_fsdp_meta_safe(model, "base", init_new=ones)
    with torch.device("meta"):
        anew = Compared(meta_model, critic=True)
    anew.critic.name_or_path = ""  # as the message says
    wrap_fsdp_meta_safe(anew, "base", init_new=ones)
    given = LlamaModel.from_pretrained("base")
    model.critic = given
    wrapped: Any = wrap_fsdp_meta_safe(model, "base", init_new=ones)
    assert torch.equal(wrapped.critic.norm.weight.full_tensor(), torch.ones(32))
