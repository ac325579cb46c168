"""What no folder has: positions that Marian computes, new adapters inside a user's module, and buffers."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from rank_server import RankServer
from safetensors.torch import load_file
from tiny_models import saved
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import LlamaModel, MarianMTModel

from safe_loading import ArgumentError, meta_model, wrap_fsdp_meta_safe

POSITIONS = [f"model.{part}.embed_positions.weight" for part in ("encoder", "decoder")]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    saved("MarianMTModel", tmp_path)
    return tmp_path


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("version", [1, 2])
def test_they_have_the_values_of_their_class(folder: Path, version: Literal[1, 2]) -> None:
    expected = MarianMTModel.from_pretrained(folder).state_dict()
    model = wrap_fsdp_meta_safe(meta_model(folder, MarianMTModel), folder, version=version)
    found: dict[str, Any] = model.state_dict()
    assert {*POSITIONS} <= {*expected} <= {*found}
    for name, value in expected.items():
        whole = found[name].full_tensor() if isinstance(found[name], DTensor) else found[name]
        assert torch.equal(whole, value), name


@pytest.mark.usefixtures("one_rank")
def test_they_have_them_under_an_adapter_too(folder: Path) -> None:
    expected = MarianMTModel.from_pretrained(folder).state_dict()
    model: Any = get_peft_model(meta_model(folder, MarianMTModel), LoraConfig(target_modules=["q_proj"]))
    wrapped = wrap_fsdp_meta_safe(model, folder)
    found = dict(wrapped.get_base_model().named_parameters())
    for name in POSITIONS:
        assert torch.equal(found[name].full_tensor(), expected[name])


class Reward(nn.Module):
    """An adapted model and a head, as DeepSpeed-Chat has them."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.rwtransformer = model
        self.v_head = nn.Linear(model.config.hidden_size, 1, device=model.device)


@pytest.mark.usefixtures("one_rank")
def test_adapters_inside_a_module_begin_as_peft_began_them(tmp_path: Path) -> None:
    saved("LlamaModel", tmp_path)
    lora = LoraConfig(r=2, target_modules=["q_proj"])

    def made(base: Any) -> Any:
        torch.manual_seed(3)
        return Reward(get_peft_model(base, lora))

    expected = made(LlamaModel.from_pretrained(tmp_path)).rwtransformer.state_dict()
    init_new: Any = nn.Linear.reset_parameters  # which would fill lora_B, too
    model: Any = wrap_fsdp_meta_safe(made(meta_model(tmp_path, LlamaModel)), tmp_path, init_new=init_new)
    for name, value in model.rwtransformer.state_dict().items():
        assert torch.equal(value.full_tensor() if isinstance(value, DTensor) else value, expected[name])


@pytest.mark.usefixtures("one_rank")
def test_an_adapter_inside_a_users_module_is_read_from_its_folder(tmp_path: Path) -> None:
    saved("LlamaModel", tmp_path / "base")
    lora = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    trained = get_peft_model(LlamaModel.from_pretrained(tmp_path / "base"), lora)
    trained.save_pretrained(str(tmp_path / "adapter"))
    options: Any = {"init_new": nn.Linear.reset_parameters, "adapters": tmp_path / "adapter"}
    model: Any = Reward(get_peft_model(meta_model(tmp_path / "base", LlamaModel), lora))
    wrapped: Any = wrap_fsdp_meta_safe(model, tmp_path / "base", **options)
    found = wrapped.rwtransformer.state_dict()
    for name, value in trained.state_dict().items():
        assert torch.equal(found[name].full_tensor() if isinstance(found[name], DTensor) else found[name], value)
    two = nn.Sequential(*[Reward(get_peft_model(meta_model(tmp_path / "base", LlamaModel), lora)) for _ in range(2)])
    with pytest.raises(ArgumentError, match=r"and 0\.rwtransformer, 1\.rwtransformer of this Sequential have some"):
        wrap_fsdp_meta_safe(two, tmp_path / "base", **options)
    options["adapters"] = None
    for each in two:
        base = LlamaModel.from_pretrained(tmp_path / "base")
        each.rwtransformer = PeftModel.from_pretrained(base, str(tmp_path / "adapter"))
    given: Any = wrap_fsdp_meta_safe(two, tmp_path / "base", **options)
    name = "base_model.model.layers.0.self_attn.q_proj.lora_B.default.weight"
    assert torch.equal(given[1].rwtransformer.get_parameter(name).full_tensor(), trained.get_parameter(name))


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("version", [1, 2])
def test_a_merge_inside_a_users_module_is_not_lost(tmp_path: Path, version: Literal[1, 2]) -> None:
    saved("LlamaModel", tmp_path)
    lora = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    model: Any = Reward(get_peft_model(LlamaModel.from_pretrained(tmp_path), lora))
    wrapped: Any = wrap_fsdp_meta_safe(model, version=version)
    with pytest.raises(ArgumentError, match=f"merge_and_unload.. of a model that FSDP{version} wrapped"):
        wrapped.rwtransformer.merge_and_unload(safe_merge=True)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("version", [1, 2])
