"""trace_step: what it counts, on which device, and that the model is afterwards what it was."""

from __future__ import annotations

import functools
import signal
import sys
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from allocator_truth import above_start
from interrupts import answers_for_a_device, interrupted_at
from peft import LoraConfig, get_peft_model
from tiny_models import tiny_config
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    DeepseekV3ForCausalLM,
    LlamaConfig,
    LlamaModel,
    MixtralConfig,
    PreTrainedModel,
    T5Config,
)
from transformers.utils import import_utils

from safe_loading import TraceError, Workload, predict_memory
from safe_loading._memory.trace import dispatch_mode
from safe_loading._memory.trace.ledger import Ledger
from safe_loading._memory.trace.operation import OperationCall
from safe_loading._memory.trace.operation_cache import CachedOutputs, OperationCache
from safe_loading._memory.trace.records import StepTrace
from safe_loading._memory.trace.trace_step import trace_step

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 101,
    "max_position_embeddings": 128,
}
SPLIT: dict[str, int | str] = {
    "model.embed_tokens": 0,
    "model.layers.0": 0,
    "model.layers.1": 1,
    "model.layers.2": 1,
    "model.norm": 1,
    "model.rotary_emb": 1,
    "lm_head": 1,
}


def llama(device: str = "meta", **changes: Any) -> Any:
    with torch.device(device):
        return AutoModelForCausalLM.from_config(LlamaConfig(**{**SIZES, **changes}), dtype=torch.bfloat16)


def weights(model: torch.nn.Module) -> int:
    return sum(p.nbytes for p in model.parameters()) + sum(b.nbytes for b in model.buffers())


def made_in(trace: StepTrace, module: str, component: str) -> int:
    """The bytes of a component that a module made, and the modules inside it."""
    return sum(
        made.bytes
        for made in trace.allocations
        if made.component == component and f"{made.module}.".startswith(f"{module}.")
    )


def test_weights_only_are_the_weights_and_ties_count_once() -> None:
    model = llama()
    assert trace_step(model, Workload.weights_only()).devices[0].peak_bytes == weights(model)
    tied = llama(tie_word_embeddings=True)
    tied.tie_weights()
    assert trace_step(tied, Workload.weights_only()).devices[0].peak_bytes == weights(tied) < weights(model)


def test_the_cache_is_the_model_s_own() -> None:
    trace = trace_step(llama(), Workload.generate(2, 16))
    cache = sum(made_in(trace, f"model.layers.{layer}.self_attn", "kv_cache") for layer in range(3))
    one = 2 * 2 * 2 * 16 * 2  # keys and values, rows, heads, width, bytes
    assert cache == 3 * one * (16 + 17)  # after the prompt, and after the token
    assert trace.devices[0].at_peak["kv_cache"] == 3 * one * 16


def test_checkpointing_leaves_the_inputs_of_layers() -> None:
    plain, checkpointed = (trace_step(llama(), Workload.train(2, 16, on)) for on in (False, True))
    layer = "model.layers.1"
    assert made_in(checkpointed, layer, "activations") == 2 * 16 * 64 * 2
    assert made_in(plain, layer, "activations") > 8 * made_in(checkpointed, layer, "activations")
    assert checkpointed.calls[f"{layer}.mlp"] == 2  # the layer itself is entered once, its parts again
    assert above_start(checkpointed, "forward") < above_start(plain, "forward")


def test_only_the_adapter_has_gradients_and_state() -> None:
    trace = trace_step(llama(), Workload.train(2, 16, adapter=LoraConfig(r=4, target_modules=["q_proj"])))
    elements = 3 * 2 * 4 * 64
    sizes = {
        c: sum(b.bytes for b in trace.allocations if b.component == c) for c in ("adapters", "gradients", "optimizer")
    }
    itemsize = 4  # peft keeps what it trains in float32
    assert sizes["adapters"] == elements * itemsize
    assert sizes["gradients"] == elements * itemsize
    assert sizes["optimizer"] == 2 * elements * itemsize + 6 * 4  # and a counter for each tensor


def test_several_devices_hold_their_own_and_exchange_the_hidden_states() -> None:
    trace = trace_step(llama(), Workload.generate(2, 16), placement=SPLIT)
    assert not trace.problems
    assert sum(made.bytes for made in trace.allocations if made.phase == "load") == weights(llama())
    hidden = [c for c in trace.crossings if c.module == "model.layers.1" and c.phase == "prefill"]
    assert [(c.source, c.target) for c in hidden] == [(0, 1)]
    assert hidden[0].bytes >= 2 * 16 * 64 * 2
    caches = {d: u.at_peak["kv_cache"] for d, u in trace.devices.items()}
    assert caches[1] == 2 * caches[0]


