"""Ctrl-C at any line of a verb that works on the caller's model: the model, torch and the process are as they were."""

from __future__ import annotations

import contextlib
import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from interrupts import everything, facts, interrupted_at, problems_at, sampled
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM
from wrapped_models import Count, llama, lora, peft_llama

from safe_loading import (
    Workload,
    attach_head,
    audit_model,
    load_adapter_on_rank,
    load_at_prepare,
    load_peft_on_rank,
    merge_lora_checkpoint,
    merge_lora_inplace,
    meta_model,
    plan_device_map,
    predict_memory,
    prepare_and_wrap,
    verify_merge,
    wrap_fsdp_meta_safe,
    wrap_transparent,
)
from safe_loading._loading import inject
from safe_loading._memory.trace import operation_cache
from safe_loading._merging.disk import output_model
from safe_loading._merging.weights import dequantize
from safe_loading._ranks import own_generators

MOST = 8  # lines of a verb where Ctrl-C comes; the slow sweep takes twenty-five times as many
SLOW_VERBS = ("audit", "predict", "plan")  # an eighth of them


STEP = Workload.train(1, 8)


def _quantized() -> nn.Module:
    # what prepare_model_for_kbit_training asks for; no layer needs to be packed for what it does to the others
    model = llama(torch.bfloat16)
    model.is_loaded_in_8bit = True
    return model


def _saved_adapter(folder: Path, seed: int, **options: Any) -> Path:
    peft_llama(seed=seed, **options).save_pretrained(folder)
    return folder


@functools.cache
def _adapters() -> dict[str, Path]:
    folder = Path(tempfile.mkdtemp())
    other = {"target_modules": ["k_proj"], "r": 4}
    return {name: _saved_adapter(folder / name, 3, **({} if name == "alike" else other)) for name in ("alike", "other")}


def _with_later(model: Any) -> Any:
    load_adapter_on_rank(model, _adapters()["alike"], "first")
    return model


VERBS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "audit": (peft_llama, lambda model: audit_model(model, STEP)),
    "predict": (llama, lambda model: predict_memory(model, STEP)),
    "plan": (llama, lambda model: plan_device_map(model, {0: "1GB", "cpu": "1GB"}, workload=STEP)),
    "attach head": (
        lambda: (peft_llama(), nn.Linear(32, 1)),
        lambda made: attach_head(made[0], "v", made[1], dtype=torch.bfloat16),
    ),
    "wrap": (peft_llama, lambda model: wrap_transparent(model, Count, calls=0, log=[])),
    "load onto": (llama, lambda model: load_peft_on_rank(_adapters()["alike"], model)),
    "load later": (peft_llama, lambda model: load_adapter_on_rank(model, _adapters()["other"], "later")),
    "load alike": (
        lambda: _with_later(peft_llama()),
        lambda model: load_adapter_on_rank(model, _adapters()["alike"], "later"),
    ),
    "hot swap": (
        peft_llama,
        lambda model: load_adapter_on_rank(model, _adapters()["alike"], "default", hotswap=True),
    ),
    "prepare": (
        lambda: (llama(torch.bfloat16), nn.Linear(32, 1)),
        lambda made: prepare_and_wrap(made[0], lora(), Count, heads={"v": made[1]}, calls=0, log=[]),
    ),
    "prepare quantized": (_quantized, lambda model: prepare_and_wrap(model, lora(), Count, calls=0, log=[])),
    "prepare olora": (
        llama,
        lambda model: prepare_and_wrap(model, lora(init_lora_weights="olora"), Count, calls=0, log=[]),
    ),
}


@functools.cache
def _lines_of(verb: str) -> int:
    make, call = VERBS[verb]
    call(make())  # what is remembered from a first call
    made = make()
    with interrupted_at() as lines:
        call(made)
    return lines.count


