"""Every method and config class that the installed peft offers: forecast, or refused with an error that says why."""

from __future__ import annotations

import dataclasses
import inspect
import random
import warnings
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from allocator import peak_above_start
from allocator_truth import NEVER, above_start, tokens
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from test_trace_truth import COLUMNS, ROWS
from test_trace_truth import SIZES as LLAMA_SIZES
from tiny_models import tiny_config
from transformers import LlamaConfig, LlamaForCausalLM, LlavaModel

from safe_loading import AdapterError, ArgumentError, SafeLoadingError, Spread, TraceError, Workload, predict_memory
from safe_loading._memory.trace.over_ranks import RankOfJob
from safe_loading._memory.trace.trace_step import trace_step
from safe_loading._model.layout import source_model
from safe_loading._sharding.setup import assign_roles

SIZES: dict[str, Any] = {"architectures": ["LlamaForCausalLM"], **LLAMA_SIZES}
TARGETS = ["q_proj", "v_proj"]
# What a method needs beside its defaults on a model as small as this.
NEEDED: dict[str, dict[str, Any]] = {
    "AdaLora": {"total_step": 10},
    "AdaptionPrompt": {"adapter_len": 4, "adapter_layers": 2, "target_modules": None},
    "C3A": {"block_size": 8},
    "CPT": {"cpt_token_ids": [1, 2, 3, 4], "cpt_mask": [1] * 4, "cpt_tokens_type_mask": [1, 2, 3, 4]},
    "MultitaskPromptTuning": {"num_tasks": 2},
    "Poly": {"r": 4, "n_tasks": 2},
    "Road": {"group_size": 8},
    "Shadow": {"target_modules": None},
    "TrainableTokens": {"token_indices": [1, 2], "target_modules": None},
    "VBLoRA": {"num_vectors": 16, "vector_length": 16},
    "WaveFT": {"n_frequency": 16},
}
REFUSED = {"Shira": "sparse tensors", "Frod": "sparse tensors", "XLora": "`use_cache` must be False"}
LORA: dict[str, dict[str, Any]] = {
    "block-diagonal": {
        "use_bdlora": peft.BdLoraConfig(target_modules_bd_a=["q_proj"], target_modules_bd_b=["v_proj"], nblocks=2)
    },
    "corda": {"init_lora_weights": "corda"},
    "eva": {"init_lora_weights": "eva", "eva_config": peft.EvaConfig()},
    "gradients": {"init_lora_weights": "lora_ga", "lora_ga_config": peft.LoraGAConfig()},
    "kasa": {"kasa_config": peft.KasaConfig()},
    "mica": {"init_lora_weights": "mica"},
    "offloaded": {"use_dora": True, "runtime_config": peft.LoraRuntimeConfig(ephemeral_gpu_offload=True)},
    "qalora": {"use_qalora": True},
    "velora": {"velora_config": peft.VeloraConfig()},
    "velora at random": {"velora_config": peft.VeloraConfig(init_type="random")},
}
CLASSES = {cls.__name__.removesuffix("Config"): cls for cls in PEFT_TYPE_TO_CONFIG_MAPPING.values()}
OF_DEFAULT = random.Random(3).sample(sorted(set(CLASSES) - set(REFUSED)), 3)
NEW = ("Poly", "MultitaskPromptTuning", "CPT", "Shadow", "Cartridge", "AdaptionPrompt")  # in other tests the others


def config_of(name: str) -> Any:
    """A config of this class that peft can add to the tiny model; skips the test where a package is missing."""
    fields = {field.name for field in dataclasses.fields(CLASSES[name])}
    given: dict[str, Any] = {"task_type": "CAUSAL_LM"}
    given |= {"target_modules": TARGETS} if "target_modules" in fields else {}
    given |= {"num_virtual_tokens": 4} if "num_virtual_tokens" in fields else {}
    try:
        return CLASSES[name](**{**given, **NEEDED.get(name, {})})
    except ImportError as error:
        pytest.skip(str(error))


def llama(device: str, dtype: torch.dtype = torch.float32) -> Any:
    with torch.device(device):
        model: Any = LlamaForCausalLM(LlamaConfig(**SIZES))
    return model.to(dtype)


def marked(names: Any) -> list[Any]:
    return [pytest.param(name, marks=[] if name in OF_DEFAULT else pytest.mark.slow) for name in names]