def test_a_layer_split_over_two_devices_is_a_problem_at_the_residual_add() -> None:
    trace = trace_step(llama(), Workload.generate(2, 16), placement={**SPLIT, "model.layers.1.self_attn": 0})
    assert trace.problems
    first = trace.problems[0]
    assert (first.op, first.module, set(first.devices)) == ("aten.add.Tensor", "model.layers.1", {0, 1})


def test_offloaded_weights_are_counted_where_they_run() -> None:
    placement = {**dict.fromkeys(SPLIT, 0), "model.layers.1": "cpu", "model.layers.2": "disk"}
    trace = trace_step(llama(), Workload.generate(2, 16), placement=placement)
    layer = weights(llama().model.layers[1])
    assert trace.devices["cpu"].peak_bytes == layer
    assert trace.devices["disk"].peak_bytes == layer
    staged = [b for b in trace.allocations if b.op == "staged"]
    assert sum(b.bytes for b in staged) == 2 * 2 * layer  # both layers, for the prompt and for the token
    assert {b.device for b in staged} == {0}


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_the_model_and_the_random_state_are_unchanged(device: str) -> None:
    model = llama(device).eval()
    before = {name: (id(t), t.requires_grad) for name, t in [*model.named_parameters(), *model.named_buffers()]}
    modules = {name: (id(m), m.training, set(vars(m))) for name, m in model.named_modules()}
    hooks = [len(m._forward_hooks) for m in model.modules()]
    content = [p.clone() for p in model.parameters()]
    random = torch.random.get_rng_state()
    adapter = LoraConfig(r=4, target_modules=["q_proj"], lora_dropout=0.5)
    trace_step(model, Workload.train(2, 16, gradient_checkpointing=True, adapter=adapter))
    assert torch.equal(random, torch.random.get_rng_state())
    assert before == {n: (id(t), t.requires_grad) for n, t in [*model.named_parameters(), *model.named_buffers()]}
    assert modules == {name: (id(m), m.training, set(vars(m))) for name, m in model.named_modules()}
    assert hooks == [len(m._forward_hooks) for m in model.modules()]
    assert all(p.grad is None for p in model.parameters())
    if device == "cpu":
        assert all(map(torch.equal, content, model.parameters()))


def test_a_map_of_the_base_model_holds_with_an_adapter_too() -> None:
    adapter = LoraConfig(r=4, target_modules=["q_proj"])
    trace = trace_step(llama(), Workload.train(2, 16, adapter=adapter), placement=SPLIT)
    assert not trace.problems
    assert trace.devices[1].at_peak["adapters"] == 2 * trace.devices[0].at_peak["adapters"]


def test_cached_outputs_are_those_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    config = MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    workload = Workload.train(2, 16, gradient_checkpointing=True, adapter=LoraConfig(r=4, target_modules=["q_proj"]))
    cached = [trace_step(model, work) for work in (workload, Workload.generate(2, 16))]
    monkeypatch.setattr(OperationCache, "key", lambda *_: None)
    monkeypatch.setattr(dispatch_mode, "changes_a_list", lambda _: False)
    for expected, work in zip(cached, (workload, Workload.generate(2, 16)), strict=True):
        computed = trace_step(model, work)
        assert (computed.allocations, computed.events) == (expected.allocations, expected.events)