@pytest.mark.each_value
@pytest.mark.parametrize("most", [MOST, pytest.param(25 * MOST, marks=pytest.mark.slow)])
@pytest.mark.parametrize("signalled", [True, False], ids=["signal", "raised"])
@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_that_is_interrupted_leaves_everything_as_it_was(verb: str, signalled: bool, most: int) -> None:
    make, call = VERBS[verb]
    count = _lines_of(verb)
    assert count > 50
    numbers = sampled(count, most // 8 if verb in SLOW_VERBS else most, seed=most + signalled)
    assert problems_at(numbers, make, call, facts, signalled=signalled) == []


def _wrapped_while_loading(folder: Path) -> None:
    with load_at_prepare():
        model = AutoModelForCausalLM.from_pretrained(folder)
        wrap_fsdp_meta_safe(model, folder)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("most", [MOST, pytest.param(25 * MOST, marks=pytest.mark.slow)])
@pytest.mark.parametrize("signalled", [True, False], ids=["signal", "raised"])
def test_an_interrupted_sharding_in_the_block_leaves_the_process_as_it_was(
    signalled: bool, most: int, tiny_llama: Path
) -> None:
    def call(_: object) -> None:
        _wrapped_while_loading(tiny_llama)

    call(None)
    with interrupted_at() as lines:
        call(None)
    numbers = sampled(lines.count - lines.count // 50, most, seed=most)  # a few lines more or less ran each time
    assert problems_at(numbers, tuple, call, facts, signalled=signalled) == []


def _tied() -> nn.Module:
    model: Any = llama()
    model.lm_head.weight = model.model.embed_tokens.weight
    model.model.layers[0].self_attn.q_proj.weight.requires_grad_(False)
    return model.eval()


def _with_second_adapter() -> nn.Module:
    torch.manual_seed(5)
    model: Any = wrap_fsdp_meta_safe(peft_llama())
    model.add_adapter("second", lora())
    model.set_adapter("second")
    return model


WRAPS: dict[str, tuple[Callable[[Path], nn.Module], Callable[[nn.Module, Path], nn.Module]]] = {
    "meta, 2": (meta_model, lambda model, folder: wrap_fsdp_meta_safe(model, folder)),
    "meta, 1": (meta_model, lambda model, folder: wrap_fsdp_meta_safe(model, folder, version=1)),
    "real, 2": (lambda _: peft_llama(), lambda model, _: wrap_fsdp_meta_safe(model)),
    "real, 1": (lambda _: peft_llama(), lambda model, _: wrap_fsdp_meta_safe(model, version=1)),
    "real tied, 2": (lambda _: _tied(), lambda model, _: wrap_fsdp_meta_safe(model, ignored_params=["*.norm.weight"])),
    "real tied, 1": (
        lambda _: _tied(),
        lambda model, _: wrap_fsdp_meta_safe(model, version=1, ignored_params=["*.norm.weight"]),
    ),
    "wrapped before": (lambda _: _with_second_adapter(), lambda model, _: wrap_fsdp_meta_safe(model)),
}


@pytest.mark.each_value
@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("most", [MOST, pytest.param(25 * MOST, marks=pytest.mark.slow)])
@pytest.mark.parametrize("signalled", [True, False], ids=["signal", "raised"])
@pytest.mark.parametrize("kind", WRAPS)
def test_a_model_whose_wrap_is_interrupted_is_as_it_was_and_can_be_wrapped(
    kind: str, signalled: bool, most: int, tiny_llama: Path
) -> None:
    make, wrap = WRAPS[kind]

    def call(model: nn.Module) -> Any:
        return wrap(model, tiny_llama)

    def call_again_after(model: nn.Module) -> None:
        try:
            call(model)
        except KeyboardInterrupt:
            interrupted.append(model)
            raise

    interrupted: list[nn.Module] = []
    tokens = torch.arange(12)[None]
    wanted = call(make(tiny_llama))(tokens).logits
    model = make(tiny_llama)
    with interrupted_at() as lines:
        call(model)
    # as many again at the end, where the model is changed; without the last ones, as a few lines more or less ran
    start, end = lines.count * 4 // 5, lines.count - lines.count // 50
    numbers = [
        *sampled(end, most // 2, seed=most),
        *(start + number for number in sampled(end - start, most, seed=most)),
    ]
    made = functools.partial(make, tiny_llama)
    assert problems_at(numbers, made, call_again_after, everything, signalled=signalled) == []
    assert torch.equal(call(interrupted[-1])(tokens).logits, wanted)


def test_torch_is_switched_on_again_wherever_a_trace_switches_it_off() -> None:
    """Line by line through the one file that does so for each operation, over several of them."""
    model, file = llama(), (operation_cache.__file__,)
    before = facts(model)["switches"]
    for number in range(300, 360):
        with contextlib.suppress(KeyboardInterrupt), interrupted_at(number, within=file) as lines:
            predict_memory(model, STEP)
        assert facts(model)["switches"] == before, lines.place


@pytest.mark.parametrize("signalled", [True, False], ids=["signal", "raised"])
def test_torch_is_as_it_was_where_a_load_from_a_folder_is_interrupted_as_it_ends(
    signalled: bool, tiny_llama: Path
) -> None:
    """At the last lines of what draws in it: the mode that it entered first is left there."""
    file = (own_generators.__file__,)
    load_peft_on_rank(_adapters()["other"], tiny_llama)
    before = facts(())
    with interrupted_at(within=file) as lines:
        load_peft_on_rank(_adapters()["other"], tiny_llama)
    for number in range(lines.count - 4, lines.count + 1):
        with contextlib.suppress(KeyboardInterrupt), interrupted_at(number, signalled=signalled, within=file) as lines:
            load_peft_on_rank(_adapters()["other"], tiny_llama)
        found = facts(())
        assert [name for name in before if found[name] != before[name]] == [], lines.place


def _dequantized() -> None:
    bnb = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed").nn
    model = nn.Sequential(bnb.Linear4bit(64, 64), bnb.Linear4bit(64, 64)).to("cpu")
    merge_lora_inplace(get_peft_model(model, LoraConfig(target_modules=["0"])), dequantize=True)


def _merged_on_disk(folder: Path) -> None:
    merge_lora_checkpoint(folder, _adapters()["other"], folder.parent / "merged", overwrite=True, threads=1)


def _verified(folder: Path) -> None:
    verify_merge(folder, _adapters()["other"], folder.parent / "merged")


MERGES: dict[str, tuple[Callable[[Path], None], Any]] = {
    "dequantized": (lambda _: _dequantized(), dequantize),
    "on disk": (_merged_on_disk, output_model),
    "attached on disk": (_merged_on_disk, inject),
    "verified": (_verified, inject),
}


@pytest.mark.each_value
@pytest.mark.parametrize("most", [MOST, pytest.param(25 * MOST, marks=pytest.mark.slow)])
@pytest.mark.parametrize("signalled", [True, False], ids=["signal", "raised"])
@pytest.mark.parametrize("merge", MERGES)
def test_torch_is_as_it_was_where_a_merge_is_interrupted(
    merge: str, signalled: bool, most: int, tmp_path: Path
) -> None:
    """Around the blocks that make modules on meta, whose ends are Python: Ctrl-C may come before one is done."""
    call, module = MERGES[merge]
    file, folder = (str(module.__file__),), tmp_path / "base"
    llama().save_pretrained(folder)
    if merge != "dequantized":
        _merged_on_disk(folder)
    before = facts(())
    with interrupted_at(within=file) as lines:
        call(folder)
    assert lines.count > 0
    for number in sampled(lines.count, 5 * most, seed=most):
        with contextlib.suppress(KeyboardInterrupt), interrupted_at(number, signalled=signalled, within=file) as lines:
            call(folder)
        found = facts(())
        assert [name for name in before if name != "generator" and found[name] != before[name]] == [], lines.place