@pytest.mark.parametrize("name", marked(sorted(CLASSES)))
def test_every_method_is_forecast_or_refused_with_the_reason(name: str) -> None:
    config = config_of(name)
    for workload in (Workload.train(ROWS, COLUMNS, adapter=config), Workload.generate(ROWS, COLUMNS, adapter=config)):
        for source in (llama("meta"), LlamaConfig(**SIZES)):
            if name in REFUSED:
                with pytest.raises((TraceError, AdapterError), match=REFUSED[name]):
                    predict_memory(source, workload)
            else:
                forecast = predict_memory(source, workload)
                weights = sum(parameter.nbytes for parameter in llama("meta").parameters())
                assert forecast.allocated_peak_bytes > weights
                assert (forecast.components["optimizer"] > 0) == (workload.kind == "train")


@pytest.mark.parametrize("name", marked(sorted(CLASSES)))
def test_configs_as_their_classes_make_them(name: str) -> None:
    """With no field set, and with any of those that people set first: whatever comes out is ours, and says what."""
    fields = {field.name for field in dataclasses.fields(CLASSES[name])}
    choices: list[dict[str, Any]] = [{}, {"task_type": "CAUSAL_LM"}]
    if "target_modules" in fields:
        choices += [
            {"task_type": "CAUSAL_LM", "target_modules": to} for to in (TARGETS, "all-linear", "no_such_module")
        ]
    for choice in choices:
        try:
            config = CLASSES[name](**choice)
        except (ImportError, ValueError):  # peft's own, before there is anything to forecast
            continue
        for workload in (Workload.train(1, 8, adapter=config), Workload.generate(1, 8, adapter=config)):
            try:
                assert predict_memory(llama("meta"), workload).allocated_peak_bytes
            except SafeLoadingError as error:
                words = str(error)
                assert len(words) > 80 and not words.endswith("None"), words  # noqa: PT018  # one of two ends


@pytest.mark.parametrize("name", sorted(LORA))
def test_what_a_lora_begins_with_does_not_change_its_forecast(name: str) -> None:
    """Values from data, and from a GPU, are not there in a forecast, and not needed."""
    config = peft.LoraConfig(r=4, target_modules=TARGETS, task_type="CAUSAL_LM", **LORA[name])
    forecast = predict_memory(llama("meta"), Workload.train(ROWS, COLUMNS, adapter=config))
    plain = peft.LoraConfig(r=4, target_modules=TARGETS, task_type="CAUSAL_LM", use_dora=config.use_dora)
    expected = predict_memory(llama("meta"), Workload.train(ROWS, COLUMNS, adapter=plain)).allocated_peak_bytes
    near = 0.0 if name in ("corda", "eva", "gradients", "offloaded", "qalora") else 0.01
    assert forecast.allocated_peak_bytes == pytest.approx(expected, rel=near)


@pytest.mark.parametrize("name", marked([*NEW, *sorted(set(CLASSES) - {*NEW, *REFUSED})]))
def test_the_peak_of_every_method_is_that_of_the_allocator(name: str) -> None:
    """To the byte: a training step with bfloat16 weights, and one of ``generate()`` with float32 weights.

    With weights of 16 bits the CPU makes copies to add tensors of two dtypes, which CUDA does not. Of the prompts that
    peft puts before a text, ``generate()`` holds something else than the forecast, 2.2 % of these few bytes at most.
    """
    config = config_of(name)
    # the buffer that CPT replaces is older than the measurement, which misses its end
    rel = {"CPT": 2e-3}.get(name, 0.0)
    assert _traced(name, config, train=True) == pytest.approx(_measured(name, config, train=True), rel=rel)
    rel = 0.022 if config.is_prompt_learning else 0.0
    assert _traced(name, config, train=False) == pytest.approx(_measured(name, config, train=False), rel=rel)


@pytest.mark.parametrize("name", ["kasa", "mica", "velora at random"])
def test_the_peak_of_a_variant_of_lora_is_that_of_the_allocator(name: str) -> None:
    """KaSA's SVDs of the base are computed when peft makes the adapter, and are in no step."""
    config = peft.LoraConfig(r=4, target_modules=TARGETS, task_type="CAUSAL_LM", **LORA[name])
    for train in (True, False):
        assert _traced(name, config, train=train) == _measured(name, config, train=train)


