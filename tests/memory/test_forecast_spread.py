"""Steps of jobs over several ranks: torch's FSDP2 on fake tensors, held against real ranks and the CPU's allocator."""

from __future__ import annotations

import json
import sys
import textwrap
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from allocator_truth import above_start
from models import SIZES
from peft import LoraConfig, get_peft_model
from rank_server import RankServer
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import BertConfig, LlamaConfig, LlamaForCausalLM

from safe_loading import ArgumentError, Spread, TraceError, Workload, largest_micro_batch, predict_memory
from safe_loading.__main__ import main
from safe_loading._core.engines import is_older
from safe_loading._memory.trace.over_ranks import RankOfJob
from safe_loading._memory.trace.trace_step import trace_step

STEP = """
    import warnings
    import torch
    import torch.distributed as dist
    from allocator import peak_above_start
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, OffloadPolicy
    from transformers import LlamaConfig, LlamaForCausalLM

    from safe_loading._sharding import fsdp2
    from safe_loading._sharding.fsdp_units import plan_units

    warnings.simplefilter("ignore")
    START
    for name, options in CASES.items():
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(**SIZES)).train()
        ranks, replicas = options["ranks"], options.get("replicas", 1)
        shape, names = ((replicas, ranks), ("replicate", "shard")) if replicas > 1 else ((ranks,), ("shard",))
        mesh = dist.init_device_mesh("cpu", shape, mesh_dim_names=names)
        dtypes = {key: getattr(torch, options[key]) for key in ("param_dtype", "reduce_dtype") if key in options}
        units = plan_units(model)
        fsdp2.wrap(
            model, units, mesh, MixedPrecisionPolicy(**dtypes), OffloadPolicy(), (),
            options.get("reshard_after_forward", True),
        )
        if options.get("checkpointing"):
            model.gradient_checkpointing_enable(
                gradient_checkpointing_kwargs={"use_reentrant": False, "preserve_rng_state": False}
            )

        def step():
            ids = torch.full((2, 48), 5)
            batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.full((2, 48), 5)}
            del ids
            loss = model(**batch, use_cache=False).loss
            loss.backward()

        report(**{name: peak_above_start(step)})
    dist.destroy_process_group()
"""
CASES: dict[str, dict[str, Any]] = {
    "two": {"ranks": 2},
    "three, uneven": {"ranks": 3},
    "kept": {"ranks": 2, "reshard_after_forward": False},
    "mixed precision": {"ranks": 2, "param_dtype": "bfloat16", "reduce_dtype": "float32"},
    "checkpointed": {"ranks": 4, "checkpointing": True},
    "hybrid": {"ranks": 2, "replicas": 2},
}


def on_meta() -> LlamaForCausalLM:
    with torch.device("meta"):
        return LlamaForCausalLM(LlamaConfig(**SIZES))


def script(start: str, cases: dict[str, Any]) -> str:
    text = textwrap.dedent(STEP).replace("START", start)
    return f"SIZES = {SIZES!r}\nCASES = {cases!r}\n{text}"


def traced(rank: int, *, checkpointing: bool = False, **options: Any) -> int:
    workload = Workload.train(2, 48, checkpointing, optimizer="none")
    return above_start(trace_step(on_meta(), workload, job=RankOfJob(Spread.fsdp2(**options), rank)), *PHASES)


