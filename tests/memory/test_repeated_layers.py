"""Traces in which a few of the layers that are alike run: equal to those in which all run, or made anew."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig
from tiny_models import causal_lm_classes, config_class, image_text_classes, skip_unless_buildable, tiny_config
from transformers import (
    BertConfig,
    Gemma3TextConfig,
    GlmMoeDsaConfig,
    GPT2Config,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    PreTrainedConfig,
    T5Config,
)
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from safe_loading import Workload, meta_model
from safe_loading._memory.trace import trace_step as module_of_trace
from safe_loading._memory.trace.records import StepTrace
from safe_loading._memory.trace.repeated_layers import periods, repeated_layers
from safe_loading._memory.trace.trace_step import trace_step
from safe_loading.errors import ArgumentError, TraceError

LAYERS = 14
TINY = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_hidden_layers": LAYERS,
    "vocab_size": 64,
}
MIXTURE = {**TINY, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
LORA = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")


def llama(**options: Any) -> torch.nn.Module:
    return meta_model(LlamaConfig(**(TINY | options)))


def events_of(trace: StepTrace) -> list[object]:
    """Return the events; those that free one after the other in the order of what they free."""
    found: list[object] = []
    freed: list[int] = []
    for index, is_freed in trace.events:
        if is_freed:
            freed.append(index)
        else:
            found += [*sorted(freed), ("made", index)]
            freed = []
    return found + sorted(freed)


def assert_equal(found: StepTrace, whole: StepTrace) -> None:
    for field in dataclasses.fields(StepTrace):
        if field.name != "events":
            assert getattr(found, field.name) == getattr(whole, field.name), field.name
    assert events_of(found) == events_of(whole)


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """What each trace was allowed: to skip layers, or not."""
    traced: Callable[..., StepTrace] = module_of_trace._traced
    told: list[bool] = []

    def trace(*arguments: Any, skip_layers: bool = False, **options: Any) -> StepTrace:
        told.append(skip_layers)
        return traced(*arguments, skip_layers=skip_layers, **options)

    monkeypatch.setattr(module_of_trace, "_traced", trace)
    return told


STEP = Workload.train(2, 16)
STEPS = {
    "full": STEP,
    "checkpoints": STEP.replace(gradient_checkpointing=True),
    "LoRA": STEP.replace(adapter=LORA),
    "LoRA, checkpoints": STEP.replace(adapter=LORA, gradient_checkpointing=True),
    "micro-batches": STEP.replace(gradient_accumulation_steps=3),
    "autocast": STEP.replace(autocast="bfloat16"),
    "SGD": STEP.replace(optimizer=torch.optim.SGD),
    "offloaded": STEP.replace(activation_offload=True),
}


@pytest.mark.parametrize("name", STEPS)
def test_a_few_layers_stand_for_all(name: str, ran: list[bool]) -> None:
    model = llama()
    before = [(path, vars(module).keys()) for path, module in model.named_modules()]
    found = trace_step(model, STEPS[name])
    assert ran == [True]
    assert_equal(found, trace_step(model, STEPS[name], every_layer=True))
    assert [(path, vars(module).keys()) for path, module in model.named_modules()] == before


CONFIGS: dict[str, PreTrainedConfig] = {
    "GPT-2": GPT2Config(n_embd=32, n_head=4, n_layer=LAYERS, vocab_size=64),
    "Mixtral": MixtralConfig(**MIXTURE),
    "Gemma 3": Gemma3TextConfig(**(TINY | {"num_hidden_layers": 26}), head_dim=8, sliding_window=8),
    "BERT": BertConfig(**TINY),
    "T5": T5Config(d_model=32, d_ff=48, num_layers=LAYERS, num_heads=4, d_kv=8, vocab_size=64),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_architectures(name: str, ran: list[bool]) -> None:
    model = meta_model(CONFIGS[name], auto_class="BertForMaskedLM" if name == "BERT" else None)
    found = trace_step(model, STEP)
    assert_equal(found, trace_step(model, STEP, every_layer=True))


def glm(layers: int, **options: Any) -> torch.nn.Module:
    """GLM-5, whose layers return the positions that they attend to, for the next one."""
    tiny = tiny_config("GlmMoeDsaForCausalLM").to_dict()
    of_layers = dict.fromkeys(("layer_types", "mlp_layer_types", "indexer_types"))
    return meta_model(GlmMoeDsaConfig(**tiny | of_layers | {"num_hidden_layers": layers} | options))


def test_what_a_layer_returns_beside_its_output_is_handed_on(ran: list[bool]) -> None:
    model = glm(30)
    found = trace_step(model, STEP)
    assert ran == [True]
    assert_equal(found, trace_step(model, STEP, every_layer=True))


@pytest.mark.parametrize(
    "name",
    [
        *("LoRA, checkpoints", "micro-batches"),
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("full", "checkpoints")),
    ],
)
def test_what_layers_of_one_kind_pass_to_those_of_another_one_is_handed_on(name: str, ran: list[bool]) -> None:
    """GLM-5.2: a layer finds the positions that the next one attends to as well."""
    own = ("full", "full", *(("shared", "full") * 12), "shared")
    model = glm(len(own), indexer_types=list(own), first_k_dense_replace=2)
    before = [(path, vars(module).keys()) for path, module in model.named_modules()]
    found = trace_step(model, STEPS[name])
    assert ran == [True]
    assert_equal(found, trace_step(model, STEPS[name], every_layer=True))
    assert [(path, vars(module).keys()) for path, module in model.named_modules()] == before


@pytest.mark.parametrize(
    ("kinds", "units"),
    [
        ("a" * 16, [1] * 16),
        ("ab" * 8, [2] * 8),
        ("aa" + "bbbc" * 10 + "bb", [1, 1, *[4] * 10, 1, 1]),
        ("abcd" * 7, [1] * 28),
        ("ab" * 8 + "c" * 20, [1] * 36),
        ("c" * 4 + "ab" * 8 + "d", [1] * 4 + [2] * 8 + [1]),
    ],
)
def test_kinds_of_layers_are_cut_into_periods(kinds: str, units: list[int]) -> None:
    found, of_units = periods([ord(kind) for kind in kinds])
    assert [len(layers) for layers in found] == units
    assert [number for layers in found for number in layers] == list(range(len(kinds)))
    words = [kinds[layers[0] : layers[-1] + 1] for layers in found]
    assert [of_units.index(of) for of in of_units] == [words.index(word) for word in words]


def test_a_step_that_fails_before_the_first_layer_is_not_tried_again(ran: list[bool]) -> None:
    model = llama()
    model.get_input_embeddings().register_forward_hook(lambda _, __, output: output.numpy())
    with pytest.raises(TraceError):
        trace_step(model, STEP)
    assert ran == [True]


def test_a_size_that_is_a_layers_number_makes_no_kind_of_its_own() -> None:
    (layers,) = repeated_layers(llama(num_attention_heads=8, hidden_size=64, num_hidden_layers=20))
    assert set(layers.kinds) == {0}


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({*causal_lm_classes(), *image_text_classes()}))
def test_every_class_with_the_layers_of_its_default_config(name: str) -> None:
    skip_unless_buildable(name)
    try:
        model = meta_model(config_class(name)(), auto_class=name)
        whole = trace_step(model, Workload.train(1, 64), every_layer=True)
    except (ArgumentError, TraceError) as error:
        pytest.skip(f"its default config makes no model, or none whose step can be traced: {error}")
    assert_equal(trace_step(model, Workload.train(1, 64)), whole)


def test_layers_of_two_kinds_are_told_apart() -> None:
    config: Any = CONFIGS["Gemma 3"]
    (layers,) = repeated_layers(meta_model(config))
    assert layers.skipped
    assert {config.layer_types[number] for number in layers.run} == {"full_attention", "sliding_attention"}
    assert all(config.layer_types[number] == config.layer_types[of] for number, of in layers.skipped.items())


def change_frozen(model: LlamaForCausalLM) -> None:
    model.requires_grad_(False)
    model.model.layers[9].requires_grad_(True)


def change_width(model: LlamaForCausalLM) -> None:
    model.model.layers[6].mlp = type(model.model.layers[6].mlp)(LlamaConfig(**TINY | {"intermediate_size": 80})).to(
        "meta"
    )


def change_tie(model: LlamaForCausalLM) -> None:
    model.model.layers[4].mlp = model.model.layers[3].mlp


@pytest.mark.parametrize("change", [change_frozen, change_width, change_tie])
def test_a_model_with_a_layer_of_its_own(change: Callable[[Any], None]) -> None:
    model = llama()
    change(model)
    assert_equal(trace_step(model, STEP), trace_step(model, STEP, every_layer=True))


def every_second(layer: Any, hidden: torch.Tensor, *arguments: Any, **options: Any) -> Any:
    """A forward that depends on the layer's number, of which its attributes say nothing else."""
    found = LlamaDecoderLayer.forward(layer, hidden, *arguments, **options)
    return found + hidden.exp() if layer.self_attn.layer_idx > 7 else found