@pytest.mark.parametrize("at", [0, COLUMNS // 2])
def test_the_peak_of_alora_is_that_of_texts_that_turn_it_on(at: int) -> None:
    """Its layers compute from the invocation on: in a forecast the whole text, or as in the inputs that are passed."""
    invocation = [6, 7]
    config = peft.LoraConfig(r=4, target_modules=TARGETS, task_type="CAUSAL_LM", alora_invocation_tokens=invocation)
    ids = torch.full((ROWS, COLUMNS), 5)
    ids[:, at : at + 2] = torch.tensor(invocation)
    inputs = None if at == 0 else {"input_ids": ids}
    traced = _traced("alora", config, train=True, inputs=inputs)
    assert traced == _measured("alora", config, train=True, ids=ids)
    absent = _traced("alora", config, train=True, inputs={"input_ids": torch.full((ROWS, COLUMNS), 5)})
    assert absent < traced


def test_what_adalora_knows_of_its_parameters_is_counted() -> None:
    """A loop that calls ``update_and_allocate`` keeps three numbers for each parameter from the first step on."""
    config = peft.AdaLoraConfig(target_modules=TARGETS, task_type="CAUSAL_LM", total_step=10, tinit=5)
    adapted: Any = peft.get_peft_model(llama("cpu", torch.bfloat16), config)
    allocator = adapted.base_model.rankallocator

    def step() -> None:
        batch = tokens(adapted, ROWS, COLUMNS)
        labels = torch.full((ROWS, COLUMNS), 5)
        loss = adapted(**batch, labels=labels, use_cache=False).loss
        loss.backward()
        del loss
        adapted.base_model.update_and_allocate(1)
        adapted.zero_grad()

    step()
    kept = [*allocator.ipt.values(), *allocator.exp_avg_ipt.values(), *allocator.exp_avg_unc.values()]
    workload = Workload.train(ROWS, COLUMNS, optimizer="none", adapter=config)
    trace = trace_step(llama("meta", torch.bfloat16), workload)
    assert above_start(trace, "forward", "backward", "optimizer") == peak_above_start(step)
    forecast = predict_memory(adapted, workload.replace(adapter=None))
    assert forecast.components["optimizer"] == sum(tensor.nbytes for tensor in kept) > 0


@pytest.mark.parametrize("spread", [Spread.ddp(2), Spread.ddp(2, shard_optimizer=True)], ids=str)
def test_what_adalora_knows_is_counted_on_each_rank_that_holds_all(spread: Spread) -> None:
    """Whatever share of the optimizer it has; `update_and_allocate` runs over all parameters."""
    config = peft.AdaLoraConfig(target_modules=TARGETS, task_type="CAUSAL_LM", total_step=10, tinit=5)
    workload = Workload.train(ROWS, COLUMNS, optimizer="none", adapter=config)
    alone, rank = (predict_memory(llama("meta"), workload, spread=of) for of in (None, spread))
    assert rank.components["optimizer"] == alone.components["optimizer"] > 0
    assert not [note for note in rank.notes if "update_and_allocate" in note]


SHARDED = [Spread.fsdp2(2), Spread.fsdp1(2), Spread.zero(2, stage=2, reduce_bucket_size=1000)]


@pytest.mark.parametrize("spread", SHARDED, ids=lambda spread: spread.kind)
def test_what_adalora_cannot_know_of_shards_is_said_beside_the_figure(spread: Spread) -> None:
    """With a ``task_type`` peft computes the loss from parameters that FSDP has sharded again, and fails."""
    config = peft.AdaLoraConfig(target_modules=TARGETS, total_step=10, tinit=5)
    workload = Workload.train(ROWS, COLUMNS, optimizer="sgd", adapter=config)
    forecast = predict_memory(llama("meta"), workload, spread=spread)
    assert len([note for note in forecast.notes if "update_and_allocate" in note]) == 1
    trace = trace_step(llama("meta"), workload, job=RankOfJob(spread))
    in_step = [a for a in trace.allocations if a.component == "optimizer" and a.phase != "load"]
    assert in_step == []


@pytest.mark.parametrize("spread", [Spread.fsdp2(2), Spread.fsdp1(2)], ids=["FSDP2", "FSDP1"])
def test_adalora_of_a_task_cannot_run_on_shards_and_the_roads_can(spread: Spread) -> None:
    config = peft.AdaLoraConfig(target_modules=TARGETS, total_step=10, tinit=5, task_type="CAUSAL_LM")
    workload = Workload.train(ROWS, COLUMNS, adapter=config)
    with pytest.raises(ArgumentError, match=r"past FSDP's hooks(.|\n)*Train a LoraConfig, or AdaLoRA on one device"):
        predict_memory(llama("meta"), workload, spread=spread)
    adapted = peft.get_peft_model(llama("meta"), config)
    with pytest.raises(ArgumentError, match="PeftModelForCausalLM trains AdaLoRA"):
        assign_roles(adapted, (), 1 if spread.kind == "fsdp1" else 2, None)
    plain = workload.replace(adapter=peft.LoraConfig(target_modules=TARGETS, task_type="CAUSAL_LM"))
    assert predict_memory(llama("meta"), plain, spread=spread)
    assert predict_memory(llama("meta"), workload)
    assert predict_memory(llama("meta"), workload, spread=Spread.ddp(2))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"target_modules": TARGETS, "use_dora": True}, "reads the weights of DoRA past their forward"),
        ({"target_parameters": ["q_proj.weight"], "target_modules": []}, "target_parameters replaces a parameter"),
    ],
    ids=["dora", "parameters"],
)
def test_what_flat_shards_cannot_run_is_refused_in_a_forecast_as_in_a_wrap(
    options: dict[str, Any], reason: str
) -> None:
    workload = Workload.train(ROWS, COLUMNS, adapter=peft.LoraConfig(r=4, task_type="CAUSAL_LM", **options))
    model = llama("meta", torch.bfloat16)
    with pytest.raises(ArgumentError, match=rf"{reason}(.|\n)*version=2 \(Spread\.fsdp2\)\."):
        predict_memory(model, workload, spread=Spread.fsdp1(2))
    with pytest.raises(ArgumentError, match=reason):
        assign_roles(peft.get_peft_model(llama("cpu", torch.bfloat16), workload.adapter), (), 1, None)
    assert predict_memory(model, workload, spread=Spread.fsdp2(2))


