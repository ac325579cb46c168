"""Searches over sizes: the answer is the largest that fits, and few steps are traced for it."""

from __future__ import annotations

from typing import Any

import pytest
from peft import LoraConfig
from transformers import LlamaConfig, Qwen3Config

from safe_loading import DeviceMapInfeasible, Workload, largest_workload, plan_device_map, smallest_limits
from safe_loading._memory.plan import step_traces

SIZES: Any = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 1000, "num_hidden_layers": 2}
CONFIG = LlamaConfig(hidden_size=64, intermediate_size=128, max_position_embeddings=1 << 17, dtype="bfloat16", **SIZES)


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    run = step_traces.trace_step

    def trace_step(model: Any, workload: Workload, **options: Any) -> Any:
        found.append(repr(workload))
        return run(model, workload, **options)

    monkeypatch.setattr(step_traces, "trace_step", trace_step)
    return found


@pytest.mark.parametrize(
    ("limits", "workload", "vary", "most_traces"),
    [
        ({0: "30MB"}, Workload.generate(1, 1), "length", 3),
        ({0: "30MB"}, Workload.generate(1, 256), "batch", 3),
        ({0: "12MB", 1: "12MB"}, Workload.generate(1, 1), "length", 5),
        ({0: "12MB", 1: "12MB"}, Workload.generate(1, 256), "batch", 5),
        ({0: "30MB"}, Workload.train(1, 1), "length", 3),
        ({0: "30MB"}, Workload.train(1, 256), "batch", 3),
        ({0: "20MB", 1: "20MB"}, Workload.train(1, 1), "length", 10),
        ({0: "20MB", 1: "20MB"}, Workload.train(1, 256), "batch", 6),
    ],
)
def test_the_largest_size_is_found_with_few_traces(
    limits: dict[Any, Any], workload: Workload, vary: Any, most_traces: int, traced: list[str]
) -> None:
    best = largest_workload(CONFIG, limits, workload=workload, vary=vary)
    assert len(traced) <= most_traces
    assert plan_device_map(CONFIG, limits, workload=best).verified
    name = "batch_size" if vary == "batch" else "sequence_length"
    with pytest.raises(DeviceMapInfeasible):
        plan_device_map(CONFIG, limits, workload=best.replace(**{name: getattr(best, name) + 1}))


@pytest.mark.parametrize(("vary", "length"), [("length", 1), ("batch", 64)])
def test_one_step_foretells_training_where_the_map_is_that_of_the_weights(
    vary: Any, length: int, traced: list[str]
) -> None:
    """Beside the step of the prime size there are two that prove what fits, and three that refuse the next larger."""
    config = LlamaConfig(hidden_size=256, intermediate_size=704, **(SIZES | {"num_hidden_layers": 6}))
    best = largest_workload(config, {0: "150MB", 1: "150MB"}, workload=Workload.train(1, length), vary=vary)
    assert traced.count(repr(best)) == 2
    assert len(traced) == 1 + 2 + 3


def test_a_search_ends_where_it_is_told_to(traced: list[str]) -> None:
    assert largest_workload(CONFIG, {0: "1GB"}, most=100).sequence_length == 100
    assert len(traced) == 2
    with pytest.raises(DeviceMapInfeasible, match="Or pass offload='cpu'"):
        largest_workload(CONFIG, {0: "300KB"}, workload=Workload.generate(4, 1))


def test_limits_are_searched_with_one_step_on_one_device(traced: list[str]) -> None:
    least = smallest_limits(CONFIG, 2, workload=Workload.generate(1, 128))
    assert len(traced) <= 5
    assert plan_device_map(CONFIG, least, workload=Workload.generate(1, 128)).verified
    with pytest.raises(DeviceMapInfeasible):
        plan_device_map(
            CONFIG, {device: size - 1 for device, size in least.items()}, workload=Workload.generate(1, 128)
        )


def test_there_is_a_plan_under_the_smallest_limits() -> None:
    """A step over two devices needs more on one of them than was counted, and less on the other."""
    sizes: Any = SIZES | {"num_attention_heads": 8, "vocab_size": 4000, "num_hidden_layers": 3}
    config = Qwen3Config(hidden_size=256, intermediate_size=704, head_dim=64, dtype="bfloat16", **sizes)
    adapter = LoraConfig(r=8, target_modules="all-linear")
    step = Workload.train(2, 128, gradient_checkpointing=True, adapter=adapter)
    limits = smallest_limits(config, 2, workload=step)
    assert plan_device_map(config, limits, workload=step).verified
    with pytest.raises(DeviceMapInfeasible):
        plan_device_map(config, {device: size - 1 for device, size in limits.items()}, workload=step)