def kept(layer: Any, hidden: torch.Tensor, *arguments: Any, **options: Any) -> Any:
    """A forward whose result outlives the step."""
    found = LlamaDecoderLayer.forward(layer, hidden, *arguments, **options)
    layer.self_attn.config.kept = [*getattr(layer.self_attn.config, "kept", ()), found]
    return found


@pytest.mark.parametrize("forward", [every_second, kept])
def test_where_layers_differ_all_of_them_run(forward: Any, ran: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    class Layer(LlamaDecoderLayer):
        pass

    Layer.forward = forward  # type: ignore[method-assign]  # a forward for this test
    model: Any = llama()
    for layer in model.model.layers:
        layer.__class__ = Layer
    found = trace_step(model, STEP)
    assert ran == [True, False]
    vars(model.config).pop("kept", None)
    assert_equal(found, trace_step(model, STEP, every_layer=True))


def _wide(hidden: torch.Tensor, times: int) -> torch.Tensor:
    for _ in range(times):
        hidden = hidden + hidden.exp()
    return hidden


def _third(layer: Any) -> int:
    number = layer.self_attn.layer_idx
    return 4 if (number + 1) % 3 == 0 else 1


def _listed(layer: Any) -> int:
    return 4 if layer.self_attn.layer_idx in (3, 5) else 1


def _between(layer: Any) -> int:
    return 4 if 3 < layer.self_attn.layer_idx < 6 else 1


def _bound(layer: Any) -> int:
    return 4 if layer.self_attn.layer_idx > 4 else 1


def _first(layer: Any) -> int:
    return 4 if layer.self_attn.layer_idx == 0 else 1


@property  # type: ignore[misc]  # as a class of a repository may have it
def _property(layer: Any) -> Any:
    number = layer.self_attn.layer_idx
    return lambda: 4 if number in (3, 5) else 1


@pytest.mark.parametrize(
    "times",
    [_third, _listed, _between, _bound, _first, _property],
    ids=["third", "list", "bounds", "bound", "first", "property"],
)
def test_layers_whose_code_asks_for_their_number_stand_for_no_others(times: Any) -> None:
    class Layer(LlamaDecoderLayer):
        def forward(self, hidden: torch.Tensor, *arguments: Any, **options: Any) -> Any:
            return _wide(super().forward(hidden, *arguments, **options), self.times())

    Layer.times = times  # type: ignore[attr-defined]
    model: Any = llama()
    for layer in model.model.layers:
        layer.__class__ = Layer
    assert bool(repeated_layers(model)) == (times in (_bound, _first))  # which a comparison sees, or changes nothing
    assert_equal(trace_step(model, STEP), trace_step(model, STEP, every_layer=True))


@pytest.mark.parametrize("kind", ["partial", "closure", "default", "numpy", "slots"])
def test_what_a_layer_keeps_of_its_own_tells_it_from_others(kind: str) -> None:
    class Slots:
        __slots__ = ("times",)

        def __init__(self, times: int) -> None:
            self.times = times

    class Layer(LlamaDecoderLayer):
        kept: Any

        def forward(self, hidden: torch.Tensor, *arguments: Any, **options: Any) -> Any:
            found: Any = super().forward(hidden, *arguments, **options)
            if callable(self.kept):
                return self.kept(found)
            return _wide(found, int(getattr(self.kept, "times", self.kept)))

    def kept(times: int) -> Any:
        made = {"partial": functools.partial(_wide, times=times), "closure": lambda hidden: _wide(hidden, times)}
        made["default"] = lambda hidden, times=times: _wide(hidden, times)
        return {**made, "numpy": np.int64(times), "slots": Slots(times)}[kind]

    model: Any = llama()
    for number, layer in enumerate(model.model.layers):
        layer.__class__ = Layer
        layer.kept = kept(4 if number in (3, 5) else 1)
    assert_equal(trace_step(model, STEP), trace_step(model, STEP, every_layer=True))
    if kind != "slots":  # of which nothing is known
        (layers,) = repeated_layers(model)
        assert len(set(layers.kinds)) == 2
