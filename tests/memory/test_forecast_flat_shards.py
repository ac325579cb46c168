"""FSDP1 in a forecast: torch's own wrapper on fake tensors, held against real tensors and against real ranks."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from allocator_truth import above_start
from models import SIZES
from peft import LoraConfig, get_peft_model
from peft.utils.other import fsdp_auto_wrap_policy
from rank_server import RankServer
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import LlamaConfig, LlamaForCausalLM

from safe_loading import ArgumentError, Spread, Workload, predict_memory
from safe_loading.__main__ import main
from safe_loading._memory.trace.over_ranks import RankOfJob
from safe_loading._memory.trace.trace_step import trace_step
from safe_loading._sharding.fsdp_units import plan_units

PHASES = ("forward", "backward")
STEP = """
    import contextlib
    import warnings
    import torch
    import torch.distributed as dist
    from allocator import peak_above_start
    from peft import LoraConfig, get_peft_model
    from torch.distributed.fsdp import MixedPrecision
    from transformers import LlamaConfig, LlamaForCausalLM

    from safe_loading._memory.trace.flat_sharded_step import BACKWARD_PREFETCH
    from safe_loading._sharding import fsdp1
    from safe_loading._sharding.fsdp_units import plan_units

    warnings.simplefilter("ignore")
    START
    for name, options in CASES.items():
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(**SIZES))
        if options.get("lora"):
            model = get_peft_model(model, LoraConfig(**LORA))
        model.train()
        if options.get("checkpointing"):
            model.gradient_checkpointing_enable(
                gradient_checkpointing_kwargs={"use_reentrant": False, "preserve_rng_state": False}
            )
        ranks, replicas = options["ranks"], options.get("replicas", 1)
        shape, names = ((replicas, ranks), ("replicate", "shard")) if replicas > 1 else ((ranks,), ("shard",))
        mesh = dist.init_device_mesh("cpu", shape, mesh_dim_names=names)
        dtypes = {key: getattr(torch, options[key]) for key in ("param_dtype", "reduce_dtype") if key in options}
        wrapped = fsdp1.wrap(
            model, plan_units(model, flat=True), mesh, torch.device("cpu"), MixedPrecision(**dtypes), None, (),
            options.get("reshard_after_forward", True), shard=options.get("shard", True),
            use_orig_params=options.get("use_orig_params", True),
        )
        if "backward_prefetch" in options:
            fsdp1.set_prefetching(
                wrapped,
                backward=BACKWARD_PREFETCH[options["backward_prefetch"]],
                forward=options.get("forward_prefetch", False),
            )
        steps = options.get("gradient_accumulation_steps", 1)

        def step():
            names = ("input_ids", "attention_mask", "labels")
            batches = [{name: torch.full((2, 48), 1) for name in names} for _ in range(steps)]  # as in the Trainer
            for number, batch in enumerate(batches):
                with wrapped.no_sync() if number < steps - 1 else contextlib.nullcontext():
                    loss = wrapped(**batch, use_cache=False).loss
                    loss.backward()
                del loss

        if options.get("forward_prefetch"):
            step()  # which notes the order
            wrapped.zero_grad()
        report(**{name: peak_above_start(step)})
    dist.destroy_process_group()