def test_what_peft_leaves_on_the_host_is_not_on_the_card() -> None:
    """BOFT's permutations, which it copies to the card in each forward pass, unless the model is moved afterwards."""
    config = peft.BOFTConfig(target_modules=TARGETS, task_type="CAUSAL_LM", boft_block_size=4)
    workload = Workload.train(ROWS, COLUMNS, adapter=config, optimizer="none")
    moved, attached = (trace_step(llama("meta"), workload, attached_there=there) for there in (False, True))
    adapted: Any = peft.get_peft_model(llama("cpu"), config)
    permutations = {name: buffer.nbytes for name, buffer in adapted.named_buffers() if name.endswith("boft_P")}
    on_card = [{a.op for a in trace.allocations if a.device == 0} for trace in (moved, attached)]
    assert set(permutations) <= on_card[0]
    assert not set(permutations) & on_card[1]
    assert attached.problems == ()
    whole, less = (
        predict_memory(llama("meta"), workload, loaded_by=loaded_by).components["weights"]
        for loaded_by in ("to", "device_map")
    )
    assert whole - less == sum(permutations.values())


def _traced(name: str, config: Any, *, train: bool, inputs: dict[str, torch.Tensor] | None = None) -> int:
    model = llama("meta", torch.bfloat16 if train else torch.float32)
    if train:
        step = Workload.train(ROWS, COLUMNS, adapter=config, optimizer="none")
        return above_start(trace_step(model, step, inputs=inputs), "forward", "backward")
    step = Workload.generate(ROWS, COLUMNS, adapter=config, decode_steps=3)
    return above_start(trace_step(model, step), "prefill", "decode")


def _measured(name: str, config: Any, *, train: bool, ids: torch.Tensor | None = None) -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted: Any = peft.get_peft_model(llama("cpu", torch.bfloat16 if train else torch.float32), config)
    if name == "CPT":  # which computes something else with rows of zeros, as they are before the first step
        torch.nn.init.ones_(adapted.prompt_encoder.default.delta_embedding.weight.data)
    adapted.train(train)
    has_tasks = "task_ids" in inspect.signature(adapted.forward).parameters and name in (
        "Poly",
        "MultitaskPromptTuning",
    )

    def step() -> Any:
        batch = tokens(adapted, ROWS, COLUMNS)
        batch |= {} if ids is None else {"input_ids": ids.clone()}
        if has_tasks:
            batch["task_ids"] = torch.ones(ROWS, dtype=torch.long)
        if not train:
            return adapted.generate(**batch, max_new_tokens=4, do_sample=False, eos_token_id=NEVER)
        labels = torch.full((ROWS, COLUMNS), 5)
        loss = adapted(**batch, labels=labels, use_cache=False).loss
        return loss.backward()

    return peak_above_start(step)


