"""A base whose fused weights are read into place is the one that ``from_pretrained`` loads, in everything it has."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from tiny_models import causal_lm_classes, image_text_classes, saved, skip_unless_buildable, tiny_config
from transformers import core_model_loading, modeling_utils

from safe_loading import CheckpointError, load_peft_on_rank
from safe_loading._checkpoint.model_folder import ModelFolder
from safe_loading._loading import into_place, load
from safe_loading._loading.base_model import base_on_meta
from safe_loading._loading.into_place import IntoPlace, plan_into_place, read_into_place
from safe_loading._loading.report import FROM_PRETRAINED, INTO_PLACE
from safe_loading._model.layout import reading
from safe_loading._model.layout.layout import read_layout
from safe_loading._ranks.rank_devices import RankDevices

if TYPE_CHECKING:
    from rank_server import RankServer

EVERY = sorted({*causal_lm_classes(), *image_text_classes()})
FUSED = ["MixtralForCausalLM", "Qwen3MoeForCausalLM", "DeepseekV3ForCausalLM", "Phi3ForCausalLM", "GptOssForCausalLM"]
OTHERS = sorted(set(EVERY) - set(FUSED))
SAMPLE = [*FUSED, *random.Random(36).sample(OTHERS, 3)]
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in OTHERS if name not in SAMPLE]
CPU = RankDevices(torch.device("cpu"))


def planned(folder: Path, kind: Any, dtype: torch.dtype | str = "auto", devices: RankDevices = CPU) -> Any:
    """Return what a load plans for a folder."""
    opened = ModelFolder(folder)
    checkpoint = opened.read_checkpoint()
    model = base_on_meta(kind, opened, dtype, {})
    assert model is not None
    return plan_into_place(opened, checkpoint, read_layout(model, checkpoint.tensors), model, devices, {})


def both(
    folder: Path, kind: Any, dtype: torch.dtype | str = "auto", device: torch.device | None = None
) -> tuple[str, list[tuple[Any, Any]]]:
    """Load a folder with a plan and without; return the method of the first, and each model with its loading info."""
    options: dict[str, Any] = {"dtype": dtype, "output_loading_info": True}
    options |= {"device_map": {"": device}} if device else {}
    with read_into_place(planned(folder, kind, dtype, RankDevices(device) if device else CPU)) as told:
        ours = kind.from_pretrained(folder, **options)
    return told[-1].name, [ours, kind.from_pretrained(folder, **options)]


def facts(model: Any, info: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a model has besides the values of its tensors."""
    names: dict[int, list[str]] = {}
    for name, tensor in (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)):
        names.setdefault(id(tensor), []).append(name)
    generation = getattr(model, "generation_config", None)
    return {
        "ties": [*names.values()],
        "trained": [(name, each.requires_grad, type(each)) for name, each in model.named_parameters()],
        "flags": [(name, getattr(each, "_is_hf_initialized", None)) for name, each in model.named_parameters()],
        "flags of modules": [(name, vars(each).get("_is_hf_initialized")) for name, each in model.named_modules()],
        "training": [each.training for each in model.modules()],
        "attributes": [(name, sorted(vars(each))) for name, each in model.named_modules()],
        "hooks": [(len(each._forward_hooks), len(each._forward_pre_hooks)) for each in model.modules()],
        "config": model.config.to_dict(),
        "generation": generation and generation.to_dict(),
        "devices": getattr(model, "hf_device_map", None),
        "rules": [(type(rule), rule.source_patterns) for rule in model._weight_conversions],
        "info": {key: sorted(map(str, value)) for key, value in info.items()},
    }


def assert_equal(pair: list[tuple[Any, Any]]) -> None:
    (ours, of_ours), (plain, of_plain) = pair
    assert facts(ours, of_ours) == facts(plain, of_plain)
    for one, other in zip(ours.state_dict().items(), plain.state_dict().items(), strict=True):
        assert one[0] == other[0]
        assert one[1].dtype == other[1].dtype
        assert torch.equal(one[1], other[1]), one[0]
    for (name, one), (_, other) in zip(ours.named_buffers(), plain.named_buffers(), strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other), name


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixtral")
    saved("MixtralForCausalLM", folder)
    return folder


@pytest.mark.parametrize("name", [*SAMPLE, *SLOW])
def test_it_is_the_model_of_from_pretrained_in_every_class(name: str, tmp_path: Path) -> None:
    skip_unless_buildable(name)
    saved(name, tmp_path)
    kind = getattr(transformers, name)
    for dtype in ("auto", torch.bfloat16):
        _, pair = both(tmp_path, kind, dtype)
        assert_equal(pair)


