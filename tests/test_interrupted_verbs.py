"""Ctrl-C at any line of a verb that works on the caller's model: the model, torch and the process are as they were."""

from __future__ import annotations

import functools
import hashlib
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from interrupts import interrupted_at, problems_at, sampled
from torch import nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from transformers import AutoModelForCausalLM
from wrapped_models import Count, llama, lora, peft_llama

from safe_loading import (
    Workload,
    attach_head,
    audit_model,
    load_adapter_on_rank,
    load_at_prepare,
    load_peft_on_rank,
    meta_model,
    plan_device_map,
    predict_memory,
    prepare_and_wrap,
    wrap_fsdp_meta_safe,
    wrap_transparent,
)

MOST = 8  # lines of a verb where Ctrl-C comes; the slow sweep takes twenty-five times as many
SLOW_VERBS = ("audit", "predict", "plan")  # a quarter of them


def bits(tensor: torch.Tensor) -> Any:
    data = tensor.detach().contiguous()
    content = hashlib.sha256(data.view(torch.uint8).numpy().tobytes()).hexdigest() if data.numel() else ""
    return type(tensor), tensor.dtype, tuple(tensor.shape), str(tensor.device), content


def facts(made: Any) -> dict[str, Any]:
    """What a caller can see of the modules that it passed, and of torch."""
    found: dict[str, Any] = {
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "generator": torch.get_rng_state().numpy().tobytes(),
        "modes": (len(_get_current_dispatch_mode_stack()), len(_get_current_function_mode_stack())),
        "Ctrl-C": signal.getsignal(signal.SIGINT),
        "functions": (nn.functional.softmax, nn.functional.dropout, nn.functional.scaled_dot_product_attention),
    }
    for number, module in enumerate(made if isinstance(made, tuple) else (made,)):
        for path, each in module.named_modules():
            own = {
                name: value
                for name, value in vars(each).items()
                if not isinstance(value, (nn.Module, torch.Tensor, dict)) and not callable(value)
            }
            found[f"{number} {path}"] = (id(each), type(each), str(own), list(each._modules), list(each._parameters))
            hooks = {name: list(value) for name, value in vars(each).items() if "hooks" in name and value}
            found[f"{number} {path} hooks"] = str(hooks)
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            found[f"{number} {name}"] = (id(tensor), tensor.requires_grad, *bits(tensor))
        for name, config in getattr(module, "peft_config", {}).items():
            found[f"{number} config {name}"] = str(sorted(config.to_dict().items(), key=str))
    return found


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


@pytest.mark.parametrize("most", [MOST, pytest.param(25 * MOST, marks=pytest.mark.slow)])
@pytest.mark.parametrize("signalled", [True, False], ids=["signal", "raised"])
@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_that_is_interrupted_leaves_everything_as_it_was(verb: str, signalled: bool, most: int) -> None:
    make, call = VERBS[verb]
    call(make())  # what is remembered from a first call
    made = make()
    with interrupted_at() as lines:
        call(made)
    assert lines.count > 50
    numbers = sampled(lines.count, most // 4 if verb in SLOW_VERBS else most, seed=most)
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


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("most", [2 * MOST, pytest.param(25 * MOST, marks=pytest.mark.slow)])
@pytest.mark.parametrize("signalled", [True, False], ids=["signal", "raised"])
@pytest.mark.parametrize("version", [2, 1])
def test_a_model_on_meta_whose_wrap_is_interrupted_can_be_wrapped(
    version: Any, signalled: bool, most: int, tiny_llama: Path
) -> None:
    def make() -> nn.Module:
        return meta_model(tiny_llama)

    def call(model: nn.Module) -> nn.Module:
        return wrap_fsdp_meta_safe(model, tiny_llama, version=version)

    def on_meta(model: nn.Module) -> dict[str, Any]:
        found = facts(())
        for path, each in model.named_modules():
            own = {name: id(value) for name, value in vars(each).items() if not isinstance(value, dict)}
            registries = {name: [*value] for name, value in vars(each).items() if isinstance(value, dict)}
            found[path] = (id(each), type(each), own, registries)
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            found[f"tensor {name}"] = (id(tensor), tensor.requires_grad, tensor.is_meta)
        return found

    def call_again_after(model: nn.Module) -> None:
        try:
            call(model)
        except KeyboardInterrupt:
            interrupted.append(model)
            raise

    interrupted: list[nn.Module] = []
    call(make())
    model = make()
    with interrupted_at() as lines:
        call(model)
    numbers = sampled(lines.count - lines.count // 50, most, seed=most)
    assert problems_at(numbers, make, call_again_after, on_meta, signalled=signalled) == []
    tokens = torch.arange(12)[None]
    wanted = AutoModelForCausalLM.from_pretrained(tiny_llama)(tokens).logits
    assert torch.equal(call(interrupted[-1])(tokens).logits, wanted)