def test_models_inside_a_users_module_are_saved_whole(tmp_path: Path, version: Literal[1, 2]) -> None:
    saved("LlamaModel", tmp_path / "base")
    lora = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    model: Any = Reward(get_peft_model(LlamaModel.from_pretrained(tmp_path / "base"), lora))
    model.reference = LlamaModel.from_pretrained(tmp_path / "base")
    for name in ("rwtransformer", "reference"):
        getattr(model, name).save_pretrained(tmp_path / "one" / name)
    wrapped: Any = wrap_fsdp_meta_safe(model, version=version)
    for name, file in (("rwtransformer", "adapter_model"), ("reference", "model")):
        getattr(wrapped, name).save_pretrained(tmp_path / "sharded" / name)
        one, sharded = (load_file(tmp_path / each / name / f"{file}.safetensors") for each in ("one", "sharded"))
        assert one.keys() == sharded.keys()
        assert all(torch.equal(value, sharded[key]) for key, value in one.items())


BUFFERS = """
import sys, torch, torch.distributed as dist
from torch import nn
from tiny_models import saved
from transformers import LlamaModel
from safe_loading import meta_model, wrap_fsdp_meta_safe

dist.init_process_group("gloo")
rank, folder = dist.get_rank(), sys.argv[1]
if rank == 0:
    saved("LlamaModel", folder)
dist.barrier()

class Scaled(nn.Module):
    def __init__(self, model, value):
        super().__init__()
        self.model = model
        self.register_buffer("scale", torch.full((3,), float(value)), persistent=False)

def made(value):
    return Scaled(meta_model(folder, LlamaModel), value)

state = {f"model.{name}": value for name, value in LlamaModel.from_pretrained(folder).state_dict().items()}
for name, source in {"folder": folder, "state dict": state if rank == 0 else {}}.items():
    model = wrap_fsdp_meta_safe(made(rank + 1), source)
    alike = wrap_fsdp_meta_safe(made(1), source)
    real = LlamaModel.from_pretrained(folder)
    real.rotary_emb.inv_freq.mul_(rank + 1)
    real = wrap_fsdp_meta_safe(real, folder)
    report(**{name: [
        model.scale.tolist(), alike.scale.tolist(), float(real.rotary_emb.inv_freq[0]),
        model.fsdp_report.bytes_sent - alike.fsdp_report.bytes_sent,
    ]})
"""


def test_buffers_that_no_source_has_are_those_of_rank_0(rank_server: RankServer, tmp_path: Path) -> None:
    for rank, found in enumerate(rank_server.run(BUFFERS, 2, args=[tmp_path], timeout=120).found):
        wanted = [[1.0] * 3, [1.0] * 3, 1.0, 0 if rank else 12]
        assert found == {"folder": wanted, "state dict": wanted}
