"""Workload: what is accepted, what is refused, and what an optimizer keeps."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from unittest import mock

import numpy
import pytest
import torch
from peft import IA3Config, LoraConfig

from safe_loading import ArgumentError, Workload
from safe_loading._core.optimizer_rules import OPTIMIZERS, OptimizerRule


def test_it_is_a_frozen_value() -> None:
    one = Workload.train(4, 1024, gradient_checkpointing=True)
    assert one == Workload.train(batch_size=4, sequence_length=1024, gradient_checkpointing=True, optimizer="adamw")
    assert hash(one) == hash(Workload.train(4, 1024, True))
    with pytest.raises(AttributeError):
        one.batch_size = 5  # type: ignore[misc]  # that it cannot is the test


@pytest.mark.parametrize(
    ("workload", "text"),
    [
        (Workload.weights_only(), "Workload.weights_only()"),
        (Workload.generate(4, 8192), "Workload.generate(batch_size=4, context_length=8192)"),
        (
            Workload.train(1, 16, True, torch.optim.SGD, "folder"),
            "Workload.train(batch_size=1, sequence_length=16, gradient_checkpointing=True, optimizer=SGD, "
            "adapter='folder')",
        ),
        (Workload.train(1, 16, optimizer="adamw"), "Workload.train(batch_size=1, sequence_length=16)"),
    ],
)
def test_its_text_is_the_call_that_makes_it(workload: Workload, text: str) -> None:
    assert repr(workload) == text


def test_integers_of_numpy_are_integers() -> None:
    workload = Workload.generate(numpy.int64(2), numpy.int32(7))
    assert (workload.batch_size, workload.context_length) == (2, 7)
    assert type(workload.batch_size) is int


@pytest.mark.parametrize("wrong", [0, -1, 1.5, True, "8"])
def test_what_is_no_positive_number_is_refused(wrong: object) -> None:
    with pytest.raises(ArgumentError, match="context_length"):
        Workload.generate(1, wrong)  # type: ignore[arg-type]  # that is the test
    with pytest.raises(ValueError, match="batch_size"):
        Workload.train(wrong, 8)  # type: ignore[arg-type]  # that is the test


def test_all_problems_are_told_at_once() -> None:
    with pytest.raises(ArgumentError) as caught:
        Workload.train(0, -3, optimizer="adamv", autocast="fp8", gradient_checkpointing="yes")  # type: ignore[arg-type]
    assert len(caught.value.problems) == 5
    assert "adamw" in str(caught.value)


def test_a_change_is_checked_too() -> None:
    workload = Workload.generate(1, 8)
    assert workload.replace(batch_size=3) == Workload.generate(3, 8)
    with pytest.raises(ArgumentError):
        workload.replace(batch_size=0)


def test_names_of_the_trainer_are_understood() -> None:
    assert Workload.train(1, 8, optimizer="adamw_torch_fused") == Workload.train(1, 8, optimizer="adamw")
    assert Workload.train(1, 8, optimizer="adamw_bnb_8bit").optimizer == "adamw_8bit"


def state_bytes(rule: OptimizerRule, shape: tuple[int, ...], itemsize: int) -> int:
    return sum(rule.state_parts(shape, itemsize, of_embedding=False))


@pytest.mark.parametrize("name", [name for name, rule in OPTIMIZERS.items() if rule.source])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_table_says_what_the_real_optimizers_keep(name: str, dtype: torch.dtype) -> None:
    rule = OPTIMIZERS[name]
    module, _, kind = (rule.source or "").partition(":")
    package = pytest.importorskip(module, reason=f"{module} is not installed")
    for shape in ((24,), (6, 10), (2, 6, 10)):
        parameter = torch.nn.Parameter(torch.ones(shape, dtype=dtype))
        optimizer = getattr(package, kind)([parameter], **dict(rule.options))
        if hasattr(optimizer, "train"):
            optimizer.train()
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        kept = sum(
            value.nbytes
            for value in optimizer.state[parameter].values()
            if isinstance(value, torch.Tensor) and value.dim() > 0  # counters and norms left out
        )
        assert kept == state_bytes(rule, shape, parameter.itemsize), (name, shape)


def test_no_optimizer_takes_real_memory_in_a_trace() -> None:
    from safe_loading._memory.trace.trace_step import trace_step

    # what FakeTensorMode calls for an operation whose shapes it does not know: the real one, on real zeros
    with mock.patch("torch._subclasses.fake_tensor.run_fallback_kernel", side_effect=AssertionError):
        for name, rule in OPTIMIZERS.items():
            if rule.source is not None:
                pytest.importorskip(rule.source.partition(":")[0], reason="schedulefree is not installed")
            trace_step(torch.nn.Linear(8, 8), Workload.train(1, 8, optimizer=name), inputs={"input": torch.ones(1, 8)})


def test_moments_of_8_bits_carry_a_statistic_for_each_block() -> None:
    rule = OPTIMIZERS["adamw_8bit"]
    assert state_bytes(OPTIMIZERS["adafactor"], (4, 0), 2) == 0
    assert state_bytes(rule, (4096, 4096), 2) == 2 * (4096 * 4096 + 4096 * 4096 // 256 * 4)
    assert state_bytes(rule, (64, 63), 2) == 2 * 4 * 64 * 63  # below 4096 elements bitsandbytes keeps 32 bits


def test_moments_of_torchao_are_whole_blocks_or_in_the_dtype_of_the_parameter() -> None:
    for name, codes, table in (("adamw_torch_8bit", 64 * 128, 1024), ("adamw_torch_4bit", 64 * 64, 64)):
        rule = OPTIMIZERS[name]
        assert rule.state_parts((64, 128), 2, of_embedding=True) == [codes, 32 * 4, table] * 2
        assert rule.state_parts((64, 129), 2, of_embedding=False) == [2 * 64 * 129] * 2  # not a multiple of 256
        assert rule.state_parts((15, 256), 2, of_embedding=False) == [2 * 15 * 256] * 2  # below 4096


def test_it_needs_no_torch() -> None:
    script = "import sys, safe_loading; safe_loading.Workload.train(1, 8); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], timeout=60, check=False).returncode == 0


def test_a_config_of_peft_is_written_as_it_was_made() -> None:
    config = LoraConfig(r=16, target_modules=["v_proj", "q_proj"], modules_to_save=["lm_head"])
    written = repr(Workload.train(1, 8, adapter=config))
    assert written.startswith("Workload.train(batch_size=1, sequence_length=8, adapter=LoraConfig(")
    assert len(written) < 200
    made = eval(written, {"Workload": Workload, "LoraConfig": LoraConfig})  # of this test's own making
    assert made == Workload.train(1, 8, adapter=config)
    assert repr(made) == written


@pytest.mark.parametrize(
    "workload",
    [
        Workload.weights_only(),
        Workload.generate(4, 8192, autocast="float16", adapter="folder"),
        Workload.train(2, 64, optimizer=torch.optim.Adam, adapter=LoraConfig(r=4, target_modules=["v_proj", "q_proj"])),
        Workload.train(2, 64, adapter=IA3Config(task_type="CAUSAL_LM")),
    ],
)
def test_its_facts_are_json_that_is_read_back(workload: Workload) -> None:
    assert Workload.from_facts(json.loads(json.dumps(workload.facts()))) == workload


def test_no_other_class_is_looked_up_for_facts() -> None:
    facts = Workload.train(1, 8).facts()
    for adapter in ({"config": "PeftModel"}, {"config": "no"}):
        with pytest.raises(ArgumentError, match="peft has no such class"):
            Workload.from_facts({**facts, "adapter": adapter})
    assert Workload.from_facts({**facts, "optimizer": "os.path.join"}).optimizer == "os.path.join"


def test_its_text_names_an_adapter_in_short() -> None:
    config = LoraConfig(r=4, target_modules=["q_proj"])
    assert str(Workload.train(1, 8, adapter=config)) == (
        "Workload.train(batch_size=1, sequence_length=8, adapter=LoraConfig(r=4))"
    )
    assert "target_modules" in repr(Workload.train(1, 8, adapter=config))


def test_steps_beyond_the_limit_are_a_longer_prompt() -> None:
    with pytest.raises(ArgumentError, match=r"decode_steps=10000: .* and 256 at most") as caught:
        Workload.generate(2, 64, decode_steps=10_000)
    said = re.search(r"pass context_length=(\d+) and decode_steps=(\d+)\.", str(caught.value))
    assert said is not None
    length, steps = map(int, said.groups())
    workload = Workload.generate(2, length, decode_steps=steps)
    assert (length + steps, workload.decode_steps) == (10_064, 256)