@pytest.fixture
def operations_run(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The operations that traces run themselves, and do not answer from what they remember."""
    run: list[str] = []
    original = OperationCall.run

    def counted(self: OperationCall) -> object:
        run.append(str(self.func))
        return original(self)

    monkeypatch.setattr(OperationCall, "run", counted)
    return run


def test_operations_that_make_or_split_tensors_run_once(operations_run: list[str]) -> None:
    with torch.device("meta"):
        model: Any = DeepseekV3ForCausalLM(tiny_config("DeepseekV3ForCausalLM"))
    trace_step(model, Workload.train(2, 16))
    assert operations_run.count("aten.zeros.default") <= 2  # an optimizer's count of steps, for each parameter
    assert 0 < operations_run.count("aten.split_with_sizes.default") <= 3  # shapes, in each of the layers


def test_what_an_optimizer_does_to_lists_is_not_run(operations_run: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    cached: CachedOutputs = {}
    traces = [trace_step(llama(), Workload.train(2, length), cached_outputs=cached) for length in (16, 24)]
    assert "aten._fused_adamw_.default" not in operations_run
    assert traces[0].first_update == traces[1].first_update != ()
    monkeypatch.setattr(dispatch_mode, "changes_a_list", lambda _: False)
    by_torch = trace_step(llama(), Workload.train(2, 16))
    assert "aten._fused_adamw_.default" in operations_run
    assert (by_torch.events, by_torch.first_update) == (traces[0].events, traces[0].first_update)


def test_asking_for_a_device_is_no_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[str] = set()
    original = OperationCache.key

    def key(self: OperationCache, call: OperationCall) -> object:
        seen.add(str(call.func))
        return original(self, call)

    monkeypatch.setattr(OperationCache, "key", key)
    trace_step(llama(), Workload.train(2, 16), placement=SPLIT)
    assert "aten.mm.default" in seen
    assert not any(name.startswith("prim.device") for name in seen)


class Table(nn.Module):
    """Rows of a table that lies on a second device."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Embedding(8, 4)
        self.second = nn.Linear(4, 8, bias=False)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        rows: torch.Tensor = self.second.weight[input_ids]
        return rows.sum() + self.first(input_ids).sum()


def test_indices_of_another_device_are_refused_as_on_hardware() -> None:
    trace = trace_step(Table(), Workload.generate(2, 6), placement={"first": 0, "second": 1})
    assert next((problem.op, set(problem.devices)) for problem in trace.problems) == ("aten.index.Tensor", {0, 1})
    assert not trace_step(Table(), Workload.generate(2, 6)).problems


class Unknown(nn.Module):
    """A shape that depends on unknown numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x: torch.Tensor = self.embed(input_ids)
        return x[x > 0]


def test_what_cannot_be_traced_is_refused_with_the_reason_and_the_model_is_whole() -> None:
    model = Unknown()
    with pytest.raises(TraceError, match=r"Unknown cannot be traced for Workload.generate.*aten.*depends on values"):
        trace_step(model, Workload.generate(2, 6))
    assert type(model.embed.weight) is nn.Parameter
    with pytest.raises(TraceError, match="has no gradient_checkpointing_enable"):
        trace_step(model, Workload.train(2, 6, gradient_checkpointing=True))


class Mismatched(nn.Module):
    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return input_ids[:, :2] * input_ids[:, :3]


def test_an_operation_that_fails_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """torch logs it too, with its own lines."""
    with pytest.raises(TraceError, match=r"`return input_ids\[:, :2\] \* input_ids\[:, :3\]`\): .*dimension"):
        trace_step(Mismatched(), Workload.generate(2, 6))
    assert not caplog.messages


class Asking(nn.Module):
    """Asks what models of transformers ask, which take another branch if the answer is yes."""

    heard: ClassVar[list[bool]] = []

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        transient = torch.empty(77, device=input_ids.device)
        self.heard.append(import_utils.is_tracing(transient))
        del transient
        x: torch.Tensor = self.embed(input_ids)
        return x


def test_models_take_the_branch_of_a_real_run_and_what_they_ask_with_is_not_kept() -> None:
    before = import_utils.is_fake_tensor
    trace = trace_step(Asking(), Workload.generate(2, 6))
    assert Asking.heard == [False]
    assert import_utils.is_fake_tensor is before
    transient = next(i for i, block in enumerate(trace.allocations) if block.bytes == 77 * 4)
    after = next(i for i, block in enumerate(trace.allocations) if block.op.startswith("aten.embedding"))
    assert trace.events.index((transient, True)) < trace.events.index((after, False))


class Undetermined(nn.Module):
    """Reads what differs from run to run: a random number, and memory that was never written to."""

    heard: ClassVar[list[float]] = []

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        sizes = torch.empty(2, 2, dtype=torch.long, device=input_ids.device)
        sizes[:, 0] = 3
        self.heard.extend([torch.rand(()).item(), sizes.sum().item()])
        if torch.empty(1000, dtype=torch.long, device=input_ids.device).sum() == 0:
            return input_ids
        x: torch.Tensor = self.embed(input_ids)
        return x


def test_random_numbers_and_uninitialized_memory_decide_nothing() -> None:
    for seed in (1, 2):
        torch.manual_seed(seed)
        assert any("reads a number" in said for said in trace_step(Undetermined(), Workload.generate(2, 6)).assumptions)
    drawn, written, *again = Undetermined.heard
    assert again == [drawn, written]
    assert written == 6


def test_checkpointing_peaks_at_the_end_of_the_backward_pass_when_gradients_pile_up() -> None:
    model = llama(num_hidden_layers=12)
    use = trace_step(model, Workload.train(1, 4, gradient_checkpointing=True, optimizer="none")).devices[0]
    assert use.phase == "backward"
    late = [p for name, p in model.named_parameters() if not name.startswith(("model.embed", "model.layers.0."))]
    assert use.at_peak["gradients"] >= sum(p.nbytes for p in late)
    assert use.module.startswith("model.layers.0") or not use.module


def test_a_tie_has_one_gradient_and_one_state() -> None:
    tied = llama(tie_word_embeddings=True)
    tied.tie_weights()
    trace = trace_step(tied, Workload.train(2, 16))
    sizes = {c: sum(b.bytes for b in trace.allocations if b.component == c) for c in ("gradients", "optimizer")}
    parameters = list(tied.parameters())
    total = sum(p.nbytes for p in parameters)
    assert sizes["gradients"] == total
    assert sizes["optimizer"] == 2 * total + 4 * len(parameters)


class PassesOn(nn.Module):
    """A wrapper that takes any argument and passes it on."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)


def classifier() -> Any:
    with torch.device("meta"):
        return AutoModelForSequenceClassification.from_config(LlamaConfig(**SIZES, pad_token_id=0))


def t5() -> Any:
    with torch.device("meta"):
        return AutoModelForSeq2SeqLM.from_config(
            T5Config(d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4, vocab_size=101)
        )


def lora() -> Any:
    return get_peft_model(llama(), LoraConfig(r=4, target_modules=["q_proj"]))


@functools.cache
def plain_trace(make: Callable[[], Any], workload: Workload) -> StepTrace:
    """The trace of a model without wrappers, made once for all of them."""
    return trace_step(make(), workload)


@pytest.mark.each_value
@pytest.mark.parametrize("make", [llama, classifier, t5, lora])
@pytest.mark.parametrize("around", [PassesOn, lambda model: PassesOn(PassesOn(model)), nn.DataParallel])
@pytest.mark.parametrize("workload", [Workload.generate(2, 16), Workload.train(2, 16, optimizer="none")])
def test_a_wrapper_that_takes_any_argument_gets_those_of_the_model_in_it(
    make: Any, around: Any, workload: Workload
) -> None:
    plain, wrapped = plain_trace(make, workload), trace_step(around(make()), workload)
    assert wrapped.events == plain.events
    assert [(b.bytes, b.component, b.op) for b in wrapped.allocations if b.phase != "load"] == [
        (b.bytes, b.component, b.op) for b in plain.allocations if b.phase != "load"
    ]


class Strict(PreTrainedModel):
    """A class of one's own that takes less than the model in it."""

    config_class = LlamaConfig
    base_model_prefix = "model"

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model = LlamaModel(config)
        self.post_init()

    def forward(self, input_ids: torch.Tensor) -> Any:
        return self.model(input_ids)


def test_what_forward_does_not_take_is_not_passed() -> None:
    with torch.device("meta"):
        model = Strict(LlamaConfig(**SIZES))
    for workload in (Workload.generate(2, 16), Workload.train(2, 16)):
        trace = trace_step(model, workload)
        assert not trace.problems
        assert "decode" not in {made.phase for made in trace.allocations}


def test_no_line_of_python_runs_where_a_storage_ends_and_an_interrupt_would_be_lost() -> None:
    ledger, tensor = Ledger(), torch.empty(4)
    ledger.add(tensor, "aten.empty.memory_format")
    with interrupted_at(1) as lines:
        del tensor
    assert lines.count == 0
    assert ledger.events == [(0, False), (0, True)]


def test_ctrl_c_where_torch_asks_for_a_device_comes_at_the_next_operation() -> None:
    """C++ asks in functions that let no exception through: one would end the process."""
    asked = 0

    def local(frame: Any, event: str, _: Any) -> Any:
        nonlocal asked
        if event == "line" and answers_for_a_device(frame):
            asked += 1
            if asked == 40:
                signal.raise_signal(signal.SIGINT)
        return local

    before, handler = sys.gettrace(), signal.getsignal(signal.SIGINT)
    sys.settrace(lambda frame, *_: local if frame.f_code.co_name == "__torch_dispatch__" else None)
    try:
        with pytest.raises(KeyboardInterrupt):
            predict_memory(tiny_config("LlamaForCausalLM"), Workload.train(2, 16))
    finally:
        sys.settrace(before)
    assert asked >= 40
    assert signal.getsignal(signal.SIGINT) is handler


def test_the_autocast_of_the_caller_is_not_that_of_the_step() -> None:
    config, step = tiny_config("LlamaForCausalLM"), Workload.train(2, 16)
    alone = predict_memory(config, step).allocated_peak_bytes
    with torch.autocast("cpu", torch.bfloat16):
        assert predict_memory(config, step).allocated_peak_bytes == alone