def test_experts_are_read_into_place_and_dense_weights_are_mapped(mixtral: Path, tmp_path: Path) -> None:
    plan = planned(mixtral, transformers.MixtralForCausalLM)
    assert isinstance(plan, IntoPlace)
    assert all(".experts." in name for name in plan.source.slots)
    assert both(mixtral, transformers.MixtralForCausalLM)[0] == INTO_PLACE
    saved("LlamaForCausalLM", tmp_path)
    assert planned(tmp_path, transformers.LlamaForCausalLM).name == FROM_PRETRAINED


def test_the_report_says_which_method_was_taken_and_why(mixtral: Path, tmp_path: Path) -> None:
    base = transformers.MixtralForCausalLM.from_pretrained(mixtral)
    adapted: Any = get_peft_model(base, LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"))
    adapted.save_pretrained(tmp_path)
    model = load_peft_on_rank(tmp_path, mixtral, device="cpu")
    of_base, of_adapter = model.load_report.parts
    assert (of_base.method, of_adapter.method) == (INTO_PLACE, "")
    assert f"base: into place; {of_base.method_reason}" in str(model.load_report)
    loaded = load_peft_on_rank(tmp_path, transformers.MixtralForCausalLM.from_pretrained(mixtral), device="cpu")
    assert [part.method for part in loaded.load_report.parts] == ["", ""]
    for one, other in zip(model.parameters(), loaded.parameters(), strict=True):
        assert torch.equal(one, other)


def test_the_check_and_the_plan_of_the_reads_put_collections_of_young_objects_off(
    mixtral: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base: Any = transformers.MixtralForCausalLM.from_pretrained(mixtral)
    adapted: Any = get_peft_model(base, LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"))
    adapted.save_pretrained(tmp_path)
    seen: dict[str, int] = {}
    for module, name in ((load, "read_layout"), (reading, "blocks_of_range"), (into_place, "missing_of_load")):
        original = getattr(module, name)

        def noting(*given: Any, name: str = name, original: Any = original, **options: Any) -> Any:
            seen[name] = gc.get_threshold()[0]
            return original(*given, **options)

        monkeypatch.setattr(module, name, noting)
    before = gc.get_threshold()
    load_peft_on_rank(tmp_path, mixtral, device="cpu")
    later = max(10_000, before[0])
    assert seen == {"read_layout": later, "blocks_of_range": later, "missing_of_load": before[0]}
    assert gc.get_threshold() == before


def test_files_that_transformers_has_read_ahead_are_left_to_it(mixtral: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modeling_utils.LoadStateDictConfig, "prefetch", True, raising=False)
    method, pair = both(mixtral, transformers.MixtralForCausalLM)
    assert method == FROM_PRETRAINED
    assert_equal(pair)


def test_weights_that_transformers_makes_in_another_dtype_are_left_to_it(mixtral: Path) -> None:
    kind = transformers.MixtralForCausalLM
    plain = kind.from_pretrained(mixtral, dtype=torch.float16)
    with read_into_place(planned(mixtral, kind, torch.bfloat16)) as told:
        ours = kind.from_pretrained(mixtral, dtype=torch.float16)
    assert "in another dtype" in told[0].why
    assert all(torch.equal(one, other) for one, other in zip(ours.parameters(), plain.parameters(), strict=True))
    assert {each.dtype for each in ours.parameters()} == {torch.float16}


def of_mixtral(mixtral: Path, folder: Path) -> dict[str, torch.Tensor]:
    """Write the model into one file of another folder, and return its tensors."""
    tensors = {name: each for file in mixtral.glob("*.safetensors") for name, each in load_file(file).items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    shutil.copy(mixtral / "config.json", folder)
    return tensors


@pytest.mark.parametrize("change", ["missing", "unexpected", "an expert is missing", "another shape"])
def test_what_is_missing_or_unexpected_is_told_as_by_from_pretrained(
    mixtral: Path, tmp_path: Path, change: str
) -> None:
    tensors = of_mixtral(mixtral, tmp_path)
    expert = next(name for name in tensors if ".experts.1." in name)
    if change == "missing":
        del tensors["model.norm.weight"]
    elif change == "unexpected":
        tensors["model.of_another_task.weight"] = torch.ones(3)
    elif change == "an expert is missing":
        del tensors[expert]
    else:
        tensors["model.norm.weight"] = torch.ones(3)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    kind, dtype = transformers.MixtralForCausalLM, torch.float32
    ours: Any = contextlib.ExitStack()
    outcomes = []
    for plan in (planned(tmp_path, kind), None):
        with ours if plan is None else read_into_place(plan):
            try:
                torch.manual_seed(0)
                outcomes.append(kind.from_pretrained(tmp_path, dtype=dtype, output_loading_info=True))
            except Exception as error:
                outcomes.append(str(error))
    if isinstance(outcomes[1], str):
        assert outcomes[0] == outcomes[1]
    else:
        assert_equal(outcomes)


def test_what_it_makes_is_saved_as_it_came(mixtral: Path, tmp_path: Path) -> None:
    _, ((ours, _), (plain, _)) = both(mixtral, transformers.MixtralForCausalLM)
    for name, model in (("ours", ours), ("plain", plain)):
        model.save_pretrained(tmp_path / name)
    assert (tmp_path / "ours/model.safetensors").read_bytes() == (tmp_path / "plain/model.safetensors").read_bytes()


@contextlib.contextmanager
def during_the_reads(act: Any) -> Iterator[None]:
    """Do something in the place of the first read of a weight."""
    read = os.preadv

    def acting(*arguments: Any) -> int:
        act()
        return read(*arguments)

    with mock.patch.object(os, "preadv", acting):
        yield


def test_a_file_that_shrinks_is_an_error_and_ctrl_c_ends_the_load(mixtral: Path, tmp_path: Path) -> None:
    of_mixtral(mixtral, tmp_path)
    kind: Any = transformers.MixtralForCausalLM
    plan, opened = planned(tmp_path, kind), open_files()
    stopped = mock.Mock(side_effect=KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt), read_into_place(plan), during_the_reads(stopped):
        kind.from_pretrained(tmp_path)
    loader = "convert_and_load_state_dict_in_model"
    assert getattr(modeling_utils, loader) is getattr(core_model_loading, loader)
    assert open_files() == opened
    shrinks = during_the_reads(lambda: os.truncate(tmp_path / "model.safetensors", 4096))
    shorter = r"model\.safetensors became shorter while it was read"
    with pytest.raises(CheckpointError, match=shorter), read_into_place(plan), shrinks:
        kind.from_pretrained(tmp_path)


def open_files() -> list[str]:
    """Return the files in the folder of the test that this process has open."""
    links = [path.readlink() for path in Path("/proc/self/fd").iterdir() if path.exists()]
    return [str(link) for link in links if link.suffix == ".safetensors"]


FULL = """
    import re, resource, sys, threading
    from pathlib import Path
    import torch
    from safe_loading import load_peft_on_rank
    adapter, base = sys.argv[1:3]
    threading.stack_size(1 << 20)  # the limit counts the whole range of a stack, 8 MiB by default

    def private():
        return int(re.search(r"VmData:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) << 10

    free = resource.RLIM_INFINITY
    wanted = load_peft_on_rank(adapter, base, device="cpu").state_dict()
    errors, left = [], []
    for room in (2 << 20, 14 << 20, 20 << 20):  # the file has 15 MiB, and can be mapped in the last
        before = private()
        resource.setrlimit(resource.RLIMIT_DATA, (before + room, free))
        try:
            load_peft_on_rank(adapter, base, device="cpu")
        except MemoryError as error:
            errors.append(str(error))
        resource.setrlimit(resource.RLIMIT_DATA, (free, free))
        left.append(private() - before)
    found = load_peft_on_rank(adapter, base, device="cpu").state_dict()
    same = found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)
    report(errors=errors, left=left, same=same)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="RLIMIT_DATA covers mappings on Linux only")
def test_where_the_memory_is_full_that_is_said_nothing_stays_and_a_later_load_is_whole(
    rank_server: RankServer, tmp_path: Path
) -> None:
    config: Any = tiny_config("MixtralForCausalLM")
    config.hidden_size, config.intermediate_size, config.vocab_size = 256, 512, 1000
    model = transformers.MixtralForCausalLM(config)
    model.save_pretrained(tmp_path / "base")
    get_peft_model(model, LoraConfig(target_modules=["q_proj"])).save_pretrained(str(tmp_path / "adapter"))
    (told,) = rank_server.run_alone(FULL, args=[tmp_path / "adapter", tmp_path / "base"], timeout=240).found
    assert told["same"]
    assert max(told["left"]) < 4 << 20
    mapping, again, allocation = told["errors"]
    assert "no memory left for the base, and nothing of it stays: unable to mmap" in mapping
    assert again == mapping
    assert "can't allocate memory" in allocation