PHASES = ("forward", "backward")
REPLICATED_STEP = """
    import contextlib
    import warnings
    import torch
    import torch.distributed as dist
    from allocator import peak_above_start
    from torch.nn.parallel import DistributedDataParallel
    from transformers import LlamaConfig, LlamaForCausalLM

    warnings.simplefilter("ignore")
    START
    for name, options in CASES.items():
        torch.manual_seed(0)
        options = dict(options)
        model = LlamaForCausalLM(LlamaConfig(**SIZES)).train()
        steps = options.pop("gradient_accumulation_steps", 1)
        shared = options.pop("shard_optimizer", False)
        wrapped = DistributedDataParallel(model, **options)
        HOOK
        sizes = []
        if shared:
            from torch.distributed.optim import ZeroRedundancyOptimizer
            optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, fused=True)
        else:
            optimizer = None

        def step():
            names = ("input_ids", "attention_mask", "labels")
            batches = [{name: torch.full((2, 48), 1) for name in names} for _ in range(steps)]  # as in the Trainer
            for number, batch in enumerate(batches):
                with wrapped.no_sync() if number < steps - 1 else contextlib.nullcontext():
                    loss = wrapped(**batch, use_cache=False).loss
                    loss.backward()
                del loss

        for _ in range(3):  # after the first step the buckets are arranged anew, after the second with static_graph
            step()
            if optimizer is not None:
                optimizer.step()
            model.zero_grad(set_to_none=True)
        state = 0
        if optimizer is not None:
            state = sum(t.nbytes for held in optimizer.optim.state.values() for t in held.values() if t.dim())
        report(**{name: [peak_above_start(step), state]})
    dist.destroy_process_group()
"""
# the futures of torch's fake group hold nothing, which DDP reads unless it has a hook of its own
HOOK = """
        def at_once(state, bucket):
            done = torch.futures.Future()
            done.set_result(bucket.buffer())
            return done
        wrapped.register_comm_hook(None, at_once)
"""
REPLICATED: dict[str, dict[str, Any]] = {
    "ddp": {},
    "views": {"gradient_as_bucket_view": True},
    "small buckets": {"bucket_cap_mb": 0.05},
    "static": {"static_graph": True},
    "unused": {"find_unused_parameters": True},
    "accumulated": {"gradient_accumulation_steps": 2},
    "accumulated views": {"gradient_accumulation_steps": 2, "gradient_as_bucket_view": True},
    "zero 1": {"shard_optimizer": True},
}

OF_DEFAULT = ("views", "unused", "accumulated", "zero 1")


def replicated_step(options: dict[str, Any], rank: int) -> list[int]:
    options = dict(options)
    steps = options.pop("gradient_accumulation_steps", 1)
    workload = Workload.train(2, 48, optimizer="adamw", gradient_accumulation_steps=steps)
    trace = trace_step(on_meta(), workload, job=RankOfJob(Spread.ddp(2, **options), rank))
    state = sum(a.bytes for a in trace.allocations if a.component == "optimizer" and a.bytes > 4)
    return [above_start(trace, *PHASES), state if "shard_optimizer" in options else 0]


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[] if case in OF_DEFAULT else pytest.mark.slow) for case in REPLICATED]
)
def test_a_rank_of_ddp_allocates_what_the_reducer_allocates_on_real_tensors(case: str) -> None:
    for rank in (0, 1):
        start = f"""dist.init_process_group("fake", store=FakeStore(), rank={rank}, world_size=2)"""
        text = textwrap.dedent(REPLICATED_STEP.replace("        HOOK\n", HOOK)).replace("START", start)
        found: dict[str, Any] = {}
        names = {"FakeStore": FakeStore, "report": _into(found)}
        exec(f"SIZES = {SIZES!r}\nCASES = {{{case!r}: {REPLICATED[case]!r}}}\n{text}", names)
        assert replicated_step(REPLICATED[case], rank) == found[case]


@pytest.mark.parametrize("case", CASES)
def test_a_rank_allocates_what_torchs_hooks_allocate_on_real_tensors(case: str) -> None:
    """To the byte: fully_shard on real parameters, in a group whose other ranks are not there."""
    options = CASES[case]
    for rank in sorted({0, options["ranks"] - 1}):
        world = options["ranks"] * options.get("replicas", 1)
        start = f"""dist.init_process_group("fake", store=FakeStore(), rank={rank}, world_size={world})"""
        found: dict[str, int] = {}
        exec(script(start, {case: options}), {"FakeStore": FakeStore, "report": _into(found)})
        assert traced(rank, **options) == found[case]


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param([case for case in REPLICATED if case not in OF_DEFAULT], id="those that no other test takes"),
        pytest.param([*REPLICATED], id="all", marks=pytest.mark.slow),
    ],
)
def test_real_ranks_of_ddp_allocate_the_same(rank_server: RankServer, cases: list[str]) -> None:
    """Gloo reduces in the buckets; beside them it holds some bytes of its own for a moment."""
    text = textwrap.dedent(REPLICATED_STEP.replace("        HOOK\n", "")).replace(
        "START", 'dist.init_process_group("gloo")'
    )
    jobs = {case: REPLICATED[case] for case in cases}
    run = rank_server.run(f"SIZES = {SIZES!r}\nCASES = {jobs!r}\n{text}", 2)
    for name, options in jobs.items():
        for rank, found in enumerate(run.found):
            assert found[name] == pytest.approx(replicated_step(options, rank), rel=1e-3)