"""
LORA: dict[str, Any] = {"r": 4, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}
CASES: dict[str, dict[str, Any]] = {
    "two": {"ranks": 2},
    "three, uneven": {"ranks": 3},
    "kept": {"ranks": 2, "reshard_after_forward": False},
    "mixed precision": {"ranks": 2, "param_dtype": "bfloat16", "reduce_dtype": "float32"},
    "all in 16 bits": {"ranks": 2, "param_dtype": "bfloat16", "reduce_dtype": "bfloat16"},
    "kept, mixed precision": {"ranks": 2, "param_dtype": "bfloat16", "reshard_after_forward": False},
    "checkpointed": {"ranks": 4, "checkpointing": True},
    "nothing fetched ahead": {"ranks": 2, "backward_prefetch": "no_prefetch"},
    "fetched late": {"ranks": 2, "checkpointing": True, "backward_prefetch": "backward_post"},
    "fetched ahead both ways": {"ranks": 2, "backward_prefetch": "backward_pre", "forward_prefetch": True},
    "fetched ahead in the forward pass": {
        "ranks": 3,
        "checkpointing": True,
        "backward_prefetch": "no_prefetch",
        "forward_prefetch": True,
    },
    "hybrid": {"ranks": 2, "replicas": 2},
    "lora": {"ranks": 2, "lora": True},
    "lora, mixed precision": {"ranks": 3, "lora": True, "param_dtype": "bfloat16", "reduce_dtype": "float32"},
    "accumulated": {"ranks": 2, "gradient_accumulation_steps": 2},
    "flat parameters": {"ranks": 3, "use_orig_params": False},
    "flat parameters, kept, mixed precision": {
        "ranks": 2,
        "use_orig_params": False,
        "param_dtype": "bfloat16",
        "reshard_after_forward": False,
    },
    "flat parameters, checkpointed, accumulated": {
        "ranks": 2,
        "use_orig_params": False,
        "checkpointing": True,
        "gradient_accumulation_steps": 2,
    },
    "flat parameters, not sharded": {"ranks": 2, "use_orig_params": False, "shard": False},
    "not sharded": {"ranks": 2, "shard": False},
    "not sharded, mixed precision": {"ranks": 2, "shard": False, "param_dtype": "bfloat16", "reduce_dtype": "float32"},
    "not sharded, accumulated": {"ranks": 2, "shard": False, "gradient_accumulation_steps": 2},
}
OF_DEFAULT = (
    "flat parameters, checkpointed, accumulated",
    "three, uneven",
    "kept",
    "mixed precision",
    "nothing fetched ahead",
    "fetched ahead in the forward pass",
    "lora",
    "not sharded",
)


def on_meta() -> LlamaForCausalLM:
    with torch.device("meta"):
        return LlamaForCausalLM(LlamaConfig(**SIZES))


def script(start: str, cases: dict[str, Any]) -> str:
    return f"SIZES = {SIZES!r}\nLORA = {LORA!r}\nCASES = {cases!r}\n{textwrap.dedent(STEP).replace('START', start)}"


def traced(rank: int, options: dict[str, Any]) -> int:
    options = dict(options)
    steps = options.pop("gradient_accumulation_steps", 1)
    adapter = LoraConfig(**LORA) if options.pop("lora", False) else None
    workload = Workload.train(
        2,
        48,
        options.pop("checkpointing", False),
        optimizer="none",
        gradient_accumulation_steps=steps,
        adapter=adapter,
    )
    spread = Spread.fsdp1(**options, sync_each_batch=steps == 1)
    return above_start(trace_step(on_meta(), workload, job=RankOfJob(spread, rank)), *PHASES)


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[] if case in OF_DEFAULT else pytest.mark.slow) for case in CASES]
)
def test_a_rank_allocates_what_torchs_hooks_allocate_on_real_tensors(case: str) -> None:
    """To the byte: FullyShardedDataParallel on real parameters, in a group whose other ranks are not there."""
    options = CASES[case]
    for rank in sorted({0, options["ranks"] - 1}):
        world = options["ranks"] * options.get("replicas", 1)
        start = f"""dist.init_process_group("fake", store=FakeStore(), rank={rank}, world_size={world})"""
        found: dict[str, int] = {}
        names = {"FakeStore": FakeStore, "report": lambda into=found, **values: into.update(values)}
        exec(script(start, {case: options}), names)
        assert traced(rank, options) == found[case]


def test_real_ranks_allocate_nearly_the_same(rank_server: RankServer) -> None:
    """Gloo works in threads of its own, so when it lets go of a buffer differs from run to run."""
    cases = {name: CASES[name] for name in ("two", "kept", "mixed precision", "lora")}
    run = rank_server.run(script('dist.init_process_group("gloo")', cases), 2)
    for name, options in cases.items():
        for rank, found in enumerate(run.found):
            assert found[name] == pytest.approx(traced(rank, options), rel=0.1)


def test_the_forecast_of_a_job() -> None:
    step = Workload.train(2, 48)
    whole = predict_memory(on_meta(), step)
    four = predict_memory(on_meta(), step, spread=Spread.fsdp1(4))
    assert four.components["optimizer"] == pytest.approx(whole.components["optimizer"] / 4, rel=0.1)
    assert sorted(four.ranks) == [0, 1, 2, 3]
    assert "Spread.fsdp1(ranks=4)" in four.notes[1]
    assert four.ranks[0] < predict_memory(on_meta(), step, spread=Spread.fsdp1(2)).ranks[0]
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize("spread", [Spread.fsdp1(2), Spread.fsdp1(2, shard=False), Spread.fsdp1(2, cpu_offload=True)])
def test_every_flat_shard_is_in_the_run_that_is_replayed(spread: Spread) -> None:
    """Shards of several units bear the same name, that of the operation that made them."""
    assert predict_memory(on_meta(), Workload.train(2, 48), spread=spread).components["rounding"] >= 0


def test_offloaded_shards_leave_the_card() -> None:
    step = Workload.train(2, 48)
    kept, offloaded = (predict_memory(on_meta(), step, spread=Spread.fsdp1(2, cpu_offload=on)) for on in (False, True))
    assert offloaded.components["optimizer"] == 0
    weights = sum(parameter.nbytes for parameter in on_meta().parameters())
    assert kept.ranks[0] - offloaded.ranks[0] > weights / 2  # a shard, and two of the optimizer's state


def test_the_model_is_left_as_it_was() -> None:
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    before = {name: (parameter, parameter.data_ptr()) for name, parameter in model.named_parameters()}
    step = Workload.train(2, 48, adapter=LoraConfig(**LORA))
    first, again = (predict_memory(model, step, spread=Spread.fsdp1(2)) for _ in range(2))
    assert first == again
    after = dict(model.named_parameters())
    assert after.keys() == before.keys()
    assert all(after[name] is parameter and parameter.data_ptr() == at for name, (parameter, at) in before.items())
    ids = torch.ones(1, 4, dtype=torch.long)
    model(input_ids=ids, labels=ids).loss.backward()


def test_gradients_that_are_reduced_once_stay_whole_until_then() -> None:
    step = Workload.train(2, 48, gradient_accumulation_steps=4)
    each, once = (predict_memory(on_meta(), step, spread=Spread.fsdp1(4, sync_each_batch=on)) for on in (True, False))
    weights = sum(parameter.nbytes for parameter in on_meta().parameters())
    assert once.components["gradients"] >= weights * 0.9
    assert each.components["gradients"] < weights / 2


def test_a_job_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    LlamaConfig(**SIZES, architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path)
    command = ["predict", str(tmp_path), "--train", "2x48", "--fsdp1", "--card", "24GB", "--json"]
    assert main([*command, "--gpus", "2"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    expected = predict_memory(str(tmp_path), Workload.train(2, 48), spread=Spread.fsdp1(2))
    assert row["forecast"]["allocated_peak_bytes"] == expected.allocated_peak_bytes
    assert main(command) == 2
    assert "--gpus" in capsys.readouterr().err


def test_flat_parameters_are_trained_whole_or_not_at_all() -> None:
    step = Workload.train(2, 48, adapter=LoraConfig(**LORA))
    apart = Spread.fsdp1(3, use_orig_params=False, wrapped_by="accelerate")
    assert set(predict_memory(on_meta(), step, spread=apart).ranks) == {0, 1, 2}
    for way in (Spread.fsdp1(3), Spread.fsdp1(3, wrapped_by="accelerate")):
        predict_memory(on_meta(), step, spread=way)
    words = r"Pass use_orig_params=True, or(.|\n)*layers.0: 4 of 13 parameters are trained"
    with pytest.raises(ArgumentError, match=words):
        predict_memory(on_meta(), step, spread=Spread.fsdp1(3, use_orig_params=False))


def test_what_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"Spread.fsdp1 is for training. Spread.fsdp2 can"):
        predict_memory(on_meta(), Workload.generate(1, 8), spread=Spread.fsdp1(2))
    assert predict_memory(on_meta(), Workload.generate(1, 8), spread=Spread.fsdp2(2))
    wrong: list[dict[str, Any]] = [
        {"ranks": 0},
        {"ranks": 2, "replicas": 0},
        {"ranks": 2, "param_dtype": "int8"},
        {"ranks": 2, "shard": False, "replicas": 2},
        {"ranks": 2, "shard": False, "cpu_offload": True},
        {"ranks": 2, "cpu_offload": True, "sync_each_batch": False},
        {"ranks": 2, "backward_prefetch": "pre"},
        {"ranks": 2, "backward_prefetch": True},
    ]
    for options in wrong:
        with pytest.raises(ArgumentError):
            Spread.fsdp1(**options)


def test_what_accelerate_is_told_to_fetch_ahead_is_counted() -> None:
    """Most published configs of accelerate say BACKWARD_PRE, which is the default of torch and not of accelerate."""
    step = Workload.train(2, 48)

    def peak(**options: Any) -> int:
        found = predict_memory(on_meta(), step, spread=Spread.fsdp1(2, **options))
        assert ("has a backward_prefetch, pass it to Spread.fsdp1" in found.notes[1]) == (
            options == {"wrapped_by": "accelerate"}
        )
        return found.allocated_peak_bytes

    assert peak(wrapped_by="accelerate", backward_prefetch="BACKWARD_PRE") == peak()
    assert peak(wrapped_by="accelerate") == peak(backward_prefetch="no_prefetch") < peak()
    assert str(Spread.fsdp1(2, backward_prefetch="BACKWARD_POST")).endswith("backward_prefetch='backward_post')")


def test_the_units_of_an_adapter_are_those_of_accelerate_and_peft() -> None:
    """peft's policy, which the Trainer gives to accelerate: layers, matrices that are trained, the rest in the root."""
    with torch.device("meta"):
        base = LlamaForCausalLM(LlamaConfig(**SIZES)).to(torch.bfloat16)
        model: Any = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))
    policy: Any = fsdp_auto_wrap_policy(model)
    theirs = {name for name, module in model.named_modules() if policy(module, recurse=False, nonwrapped_numel=0)}
    *units, root = plan_units(model, flat=True)
    assert {name for unit in units for name in unit.modules} == theirs
    assert len(theirs) == (1 + 2 * 2) * SIZES["num_hidden_layers"]
    assert [name.rpartition("model.")[2] for name in root.parameters] == [
        "embed_tokens.weight",
        "norm.weight",
        "lm_head.weight",
    ]


def test_the_statistics_of_layers_in_4_bits_stay_whole_on_each_rank() -> None:
    """FSDP1 shards the codes; the statistics, larger without double quantization, are plain tensors of each layer."""
    config = LlamaConfig(**{**SIZES, "hidden_size": 512, "intermediate_size": 1408})
    step = Workload.train(1, 16, adapter=LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM"))
    found = {}
    for twice in (True, False):
        in_4_bits = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_use_double_quant": twice}
        in_4_bits |= {"bnb_4bit_compute_dtype": "bfloat16", "bnb_4bit_quant_storage": "bfloat16"}
        spread = Spread.fsdp1(2, param_dtype="bfloat16")
        options: dict[str, Any] = {"dtype": "bfloat16", "spread": spread, "prepare_for_kbit": "none"}
        found[twice] = predict_memory(config, step, quantization_config=in_4_bits, **options)
        assert found[twice].components["rounding"] >= 0  # the allocator holds all that the trace does
    more = found[False].components["weights"] - found[True].components["weights"]
    assert found[False].allocated_peak_bytes - found[True].allocated_peak_bytes == pytest.approx(more, rel=0.1)
    assert more > 100_000
