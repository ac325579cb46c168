"""The workload of a trainer's arguments: a Trainer's own, and those of trl's trainers."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import ParallelismConfig
from peft import LoraConfig
from transformers import BitsAndBytesConfig, LlamaConfig, Seq2SeqTrainingArguments, TrainingArguments

from safe_loading import (
    ArgumentError,
    Workload,
    audit_model,
    largest_micro_batch,
    plan_device_map,
    predict_memory,
)

LORA = LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
CONFIG = LlamaConfig(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, vocab_size=1001)


@pytest.fixture
def trl() -> Any:
    return pytest.importorskip("trl", minversion="1.16", reason="this trl has other defaults")


def plain(folder: Path, **said: Any) -> TrainingArguments:
    return TrainingArguments(str(folder), use_cpu=True, report_to=[], **said)


def test_the_arguments_of_a_trainer(tmp_path: Path) -> None:
    assert Workload.from_training_args(plain(tmp_path), 64) == Workload.train(8, 64)
    said = plain(
        tmp_path,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=4,
        gradient_checkpointing=True,
        bf16=True,
        optim="adamw_bnb_8bit",
        eval_strategy="epoch",
        label_smoothing_factor=0.1,
    )
    assert Workload.from_training_args(said, 128, LORA) == Workload.train(
        2,
        128,
        gradient_checkpointing=True,
        optimizer="adamw_8bit",
        adapter=LORA,
        autocast="bfloat16",
        gradient_accumulation_steps=4,
        eval_batch_size=8,
        label_smoothing=True,
    )
    assert Workload.from_training_args(plain(tmp_path, optim="adamw_torch"), 64).optimizer == "adamw_foreach"
    if hasattr(said, "activation_checkpointing"):
        assert Workload.from_training_args(plain(tmp_path, activation_checkpointing=True), 64).gradient_checkpointing
    cached = plain(tmp_path, use_cache=True)
    assert Workload.from_training_args(cached, 64) == Workload.train(8, 64, use_cache=True)


def test_the_options_of_checkpointing_are_those_that_the_trainer_passes_on(tmp_path: Path) -> None:
    def asked(**options: Any) -> object:
        given = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": options}
        return Workload.from_training_args(plain(tmp_path, **given), 64).gradient_checkpointing

    assert asked() is asked(use_reentrant=False) is asked(offload=False, use_reentrant=False) is True
    # torch's own default, where it is given an option
    assert asked(use_reentrant=True) == asked(preserve_rng_state=False) == {"use_reentrant": True}
    few = {"use_reentrant": True, "every_n_layers": 2}
    assert asked(**few) == few
    assert asked(every_n_layers=3) == {"every_n_layers": 3}
    assert not Workload.from_training_args(
        plain(tmp_path, gradient_checkpointing_kwargs=few), 64
    ).gradient_checkpointing
    with pytest.raises(ArgumentError, match=r"context_fn, offload, and .*: leave it out of a copy of the arguments"):
        asked(offload=True, context_fn=print, use_reentrant=False)
    assert asked(use_reentrant=False) is True
    step = Workload.train(1, 16, gradient_checkpointing=few)
    assert Workload.from_facts(json.loads(json.dumps(step.facts()))) == step
    assert eval(repr(step), {"Workload": Workload}) == step
    wrong: Any
    for wrong in ({"offload": True}, {"layers": 2}, {}, {"use_reentrant": 1}, {"every_n_layers": 0}, "reentrant"):
        with pytest.raises(ArgumentError, match=r"gradient_checkpointing=.*: True or False, or options of it such as"):
            step.replace(gradient_checkpointing=wrong)


def test_the_options_of_an_optimizer_choose_its_rule(tmp_path: Path) -> None:
    def read(**said: Any) -> object:
        return Workload.from_training_args(plain(tmp_path, **said), 64).optimizer

    assert read(optim="sgd") == read(optim="sgd", optim_args="momentum=0.0,dampening=0") == "sgd"
    assert read(optim="sgd", optim_args="momentum=0.9, nesterov=true") == "sgd_momentum"
    assert read(optim="sgd", optim_args="momentum=0.9", weight_decay=0.1) == "sgd_momentum_decayed"
    assert read(optim="rmsprop", optim_args="alpha=0.9,centered=false", weight_decay=0.1) == "rmsprop_decayed"
    assert read(optim="adamw_torch", weight_decay=0.1) == "adamw_foreach"  # in place
    with pytest.raises(ArgumentError, match=r"optim_args has centered and momentum.*leave it out of a copy"):
        read(optim="rmsprop", optim_args="momentum=0.9,centered=true")
    assert read(optim="rmsprop") == "rmsprop"


def test_passes_beside_the_steps_that_may_take_more_are_refused(trl: Any, tmp_path: Path) -> None:
    given: dict[str, Any] = {"output_dir": str(tmp_path), "use_cpu": True, "report_to": []}
    before = {"precompute_ref_log_probs": True, "precompute_ref_batch_size": 16}
    cases: list[tuple[Any, dict[str, Any], str, dict[str, Any]]] = [
        (TrainingArguments, {"eval_on_start": True}, "set it to False", {"eval_on_start": False}),
        (TrainingArguments, {"full_determinism": True}, "set it to False", {"full_determinism": False}),
        (trl.DPOConfig, before, "set it to None on a copy", {"precompute_ref_batch_size": None}),
        (
            trl.GRPOConfig,
            {"eval_strategy": "epoch", "per_device_eval_batch_size": 16},
            "set it to 8 on a copy",
            {"per_device_eval_batch_size": 8},
        ),
        (trl.GRPOConfig, {"cast_lm_head_to_fp32": True}, "set it to False", {"cast_lm_head_to_fp32": False}),
        (trl.GRPOConfig, {"cache_implementation": "static"}, "leave it out", {"cache_implementation": None}),
        (trl.RLOOConfig, {"generation_kwargs": {"num_beams": 2}}, "leave it out", {"generation_kwargs": None}),
        (
            trl.RLOOConfig,
            {"use_transformers_continuous_batching": True},
            "set it to False",
            {"use_transformers_continuous_batching": False},
        ),
    ]
    for kind, said, advice, taken in cases:
        args = kind(**given, **said)
        with pytest.raises(ArgumentError, match=advice) as caught:
            Workload.from_training_args(args, 1024)
        assert len(caught.value.problems) == 1
        for name, value in taken.items():
            setattr(args, name, value)
        assert Workload.from_training_args(args, 1024)
    split = plain(tmp_path, accelerator_config={"split_batches": True})
    with pytest.raises(ArgumentError, match=r"split_batches=True of accelerator_config: .* set it to False"):
        Workload.from_training_args(split, 64)
    split.accelerator_config.split_batches = False
    assert Workload.from_training_args(split, 64) == Workload.train(8, 64)
    # which evaluate no more rows than they train, or have an evaluation that is counted
    assert Workload.from_training_args(trl.DPOConfig(**given, **before, per_device_train_batch_size=16))
    both = plain(tmp_path, eval_on_start=True, eval_strategy="steps", per_device_eval_batch_size=16)
    assert Workload.from_training_args(both, 64).eval_batch_size == 16
    assert Workload.from_training_args(trl.GRPOConfig(**given, use_vllm=True, cache_implementation="static"), 1024)


def test_ligers_head_is_that_of_a_plain_trainer_that_asks_for_it(tmp_path: Path) -> None:
    def head(**said: Any) -> object:
        return Workload.from_training_args(plain(tmp_path, use_liger_kernel=True, **said), 64).fused_lm_head

    assert head() == "liger"
    assert not head(liger_kernel_config={"fused_linear_cross_entropy": False})
    assert not head(label_smoothing_factor=0.1)  # of logits


def test_trls_trainers_have_their_own_head_beside_ligers_kernels(trl: Any, tmp_path: Path) -> None:
    given: dict[str, Any] = {"output_dir": str(tmp_path), "use_cpu": True, "report_to": [], "use_liger_kernel": True}
    assert Workload.from_training_args(trl.SFTConfig(**given)).fused_lm_head is True
    assert not Workload.from_training_args(trl.RewardConfig(**given)).fused_lm_head


class OfAScript(TrainingArguments):
    """Arguments as scripts make them, with fields of their own."""

    max_length: int = 32


def test_a_class_that_a_script_makes_is_read_too(tmp_path: Path) -> None:
    assert Workload.from_training_args(OfAScript(str(tmp_path), use_cpu=True)) == Workload.train(8, 32)


def test_the_configs_of_trl_have_its_defaults(trl: Any, tmp_path: Path) -> None:
    given: dict[str, Any] = {"output_dir": str(tmp_path), "use_cpu": True, "report_to": []}
    loading = {"model_init_kwargs": {"dtype": "float32"}}
    usual: dict[str, Any] = {"gradient_checkpointing": True, "autocast": "bfloat16", **loading}
    fused = {**usual, "fused_lm_head": True, "router_aux_loss_coef": None}
    read = Workload.from_training_args
    assert read(trl.SFTConfig(**given)) == Workload.train(8, 1024, **fused)
    smoothed = trl.SFTConfig(**given, label_smoothing_factor=0.1)
    assert read(smoothed) == Workload.train(8, 1024, **fused, label_smoothing=True)
    dft = trl.SFTConfig(**given, label_smoothing_factor=0.1, loss_type="dft")
    assert not read(dft).label_smoothing
    scored = {**loading["model_init_kwargs"], "auto_class": "AutoModelForSequenceClassification", "num_labels": 1}
    assert read(trl.RewardConfig(**given, eval_strategy="epoch")) == Workload.train(
        16, 1024, **{**usual, "model_init_kwargs": scored}, eval_batch_size=16
    )
    for said, packed in (({"packing": True}, True), ({"padding_free": True}, True), ({"packing": False}, False)):
        assert read(trl.SFTConfig(**given, **said)).padding_free == packed
    assert not read(trl.SFTConfig(**given, packing=True, packing_strategy="wrapped")).padding_free
    assert not read(trl.DPOConfig(**given, padding_free=True)).padding_free  # trl says so, and pads
    for kind, rows in (("DPOConfig", 16), ("KTOConfig", 8)):
        made = getattr(trl, kind)(**given, max_length=256)
        assert read(made) == Workload.train(rows, 256, **fused, reference="model")
        assert read(made, adapter=LORA).reference == "adapter_off"
        before = getattr(trl, kind)(**given, precompute_ref_log_probs=True)
        assert read(before).reference is None
    sampled = {**usual, "gradient_accumulation_steps": 2}
    grpo = {**given, "max_completion_length": 192, "gradient_accumulation_steps": 2}
    del sampled["model_init_kwargs"]

    def grouped(**said: Any) -> Workload:
        return Workload.grpo(8, 64, 192, **sampled, **said).replace(**loading, router_aux_loss_coef=None)

    assert read(trl.GRPOConfig(**grpo), 256, LORA) == grouped(adapter=LORA)
    rloo = trl.RLOOConfig(**grpo, eval_strategy="epoch")  # always with the samples' own probabilities
    assert read(rloo, 256) == grouped(reference="model", old_log_probs=True)
    again = trl.GRPOConfig(**grpo, beta=0.04, num_iterations=2, eval_strategy="epoch")
    assert read(again, 256) == grouped(reference="model", old_log_probs=True)


def test_rows_that_a_collator_pads_are_as_long_as_it_makes_them(trl: Any, tmp_path: Path) -> None:
    given: dict[str, Any] = {"output_dir": str(tmp_path), "use_cpu": True, "report_to": [], "pad_to_multiple_of": 64}
    assert Workload.from_training_args(trl.SFTConfig(**given, max_length=1000)).sequence_length == 1024
    collator = trl.trainer.sft_trainer.DataCollatorForLanguageModeling(0, pad_to_multiple_of=64)
    assert collator([{"input_ids": [1] * 1000}])["input_ids"].shape == (1, 1024)
    sampled = Workload.from_training_args(trl.GRPOConfig(**given, max_completion_length=100), 150)
    assert (sampled.sequence_length, sampled.completion_length) == (64 + 128, 128)  # trl pads each by itself


def test_what_a_trainer_loads_a_model_with(trl: Any, tmp_path: Path) -> None:
    given: dict[str, Any] = {"output_dir": str(tmp_path), "use_cpu": True, "report_to": []}

    def loading(**said: Any) -> Any:
        return Workload.from_training_args(trl.SFTConfig(**given, model_init_kwargs=said)).model_init_kwargs

    assert loading(torch_dtype="bfloat16") == {"dtype": "float32"}  # which trl does not read
    assert loading(dtype=torch.bfloat16) == loading(dtype="bfloat16") == {"dtype": "bfloat16"}
    assert loading(dtype=None) == loading(dtype="auto") == {"dtype": "auto"}
    packed = loading(dtype="bfloat16", quantization_config=BitsAndBytesConfig(load_in_4bit=True), revision="main")
    assert (packed["dtype"], packed["quantization_config"]["load_in_4bit"]) == ("bfloat16", True)
    step = Workload.from_training_args(trl.SFTConfig(**given, model_init_kwargs={"dtype": "bfloat16"}), 16)
    assert Workload.from_facts(json.loads(json.dumps(step.facts()))) == step
    assert eval(repr(step), {"Workload": Workload}) == step
    with pytest.raises(ArgumentError, match="model_init_kwargs="):
        step.replace(model_init_kwargs={"device_map": "auto"})


def test_what_no_workload_says_is_listed_and_is_read_as_advised(trl: Any, tmp_path: Path) -> None:
    given: dict[str, Any] = {"output_dir": str(tmp_path), "use_cpu": True, "report_to": []}
    args = trl.SFTConfig(**given, activation_offloading=True, torch_compile=True, max_length=None)
    with pytest.raises(ArgumentError) as caught:
        Workload.from_training_args(args)
    names = ["activation_offloading", "torch_compile"]
    assert [problem.partition("=")[0] for problem in caught.value.problems[:2]] == names
    assert caught.value.problems[2].startswith("SFTConfig says no length")
    simpler = copy.copy(args)
    for name in names:
        assert "set it to False on a copy of the arguments" in str(caught.value)
        setattr(simpler, name, False)
    assert Workload.from_training_args(simpler, sequence_length=64).sequence_length == 64

    split = plain(tmp_path, parallelism_config=ParallelismConfig(cp_size=2))
    with pytest.raises(ArgumentError, match=r"has cp_size=2, and .* set it to None on a copy of the arguments"):
        Workload.from_training_args(split, 64)
    split.parallelism_config = None
    assert Workload.from_training_args(split, 64) == Workload.train(8, 64)

    with pytest.raises(ArgumentError, match=r"512: pass the tokens of both, such as 1024 for prompts of 512"):
        Workload.from_training_args(trl.GRPOConfig(**given), 512)
    assert Workload.from_training_args(trl.GRPOConfig(**given), 1024).completion_length == 512
    endless = trl.RLOOConfig(**given, max_completion_length=None)
    with pytest.raises(
        ArgumentError, match=r"max_completion_length=None: set it on a copy of the arguments, such as 5"
    ):
        Workload.from_training_args(endless, 1024)
    endless.max_completion_length = 512
    assert Workload.from_training_args(endless, 1024).completion_length == 512

    other = type("GKDConfig", (trl.SFTConfig,), {"__module__": "trl.experimental.gkd.gkd_config"})
    with pytest.raises(ArgumentError, match=r"GKDConfig is of a trainer whose step is not known: describe the step"):
        Workload.from_training_args(other(**given))
    compared = type(
        "SentenceTransformerTrainingArguments", (TrainingArguments,), {"__module__": "sentence_transformers.a"}
    )
    with pytest.raises(ArgumentError, match=r"SentenceTransformerTrainingArguments is of a trainer whose step is not"):
        Workload.from_training_args(compared(**given), 64)
    unknown: Any = object()
    with pytest.raises(ArgumentError, match="args is a object: pass TrainingArguments"):
        Workload.from_training_args(unknown)
    with pytest.raises(ArgumentError, match=r"optimizer='galore_adamw': one of"):
        Workload.from_training_args(plain(tmp_path, optim="galore_adamw", optim_target_modules=["q_proj"]), 64)


def test_an_evaluation_that_generates_is_forecast_by_itself(tmp_path: Path) -> None:
    said: dict[str, Any] = {"use_cpu": True, "report_to": [], "predict_with_generate": True}
    assert Workload.from_training_args(Seq2SeqTrainingArguments(str(tmp_path), **said), 64) == Workload.train(8, 64)
    args = Seq2SeqTrainingArguments(str(tmp_path), **said, eval_strategy="epoch")
    with pytest.raises(ArgumentError, match=r"with Workload\.generate, and set it to False on a copy of the arguments"):
        Workload.from_training_args(args, 64)
    args.predict_with_generate = False
    assert Workload.from_training_args(args, 64) == Workload.train(8, 64, eval_batch_size=8)


def test_a_verb_that_is_given_the_arguments_names_the_call(tmp_path: Path) -> None:
    args: Any = plain(tmp_path, per_device_train_batch_size=1)
    for verb in (predict_memory, plan_device_map, audit_model, largest_micro_batch):
        given: dict[str, Any] = {"max_memory": {0: "1GiB"}} if verb in (plan_device_map, largest_micro_batch) else {}
        with pytest.raises(ArgumentError, match=r"a TrainingArguments: pass Workload\.from_training_args\(args\)"):
            verb(CONFIG, workload=args, **given)
    assert predict_memory(CONFIG, Workload.from_training_args(args, 16)).workload == Workload.train(1, 16)