def test_the_optimizer_of_a_rank_is_its_share() -> None:
    """Each rank of ZeRO-1 has its own peak, and what an optimizer that is not run keeps is shared out too."""
    step = Workload.train(2, 48, optimizer="adamw_8bit")
    whole = predict_memory(on_meta(), step, spread=Spread.ddp(3))
    shared = predict_memory(on_meta(), step, spread=Spread.zero(3, stage=1))
    assert sorted(shared.ranks) == [0, 1, 2]
    assert shared.components["optimizer"] < whole.components["optimizer"] / 2
    assert whole.components["gradients"] > predict_memory(on_meta(), step).components["gradients"]
    assert set(whole.ranks.values()) == {whole.ranks[0]}


def test_the_moments_of_embeddings_are_in_32_bits_on_a_rank_too() -> None:
    """The Trainer names them by their module, whose weight is the shard that the optimizer has."""
    step = Workload.train(2, 48, optimizer="adamw_8bit")
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**{**SIZES, "vocab_size": 4096}))
    whole, shared = (predict_memory(model, step, spread=spread) for spread in (None, Spread.fsdp2(1)))
    assert shared.components["optimizer"] == whole.components["optimizer"]


def test_offloaded_shards_and_activations_leave_the_card() -> None:
    step = Workload.train(2, 48)
    kept, offloaded = (predict_memory(on_meta(), step, spread=Spread.fsdp2(2, cpu_offload=on)) for on in (False, True))
    assert offloaded.components["optimizer"] == offloaded.components["gradients"] == 0 < kept.components["optimizer"]
    assert offloaded.components["weights"] < kept.components["weights"]
    away = predict_memory(on_meta(), step.replace(activation_offload=True))
    assert away.components["saved_activations"] < predict_memory(on_meta(), step).components["saved_activations"] / 100


def test_gradients_that_are_reduced_once_stay_whole_until_then() -> None:
    step = Workload.train(2, 48, gradient_accumulation_steps=4)
    each, once = (predict_memory(on_meta(), step, spread=Spread.fsdp2(4, sync_each_batch=on)) for on in (True, False))
    weights = sum(parameter.nbytes for parameter in on_meta().parameters())
    assert once.components["gradients"] >= weights
    assert each.components["gradients"] < weights / 2


@pytest.mark.slow  # a search of a dozen traces
def test_the_largest_micro_batch_of_a_rank() -> None:
    spread, step = Spread.fsdp2(4), Workload.train(1, 48)
    memory = 2**29 + 40 * 2**20
    best = largest_micro_batch(on_meta(), step, memory, spread=spread)
    rows = best.workload.batch_size
    assert best.fits(memory)
    assert best == predict_memory(on_meta(), step.replace(batch_size=rows), spread=spread)
    assert not predict_memory(on_meta(), step.replace(batch_size=rows + 1), spread=spread).fits(memory)


def _into(found: dict[str, int]) -> Callable[..., None]:
    return lambda **values: found.update(values)


def test_real_ranks_allocate_nearly_the_same(rank_server: RankServer) -> None:
    """Gloo works in threads of its own, so when it lets go of a buffer differs from run to run."""
    run = rank_server.run(script('dist.init_process_group("gloo")', CASES_OF_TWO), 2)
    for name, options in CASES_OF_TWO.items():
        for rank, found in enumerate(run.found):
            assert found[name] == pytest.approx(traced(rank, **options), rel=0.1)


CASES_OF_TWO = {name: options for name, options in CASES.items() if options["ranks"] == 2 and "replicas" not in options}


def test_the_forecast_of_a_job() -> None:
    whole = predict_memory(on_meta(), Workload.train(2, 48))
    eight = predict_memory(on_meta(), Workload.train(2, 48), spread=Spread.fsdp2(8))
    assert eight.components["optimizer"] == pytest.approx(whole.components["optimizer"] / 8, rel=0.05)
    # what is computed is not sharded; how much of it is saved depends on where in the backward pass the peak is
    computed = [f.components["saved_activations"] + f.components["temporary"] for f in (whole, eight)]
    assert computed[1] == pytest.approx(computed[0], rel=0.02)
    assert sorted(eight.ranks) == [*range(8)]
    assert len({eight.ranks[rank] for rank in range(7)}) == 1
    assert eight.ranks[7] < eight.ranks[0]  # 101 words over 8 ranks
    assert max(eight.ranks.values()) <= eight.allocated_peak_bytes
    assert whole.ranks == {}
    assert "One of 8 ranks" in eight.notes[1]
    hybrid = predict_memory(on_meta(), Workload.train(2, 48), spread=Spread.fsdp2(8, replicas=2))
    assert hybrid.allocated_peak_bytes == pytest.approx(eight.allocated_peak_bytes, rel=0.05)


