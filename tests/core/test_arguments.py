"""Wrong arguments of every public function: one class of error, at once, and nothing is changed."""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import save_adapter, save_llama
from peft import LoraConfig
from transformers import AutoModelForCausalLM

import safe_loading as s


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("arguments")
    base = save_llama(folder / "base", torch.float32)
    save_adapter(folder / "adapter", base)
    return folder


@pytest.fixture(autouse=True)
def _inside(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)


def load(adapter: Any = "adapter", base: Any = "base", **options: Any) -> Any:
    return s.load_peft_on_rank(base, adapter, **options)


def disk(base: Any = "base", adapter: Any = "adapter", output: Any = "out", **options: Any) -> Any:
    return s.merge_lora_checkpoint(base, adapter, output, **options)


def plan(**options: Any) -> Any:
    return s.plan_device_map("base", {0: "1GiB"}, **options)


class Mine(s.Transparent):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


def BASE() -> Any:
    return AutoModelForCausalLM.from_pretrained("base")


@functools.cache
def PEFT() -> Any:
    """One for all calls: what is refused is left as it was."""
    return load()


def META() -> Any:
    return s.meta_model("base")


PLAIN = torch.nn.Linear(2, 2)
SGD = torch.optim.SGD(PLAIN.parameters())
LORA = LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM")
WORK, TRAIN = s.Workload.generate(1, 8), s.Workload.train(1, 8)
SHARDED = s.Spread.fsdp2(1)
SIZES = (0, -1, "x", "1MiB", 1.5, True, None)
NO_PATHS = (3, "", b"base", "no/such", "a\0")
NO_MODELS = (None, 3, [], object())
LIMITS = (3, "x", {0: "x"}, {0: -1}, {"x": 1}, {}, {0: None}, {-1: "1GiB"}, {0.5: "1GiB"}, [1])
PAIRS = ((0, 8), (-1, 8), (1, 0), (1, -1), ("x", 8), (1, "x"), (1.5, 8), (True, 8))
CALLS: dict[str, Callable[[], Any]] = {
    "device_for_rank text": lambda: s.device_for_rank("0"),
    "device_for_rank negative": lambda: s.device_for_rank(-1),
    "device_for_rank float": lambda: s.device_for_rank(1.0),
    **{f"load adapter {bad!r:.20}": lambda bad=bad: load(bad) for bad in (None, 3, "", {}, [], b"adapter", "a\0")},
    "load adapter long": lambda: load("a" * 5000),
    **{f"load base {bad!r:.20}": lambda bad=bad: load(base=bad) for bad in (3, "", {}, b"base", "b" * 5000, PLAIN)},
    **{f"load device {bad!r}": lambda bad=bad: load(device=bad) for bad in ("gpu", 1.5, "cuda:0")},
    **{f"load dtype {bad!r}": lambda bad=bad: load(dtype=bad) for bad in ("f16", 3, torch.int8)},
    **{f"load timeout {bad!r}": lambda bad=bad: load(timeout=bad) for bad in (-1, "x", float("inf"), True)},
    **{f"load ranks {bad!r}": lambda bad=bad: load(ranks=bad) for bad in ("x", [5], 0, [0, 0], [True])},
    **{f"load active {bad!r}": lambda bad=bad: load(active=bad) for bad in ("other", 3)},
    "load_adapter None": lambda: s.load_adapter_on_rank(None, "adapter", "x"),
    "load_adapter plain": lambda: s.load_adapter_on_rank(PLAIN, "adapter", "x"),
    "merge None": lambda: s.merge_lora_inplace(None),
    "merge plain": lambda: s.merge_lora_inplace(PLAIN),
    **{f"merge scratch {bad!r}": lambda bad=bad: s.merge_lora_inplace(PEFT(), scratch_bytes=bad) for bad in SIZES},
    **{
        f"merge names {bad!r}": lambda bad=bad: s.merge_lora_inplace(PEFT(), adapter_names=bad)
        for bad in (3, [3], b"x")
    },
    "merge merged": lambda: s.merge_lora_inplace(s.merge_lora_inplace(load())),
    "load onto merged": lambda: s.load_adapter_on_rank(s.merge_lora_inplace(load()), "adapter", "x"),
    "head twice": lambda: s.attach_head(
        s.attach_head(load(), "value", torch.nn.Linear(2, 1)), "value", torch.nn.Linear(2, 1)
    ),
    "merge dequantize, adapters kept": lambda: s.merge_lora_inplace(PEFT(), unload=False, dequantize=True),
    **{f"disk {bad!r:.12} base": lambda bad=bad: disk(bad, "adapter", "out") for bad in NO_PATHS},
    **{f"disk {bad!r:.12} adapter": lambda bad=bad: disk("base", bad, "out") for bad in (*NO_PATHS, [], [None])},
    **{f"disk {bad!r:.12} output": lambda bad=bad: disk("base", "adapter", bad) for bad in (3, "", b"base", "a\0")},
    **{f"disk threads {bad!r}": lambda bad=bad: disk(threads=bad) for bad in (0, -1, "2", 1.5, True)},
    **{f"disk shards {bad!r}": lambda bad=bad: disk(max_shard_size=bad) for bad in (0, -1, "x", 1.5, [1], True)},
    **{f"disk dtype {bad!r}": lambda bad=bad: disk(dtype=bad) for bad in ("x", 3, torch.int8, "Tensor")},
    **{f"disk device {bad!r}": lambda bad=bad: disk(device=bad) for bad in ("gpu", 1.5, "cuda:0")},
    "disk kwargs": lambda: disk(base_kwargs=3),
    "disk plain": lambda: disk(PLAIN),
    **{f"check {bad!r:.20}": lambda bad=bad: s.check_checkpoint(bad) for bad in (None, 3, "", b"base", "no/such")},
    **{f"meta_model {bad!r:.20}": lambda bad=bad: s.meta_model(bad) for bad in (None, 3, "", "./no", b"base")},
    "meta_model class": lambda: s.meta_model("base", 3),
    "meta_model dtype": lambda: s.meta_model("base", dtype=3),
    # ranks
    **{f"wrap_fsdp {bad!r:.12}": lambda bad=bad: s.wrap_fsdp_meta_safe(bad) for bad in NO_MODELS},
    **{
        f"wrap_fsdp source {bad!r:.12}": lambda bad=bad: s.wrap_fsdp_meta_safe(META(), bad)
        for bad in (3, b"base", "no/such")
    },
    **{
        f"wrap_fsdp version {bad!r}": lambda bad=bad: s.wrap_fsdp_meta_safe(META(), "base", version=bad)
        for bad in (3, "2")
    },
    **{
        f"wrap_fsdp verify {bad!r}": lambda bad=bad: s.wrap_fsdp_meta_safe(META(), "base", verify=bad)
        for bad in ("x", 1)
    },
    **{
        f"wrap_fsdp timeout {bad!r}": lambda bad=bad: s.wrap_fsdp_meta_safe(META(), "base", timeout=bad)
        for bad in (-1, "x")
    },
    "wrap_fsdp mesh": lambda: s.wrap_fsdp_meta_safe(META(), "base", mesh="x"),
    "wrap_fsdp ignored": lambda: s.wrap_fsdp_meta_safe(META(), "base", ignored_params=["no.such"]),
    "wrap_fsdp adapters": lambda: s.wrap_fsdp_meta_safe(META(), "base", adapters="no/such"),
    "wrap_fsdp device": lambda: s.wrap_fsdp_meta_safe(META(), "base", device="gpu"),
    **{f"sharded {bad!r:.12}": lambda bad=bad: s.assert_optimizer_sharded(bad, PLAIN) for bad in (None, 3, PLAIN)},
    **{f"sharded model {bad!r:.12}": lambda bad=bad: s.assert_optimizer_sharded(SGD, bad) for bad in (None, 3)},
    # plans
    **{f"plan {bad!r:.12}": lambda bad=bad: s.plan_device_map(bad, {0: "1GiB"}) for bad in (*NO_MODELS, *NO_PATHS)},
    **{f"plan limits {bad!r}": lambda bad=bad: s.plan_device_map("base", bad) for bad in LIMITS},
    **{
        f"plan workload {bad!r}": lambda bad=bad: s.plan_device_map("base", {0: "1GiB"}, workload=bad)
        for bad in (3, "x")
    },
    **{f"plan objective {bad!r}": lambda bad=bad: plan(objective=bad) for bad in ("x", 3, None)},
    **{f"plan offload {bad!r}": lambda bad=bad: plan(offload=bad) for bad in ("x", 3, None)},
    **{f"plan dtype {bad!r}": lambda bad=bad: plan(dtype=bad) for bad in ("x", 3)},
    **{f"plan no_split {bad!r}": lambda bad=bad: plan(no_split_modules=bad) for bad in (3, [3])},
    **{f"plan overhead {bad!r}": lambda bad=bad: plan(overhead=bad) for bad in ("x", -1)},
    **{f"limit {bad!r}": lambda bad=bad: s.limit_device_memory(bad) for bad in (*LIMITS, {0: "1GiB"})},
    **{f"largest {bad!r:.12}": lambda bad=bad: s.largest_workload(bad, {0: "1GiB"}) for bad in NO_MODELS},
    "largest vary": lambda: s.largest_workload("base", {0: "1GiB"}, vary="x"),
    **{
        f"largest most {bad!r}": lambda bad=bad: s.largest_workload("base", {0: "1GiB"}, most=bad)
        for bad in (0, -1, "x", 1.5)
    },
    "largest limits": lambda: s.largest_workload("base", {0: "x"}),
    **{f"smallest {bad!r:.12}": lambda bad=bad: s.smallest_limits(bad) for bad in NO_MODELS},
    **{
        f"smallest devices {bad!r}": lambda bad=bad: s.smallest_limits("base", bad)
        for bad in (0, -1, "x", 1.5, [], [0, 0], True)
    },
    # user code around a model
    **{f"wrap {bad!r:.12}": lambda bad=bad: s.wrap_transparent(bad, Mine) for bad in NO_MODELS},
    **{
        f"wrap mixin {bad!r:.12}": lambda bad=bad: s.wrap_transparent(PEFT(), bad)
        for bad in (None, 3, "x", PLAIN, torch.nn.Linear)
    },
    "wrap twice": lambda: s.wrap_transparent(
        s.wrap_transparent(load(), Mine, prove_calls=False), Mine, prove_calls=False
    ),
    "wrap example": lambda: s.wrap_transparent(PEFT(), Mine, example=3),
    "wrap within": lambda: s.wrap_transparent(PEFT(), Mine, within=3),
    **{f"unwrap {bad!r:.12}": lambda bad=bad: s.unwrap_transparent(bad) for bad in (None, 3, "x", PLAIN)},
    **{f"head {bad!r:.12}": lambda bad=bad: s.attach_head(bad, "value", torch.nn.Linear(2, 1)) for bad in NO_MODELS},
    **{
        f"head name {bad!r}": lambda bad=bad: s.attach_head(PEFT(), bad, torch.nn.Linear(2, 1))
        for bad in (None, 3, "", "a.b", "forward")
    },
    **{
        f"head module {bad!r:.12}": lambda bad=bad: s.attach_head(PEFT(), "value", bad)
        for bad in (None, 3, torch.zeros(2))
    },
    "head adapter": lambda: s.attach_head(PEFT(), "value", torch.nn.Linear(2, 1), adapter_name="other"),
    "head source": lambda: s.attach_head(PEFT(), "value", torch.nn.Linear(2, 1), source="no/such"),
    "head dtype": lambda: s.attach_head(PEFT(), "value", torch.nn.Linear(2, 1), dtype="x"),
    "head device": lambda: s.attach_head(PEFT(), "value", torch.nn.Linear(2, 1), device="gpu"),
    **{f"prepare {bad!r:.12}": lambda bad=bad: s.prepare_and_wrap(bad, LORA, Mine) for bad in (*NO_MODELS, PLAIN)},
    **{f"prepare config {bad!r:.12}": lambda bad=bad: s.prepare_and_wrap(BASE(), bad, Mine) for bad in (None, 3, {})},
    "prepare mixin": lambda: s.prepare_and_wrap(BASE(), LORA, 3),
    "prepare heads": lambda: s.prepare_and_wrap(BASE(), LORA, Mine, heads={"value": 3}),
    "prepare twice": lambda: s.prepare_and_wrap(PEFT(), LORA, Mine),
    # memory
    **{f"predict {bad!r:.12}": lambda bad=bad: s.predict_memory(bad, WORK) for bad in (*NO_MODELS, *NO_PATHS)},
    **{f"predict workload {bad!r}": lambda bad=bad: s.predict_memory("base", bad) for bad in (None, 3, "train")},
    **{
        f"predict capability {bad!r}": lambda bad=bad: s.predict_memory("base", WORK, capability=bad)
        for bad in (3, "x", (8,))
    },
    **{
        f"predict context {bad!r}": lambda bad=bad: s.predict_memory("base", WORK, context_bytes=bad)
        for bad in (-1, "x", 1.5)
    },
    "predict dtype": lambda: s.predict_memory("base", WORK, dtype="x"),
    **{f"micro batch {bad!r:.12}": lambda bad=bad: s.largest_micro_batch(bad, TRAIN, 1 << 30) for bad in NO_MODELS},
    **{
        f"micro batch memory {bad!r}": lambda bad=bad: s.largest_micro_batch("base", TRAIN, bad)
        for bad in (0, -1, "x", None, 1.5)
    },
    "micro batch workload": lambda: s.largest_micro_batch("base", 3, 1 << 30),
    **{f"ranks {bad!r:.12}": lambda bad=bad: s.fewest_ranks(bad, TRAIN, 1 << 30, SHARDED) for bad in NO_MODELS},
    **{f"ranks card {bad!r}": lambda bad=bad: s.fewest_ranks("base", TRAIN, bad, SHARDED) for bad in (-1, "x", None)},
    **{f"ranks most {bad!r}": lambda bad=bad: s.fewest_ranks("base", TRAIN, 1, SHARDED, most=bad) for bad in (0, 1.5)},
    "ranks spread": lambda: s.fewest_ranks("base", TRAIN, 1 << 30, 8),
    "ranks workload": lambda: s.fewest_ranks("base", 3, 1 << 30, SHARDED),
    **{f"audit {bad!r:.12}": lambda bad=bad: s.audit_model(bad) for bad in (*NO_MODELS, *NO_PATHS)},
    **{f"audit workload {bad!r}": lambda bad=bad: s.audit_model(PLAIN, bad) for bad in (3, "train")},
    "audit optimizer": lambda: s.audit_model(PLAIN, optimizer=3),
    **{f"guard {bad!r}": lambda bad=bad: s.MemoryGuard(patience=bad) for bad in (0, -1, "x", 1.5, True)},
    **{f"train {bad!r}": lambda bad=bad: s.Workload.train(*bad) for bad in PAIRS},
    **{f"generate {bad!r}": lambda bad=bad: s.Workload.generate(*bad) for bad in PAIRS},
    "train optimizer": lambda: s.Workload.train(1, 8, optimizer="no-such"),
    **{f"train adapter {bad!r}": lambda bad=bad: s.Workload.train(1, 8, adapter=bad) for bad in ({"r": 8}, 16, ["a"])},
    "train autocast": lambda: s.Workload.train(1, 8, autocast="no-such"),
    **{
        f"train steps {bad!r}": lambda bad=bad: s.Workload.train(1, 8, gradient_accumulation_steps=bad)
        for bad in (0, -1, "x", 1.5)
    },
    **{
        f"generate steps {bad!r}": lambda bad=bad: s.Workload.generate(1, 8, decode_steps=bad) for bad in (-1, "x", 1.5)
    },
}