def test_a_config_without_what_peft_needs_is_completed_as_advised() -> None:
    for config, mended in (
        (peft.PromptTuningConfig(), {"task_type": "CAUSAL_LM", "num_virtual_tokens": 20}),
        (peft.AdaptionPromptConfig(task_type="CAUSAL_LM"), {"adapter_len": 10, "adapter_layers": 2}),
    ):
        kind: Any = type(config)
        words = ", ".join(f"{name}={value!r}" for name, value in mended.items())
        with pytest.raises(AdapterError) as caught:
            predict_memory(llama("meta"), Workload.train(ROWS, COLUMNS, adapter=config))
        assert f"Pass {kind.__name__}({words})" in str(caught.value)
        assert predict_memory(
            llama("meta"), Workload.train(ROWS, COLUMNS, adapter=kind(**{"task_type": "CAUSAL_LM", **mended}))
        )


SAVED = ("Lora", "AdaLora", "LNTuning", "PrefixTuning", "PromptEncoder", "TrainableTokens")  # one of each kind


@pytest.mark.parametrize("name", SAVED)
def test_a_saved_adapter_is_forecast_as_its_config(name: str, tmp_path: Path) -> None:
    config = config_of(name)
    wanted = predict_memory(llama("meta"), Workload.train(ROWS, COLUMNS, adapter=config))
    config = config_of(name)
    config.inference_mode = True  # as peft saves it
    config.save_pretrained(tmp_path)
    found = predict_memory(llama("meta"), Workload.train(ROWS, COLUMNS, adapter=tmp_path))
    assert (found.components, found.allocated_peak_bytes) == (wanted.components, wanted.allocated_peak_bytes)


def test_what_peft_says_of_a_config_is_mended_as_advised() -> None:
    with pytest.raises(
        AdapterError, match=r"block size is 256\. peft\.get_peft_model says the same.*change what"
    ) as caught:
        predict_memory(llama("meta"), Workload.train(ROWS, COLUMNS, adapter=peft.C3AConfig(task_type="CAUSAL_LM")))
    with pytest.raises(ValueError) as of_peft:
        peft.get_peft_model(llama("cpu"), peft.C3AConfig(task_type="CAUSAL_LM"))
    assert str(of_peft.value) in str(caught.value)
    assert predict_memory(llama("meta"), Workload.train(ROWS, COLUMNS, adapter=config_of("C3A")))


def test_a_method_that_draws_for_itself_is_refused_by_name() -> None:
    config = peft.LoraConfig(target_modules=TARGETS, task_type="CAUSAL_LM", monteclora_config=peft.MontecloraConfig())
    step = Workload.train(ROWS, COLUMNS)
    with pytest.raises(TraceError, match=r"MonteCLoRA draws samples.*adapter=LoraConfig"):
        predict_memory(llama("meta"), step.replace(adapter=config))
    with pytest.raises(TraceError, match=r"MonteCLoRA draws samples.*adapter=LoraConfig"):
        predict_memory(peft.get_peft_model(llama("cpu"), config), step)


def test_a_step_that_trains_nothing_is_refused() -> None:
    config = peft.LoraConfig(r=4, target_modules=TARGETS, task_type="CAUSAL_LM", inference_mode=True)
    with pytest.raises(TraceError, match=r"Nothing is trained.*inference_mode=False"):
        predict_memory(llama("meta"), Workload.train(ROWS, COLUMNS, adapter=config))
    config.inference_mode = False
    assert predict_memory(llama("meta"), Workload.train(ROWS, COLUMNS, adapter=config))


def test_a_step_past_all_that_is_trained_is_refused() -> None:
    """A model without a loss of its own, whose trained tower does not run for want of images."""
    model: Any = LlavaModel(tiny_config("LlavaForConditionalGeneration"))
    tower = peft.LoraConfig(r=4, target_modules=r"vision_tower.*q_proj")
    with pytest.raises(TraceError, match=r"^Nothing is trained"):
        predict_memory(model, Workload.train(ROWS, COLUMNS, adapter=tower))


@pytest.mark.parametrize("method", ["Shira", "Frod", "MonteCLoRA"])
def test_what_no_trace_follows_is_refused_before_a_model_is_built(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampled = {"monteclora_config": peft.MontecloraConfig()}
    config = CLASSES["Lora"](target_modules=TARGETS, **sampled) if method == "MonteCLoRA" else config_of(method)
    config.base_model_name_or_path = str(tmp_path / "base")
    config.save_pretrained(tmp_path / "adapter")

    def build(*_: Any, **__: Any) -> Any:
        raise AssertionError

    monkeypatch.setattr(source_model, "quantized_meta_model", build)
    step = Workload.train(ROWS, COLUMNS, adapter=config)
    for model, workload in ((LlamaConfig(**SIZES), step), (tmp_path / "adapter", step.replace(adapter=None))):
        with pytest.raises(TraceError, match="cannot be traced"):
            predict_memory(model, workload)