def test_an_adapter_is_sharded_too_and_the_model_is_left_as_it_was() -> None:
    model = on_meta()
    classes = [type(module) for module in model.modules()]
    lora = LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
    steps = Workload.train(2, 48, adapter=lora, gradient_accumulation_steps=2)
    first, again = (predict_memory(model, steps, spread=Spread.fsdp2(2)) for _ in range(2))
    assert first == again
    assert first.components["adapters"] < predict_memory(model, steps).components["adapters"]
    assert [type(module) for module in model.modules()] == classes
    assert not torch.distributed.is_initialized()


def test_layers_that_an_adapter_replicates_share_their_weights_on_a_rank_too() -> None:
    lora = LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM", layer_replication=[[0, 2], [0, 2]])
    options: dict[str, Any] = {"spread": Spread.fsdp2(ranks=2), "context_bytes": 0}
    by_config = predict_memory(on_meta(), Workload.train(2, 48, adapter=lora), **options)
    attached = predict_memory(get_peft_model(on_meta(), lora), Workload.train(2, 48), **options)
    assert by_config.components == attached.components


def test_what_stops_a_rank_of_a_packed_base_is_said_in_its_own_words() -> None:
    packed: dict[str, Any] = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    config = LlamaConfig(**SIZES, architectures=["LlamaForCausalLM"])
    lora = LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
    options: dict[str, Any] = {"quantization_config": packed}
    with pytest.raises(ArgumentError, match=r"^FSDP1 cannot shard"):
        predict_memory(config, Workload.train(2, 48, adapter=lora), spread=Spread.fsdp1(2), **options)
    with pytest.raises(TraceError, match=r"^Nothing is trained"):
        predict_memory(config, Workload.train(2, 48), spread=Spread.ddp(2), **options)
    assert predict_memory(config, Workload.train(2, 48, adapter=lora), spread=Spread.ddp(2), **options)


