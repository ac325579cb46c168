"""The advice of errors about ranks and their devices, taken: what a message names gives the rank its device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn

from safe_loading import ArgumentError, DeviceError, RanksDisagree, load_adapter_on_rank
from safe_loading._ranks import device_for_rank as module
from safe_loading._ranks.device_for_rank import device_for_rank
from safe_loading._ranks.device_guard import check_contexts, check_not_shared, one_device, own_device
from safe_loading._ranks.exchange import Ranks
from safe_loading._ranks.launcher import read_launcher
from safe_loading._ranks.rank_devices import rank_devices
from safe_loading._ranks.same_on_ranks import check_same_arguments


def any_of(wrong: object) -> Any:
    """Return what a type checker would refuse."""
    return wrong


def machine(
    monkeypatch: pytest.MonkeyPatch, environ: Mapping[str, str], count: int, current: int | None = None
) -> None:
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "RANK", "WORLD_SIZE", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(module, "_visible_devices", lambda: ("cuda", count))
    monkeypatch.setattr(module, "_is_initialized", lambda device_type: current is not None)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: current)


def test_more_ranks_than_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    def job(ranks: int, **more: str) -> dict[str, str]:
        return {"LOCAL_RANK": str(ranks - 1), "LOCAL_WORLD_SIZE": str(ranks), "WORLD_SIZE": str(ranks), **more}

    machine(monkeypatch, job(4), 2)
    advice = r"Start at most 2 ranks on this node, make more devices visible, or give each rank one device of its own"
    with pytest.raises(DeviceError, match=advice):
        device_for_rank()
    machine(monkeypatch, job(2), 2)
    assert device_for_rank() == torch.device("cuda", 1)
    machine(monkeypatch, job(4), 4)
    assert device_for_rank() == torch.device("cuda", 3)
    machine(monkeypatch, job(4, CUDA_VISIBLE_DEVICES="3"), 1)
    assert device_for_rank() == torch.device("cuda", 0)


def test_ranks_of_no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("is_initialized", True), ("get_rank", 3), ("get_world_size", 4)):
        monkeypatch.setattr(torch.distributed, name, lambda value=value: value)
    machine(monkeypatch, {}, 4)
    with pytest.raises(DeviceError, match="Start it with torchrun, pass local_rank=, or make its device the current"):
        device_for_rank()
    assert device_for_rank(3) == torch.device("cuda", 3)
    machine(monkeypatch, {}, 4, current=3)
    assert device_for_rank() == torch.device("cuda", 3)
    machine(monkeypatch, {"LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4", "WORLD_SIZE": "4"}, 4)
    assert device_for_rank() == torch.device("cuda", 3)


def test_what_is_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, {}, 0)
    monkeypatch.setattr(module, "_visible_devices", lambda: ("cpu", 0))
    with pytest.raises(ArgumentError, match=r"pass an integer from 0, or None to ask the launcher"):
        device_for_rank(-1)
    assert device_for_rank(0) == device_for_rank(None) == torch.device("cpu")
    with pytest.raises(ArgumentError, match="pass a device of this machine, or leave device= out"):
        own_device("meta")
    with pytest.raises(ArgumentError, match=r"pass a torch\.device, a name or an index"):
        own_device(True)
    with pytest.raises(
        ArgumentError, match=r"'auto' is not a device; pass a .*\"cpu\", or an index\. Leave it out"
    ) as caught:
        own_device("auto")
    assert "ipu" not in str(caught.value)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: None)
    with pytest.raises(DeviceError, match=r"Pass device='cpu' for the CPU\."):
        own_device(0)
    with pytest.raises(DeviceError, match=r"device='cuda', but torch sees no accelerator here\. .*doctor"):
        own_device("cuda")
    for right in ("cpu", torch.device("cpu"), None):
        assert own_device(right) == torch.device("cpu")


def test_variables_of_two_launchers() -> None:
    both = {"LOCAL_RANK": "4", "LOCAL_WORLD_SIZE": "4"}
    advice = "Start all ranks with one launcher, or unset the variables that it did not write"
    with pytest.raises(DeviceError, match=advice):
        read_launcher(both)
    assert read_launcher({"LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4"}).local_size == 4
    assert read_launcher({"LOCAL_RANK": "4"}).local_rank == 4


def test_ranks_on_one_device() -> None:
    shared = ["node", "GPU-1"]
    advice = r"Start fewer ranks, make a device of its own visible to each, or pass device= if they are to share it"
    with pytest.raises(DeviceError, match=advice):
        check_not_shared([0, 1], [shared, shared])
    check_not_shared([0], [shared])
    check_not_shared([0, 1], [shared, ["node", "GPU-2"]])
    check_not_shared([0, 1], [None, None])  # of a device that the caller passed


def test_a_context_on_another_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("safe_loading._ranks.device_guard.contexts", lambda: frozenset({0, 1}))
    with pytest.raises(DeviceError, match=r"Call torch\.cuda\.set_device\(1\) before loading, and report it"):
        check_contexts(frozenset(), torch.device("cuda", 1))
    monkeypatch.setattr("safe_loading._ranks.device_guard.contexts", lambda: frozenset({1}))  # as after the call
    check_contexts(frozenset(), torch.device("cuda", 1))


def test_a_model_on_two_devices_is_loaded_onto_one(tiny_llama: Any, tiny_adapter: Any) -> None:
    from transformers import AutoModelForCausalLM

    from safe_loading import load_peft_on_rank

    spread = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2, device="meta")])
    with pytest.raises(DeviceError, match=r"Load it with load_peft_on_rank, or with from_pretrained\(device_map="):
        one_device(spread)
    assert one_device(load_peft_on_rank(tiny_llama, tiny_adapter, device="cpu")) == torch.device("cpu")
    auto: Any = AutoModelForCausalLM
    assert one_device(auto.from_pretrained(tiny_llama, device_map={"": "cpu"})) == torch.device("cpu")


def test_maps_that_are_empty_or_offload() -> None:
    with pytest.raises(ArgumentError, match=r"pass device=, or a map for all modules of the base"):
        rank_devices({})
    advice = r"pass a map without 'cpu' and 'disk' \(plan_device_map\(\.\.\., offload='never'\)\), or load with"
    with pytest.raises(ArgumentError, match=advice):
        rank_devices({"model": "cpu", "lm_head": "disk"})
    for right in ("cpu", {"": "cpu"}, {"model": "cpu", "lm_head": "cpu"}):
        assert rank_devices(right).main == torch.device("cpu")


def test_ranks_and_seconds_of_an_exchange(tiny_llama: Any, tiny_adapter: Any) -> None:
    from safe_loading import load_peft_on_rank

    with pytest.raises(ArgumentError, match="pass 'all', 'self' or a list of global ranks"):
        Ranks.resolve(any_of("some"))
    with pytest.raises(ArgumentError, match="pass 'all', 'self' or a list of global ranks"):
        Ranks.resolve(any_of([0.5]))
    with pytest.raises(ArgumentError, match="pass a positive, finite number of seconds"):
        load_peft_on_rank(tiny_llama, tiny_adapter, timeout=float("inf"))
    for ranks in ("all", "self", [0]):
        model = load_peft_on_rank(tiny_llama, tiny_adapter, device="cpu", ranks=any_of(ranks), timeout=10)
        load_adapter_on_rank(model, tiny_adapter, "another", ranks=any_of(ranks))


def test_arguments_that_ranks_disagree_on() -> None:
    def given(*values: str) -> list[dict[str, str]]:
        return [{"dtype": value} for value in values]

    with pytest.raises(RanksDisagree, match="Pass the same ones on all of them, or ranks='self' where each loads for"):
        check_same_arguments("load_peft_on_rank", [0, 1], given("float32", "bfloat16"))
    check_same_arguments("load_peft_on_rank", [0, 1], given("float32", "float32"))
    check_same_arguments("load_peft_on_rank", [0], given("bfloat16"))  # ranks="self"