def test_a_wrong_argument_is_an_error_of_this_package_and_leaves_no_file(folder: Path) -> None:
    before = sorted(folder.rglob("*"))
    offenders = {name: fault for name, call in CALLS.items() if (fault := fault_of(call, folder, before))}
    assert offenders == {}


def fault_of(call: Callable[[], Any], folder: Path, before: list[Path]) -> str | None:
    """Return the promise that a call with a wrong argument breaks, or None."""
    try:
        call()
    except s.SafeLoadingError as error:
        fault = f"{len(str(error))} characters" if len(str(error)) >= 1000 else None
    except Exception:
        fault = traceback.format_exc()
    else:
        fault = "accepted"
    left = sorted(folder.rglob("*"))
    return fault if left == before else f"{fault}; it left other files: {set(left) ^ set(before)}"


def test_the_check_can_fail(folder: Path) -> None:
    def refuse(error: Exception) -> Callable[[], Any]:
        def call() -> Any:
            raise error

        return call

    before = sorted(folder.rglob("*"))
    assert fault_of(refuse(s.ArgumentError("short")), folder, before) is None
    assert fault_of(refuse(s.ArgumentError("x" * 1000)), folder, before) == "1000 characters"
    assert "KeyError" in str(fault_of(refuse(KeyError("x")), folder, before))
    assert fault_of(lambda: None, folder, before) == "accepted"
    assert "other files" in str(fault_of(refuse(s.ArgumentError("short")), folder, before[1:]))