def test_a_job_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    LlamaConfig(**SIZES, architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path)
    assert main(["predict", str(tmp_path), "--train", "2x48", "--gpus", "2", "--card", "24GB", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    expected = predict_memory(str(tmp_path), Workload.train(2, 48), spread=Spread.fsdp2(2))
    assert row["forecast"]["allocated_peak_bytes"] == expected.allocated_peak_bytes


WRAPPERS: tuple[Any, ...] = ("safe_loading", "accelerate")
SPREADS = {
    ("--fsdp", "--cpu-offload"): Spread.fsdp2(2, cpu_offload=True),
    ("--fsdp1", "--cpu-offload"): Spread.fsdp1(2, cpu_offload=True),
    ("--wrapped-by", "accelerate"): Spread.fsdp2(2, wrapped_by="accelerate"),
    ("--zero", "1"): Spread.zero(2, stage=1),
}


def test_the_ways_to_spread_a_job_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    LlamaConfig(**SIZES, architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path)
    command = ["predict", str(tmp_path), "--train", "2x48", "--card", "24GB", "--json"]
    for words, spread in SPREADS.items():
        assert main([*command, "--gpus", "2", *words]) == 0
        (row,) = json.loads(capsys.readouterr().out)["rows"]
        expected = predict_memory(str(tmp_path), Workload.train(2, 48), spread=spread)
        assert row["forecast"]["ranks"] == {str(rank): size for rank, size in expected.ranks.items()}
    assert main([*command, "--activation-offload"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    offloaded = predict_memory(str(tmp_path), Workload.train(2, 48, activation_offload=True))
    assert row["forecast"]["allocated_peak_bytes"] == offloaded.allocated_peak_bytes
    wrong_words = (
        (["--ddp"], "--gpus"),
        (["--gpus", "2", "--ddp", "--cpu-offload"], "--fsdp"),
        (["--gpus", "2", "--zero", "1", "--wrapped-by", "accelerate"], "--fsdp"),
    )
    for wrong, text in wrong_words:
        assert main([*command, *wrong]) == 2
        assert text in capsys.readouterr().err


@pytest.mark.parametrize("kind", [Spread.fsdp1, Spread.fsdp2])
def test_a_scalar_is_whole_on_a_rank_and_takes_what_a_row_of_one_does(kind: Any) -> None:
    """As CLIP's temperature, which FSDP refuses to split, and the wrap keeps from it."""

    def peak(shape: tuple[int, ...]) -> int:
        model = LlamaForCausalLM(LlamaConfig(**SIZES))
        model.register_parameter("scale", torch.nn.Parameter(torch.ones(shape)))
        return predict_memory(model, Workload.train(2, 16), spread=kind(2), context_bytes=0).allocated_peak_bytes

    assert peak(()) == pytest.approx(peak((1,)), abs=4096)


def test_the_units_of_accelerate() -> None:
    """They are ours since accelerate 1.15, but a model in 16 bits is trained in float32."""
    step = Workload.train(2, 48)
    own, theirs = (predict_memory(on_meta(), step, spread=Spread.fsdp2(2, wrapped_by=by)) for by in WRAPPERS)
    if is_older("accelerate", "1.15"):
        assert own.allocated_peak_bytes < theirs.allocated_peak_bytes
    else:
        assert own.allocated_peak_bytes == theirs.allocated_peak_bytes
    assert 'wrapped_by="accelerate"' in own.notes[1]
    assert "accelerate makes" in theirs.notes[1]
    half: Any = {"param_dtype": "bfloat16", "wrapped_by": "accelerate"}
    for spread in (Spread.fsdp2(2, **half), Spread.fsdp1(2, **half)):
        made = [predict_memory(LlamaConfig(**SIZES), step, spread=spread, dtype=each) for each in (None, "bfloat16")]
        assert made[0].allocated_peak_bytes == made[1].allocated_peak_bytes


def test_a_layer_around_the_embeddings_is_no_unit_of_accelerate() -> None:
    """Of BERT's two accelerate would wrap one inside the other, which torch refuses."""
    bert = BertConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, vocab_size=101)
    spread = Spread.fsdp2(2, wrapped_by="accelerate")
    assert predict_memory(bert, Workload.train(2, 16), spread=spread, auto_class="BertForSequenceClassification").ranks


def test_an_accelerate_without_fsdp2_is_said_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "accelerate.utils.fsdp_utils", None)
    with pytest.raises(ArgumentError, match="pip install -U accelerate"):
        predict_memory(on_meta(), Workload.train(2, 8), spread=Spread.fsdp2(2, wrapped_by="accelerate"))


def test_what_is_refused(one_rank: None) -> None:
    step = Workload.train(1, 8)
    with pytest.raises(ArgumentError, match="has one already"):
        predict_memory(on_meta(), step, spread=Spread.fsdp2(2))
    with pytest.raises(ArgumentError, match="needs a step"):
        predict_memory(on_meta(), Workload.weights_only(), spread=Spread.fsdp2(2))
    with pytest.raises(ArgumentError, match="pass a Spread"):
        predict_memory(on_meta(), step, spread=8)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="for training"):
        predict_memory(on_meta(), Workload.generate(1, 8), spread=Spread.ddp(2))
    with pytest.raises(ArgumentError, match="static_graph=1: True or False"):
        Spread.ddp(2, static_graph=1)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="bucket_cap_mb=0"):
        Spread.ddp(2, bucket_cap_mb=0)
    no_wrapper = {"ranks": 2, "wrapped_by": "deepspeed"}
    for wrong in ({"ranks": 0}, {"ranks": 2, "replicas": 0}, {"ranks": 2, "param_dtype": "int8"}, no_wrapper):
        with pytest.raises(ArgumentError):
            Spread.fsdp2(**wrong)  # type: ignore[arg-type]
    sharded = LlamaForCausalLM(LlamaConfig(**SIZES))
    fully_shard(sharded)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its own deprecation
        flat = FullyShardedDataParallel(LlamaForCausalLM(LlamaConfig(**SIZES)), device_id=torch.device("cpu"))
    for model in (sharded, flat):
        with pytest.raises(ArgumentError, match=r"sharded already(.|\n)*Spread.fsdp2"):
            predict_memory(model, step)
