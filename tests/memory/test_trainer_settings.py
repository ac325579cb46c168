"""Settings of the Trainer that change what a step takes: an evaluation, smoothed labels, and several micro-batches."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from allocator import peak_above_start
from allocator_truth import above_start
from transformers import BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from transformers.trainer_pt_utils import LabelSmoother

from safe_loading import ArgumentError, Spread, Workload, audit_model, plan_device_map, predict_memory
from safe_loading._memory.trace import fused_lm_head
from safe_loading._memory.trace.trace_step import trace_step

if TYPE_CHECKING:
    from cuda_runs import CudaRunner

SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
CONFIG = LlamaConfig(**SIZES, vocab_size=2001)
KINDS = {"Llama": (LlamaForCausalLM, CONFIG), "Bert": (BertForMaskedLM, BertConfig(**SIZES, vocab_size=2001))}
ROWS, TOKENS = 2, 32
STEP = Workload.train(ROWS, TOKENS, optimizer="none")
PHASES = ("forward", "backward")


def made(kind: str = "Llama") -> Any:
    model_class, config = KINDS[kind]
    return model_class(copy.deepcopy(config))  # a trainer writes to the config


def batch_of(rows: int = ROWS, tokens: int = TOKENS) -> dict[str, torch.Tensor]:
    ids = torch.full((rows, tokens), 5)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}


def trainer_of(model: Any, folder: Path, **options: Any) -> Any:
    own = {name: options.pop(name) for name in ("eval_dataset", "compute_metrics") if name in options}
    asked = {"per_device_train_batch_size": ROWS, "use_cpu": True, "bf16": False, "report_to": [], **options}
    return Trainer(model=model, args=TrainingArguments(str(folder), **asked), train_dataset=[], **own)


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_of_smoothed_labels_takes_what_the_trainers_does(kind: str, tmp_path: Path) -> None:
    model = made(kind)
    plain, smoothed = (
        above_start(trace_step(model, step), *PHASES) for step in (STEP, STEP.replace(label_smoothing=True))
    )
    trainer = trainer_of(model.train(), tmp_path, label_smoothing_factor=0.2)
    model.config.use_cache = False

    def run() -> None:
        given = batch_of()
        trainer.compute_loss(model, dict(given)).backward()

    assert smoothed == pytest.approx(peak_above_start(run), rel=0.002)
    assert plain != smoothed


def test_trls_trainer_runs_the_model_twice_for_smoothed_labels(tmp_path: Path) -> None:
    pytest.importorskip("datasets", reason="datasets is not installed: it comes with trl")
    trl = pytest.importorskip("trl", minversion="1.16", reason="this trl has no fused LM head")
    model = made()
    step = STEP.replace(label_smoothing=True, fused_lm_head=True)
    traced = above_start(trace_step(model, step), *PHASES)
    trainer = trl.SFTTrainer.__new__(trl.SFTTrainer)
    smoother = SimpleNamespace(model=model, args=SimpleNamespace(loss_type="nll"), optimizer=None, label_smoother=print)
    vars(trainer).update(vars(smoother))
    forecast = audit_model(model.train(), STEP, trainer).forecast
    assert forecast is not None
    assert forecast.workload == step
    with fused_lm_head.with_fused_lm_head(model, step):

        def run() -> None:
            given = batch_of()
            without = {name: tensor for name, tensor in given.items() if name != "labels"}
            loss = LabelSmoother(0.1)(model(**without, use_cache=False), given["labels"], shift_labels=True)
            with torch.no_grad():
                model(**given, use_cache=False, fused_lm_head=True)
            loss.backward()

        assert traced == pytest.approx(peak_above_start(run), rel=0.002)


@pytest.mark.parametrize("options", [{"use_reentrant": True}, {"every_n_layers": 2}, {"every_n_layers": 3}])
def test_the_options_of_checkpointing_are_those_of_the_step(options: dict[str, Any]) -> None:
    narrow = LlamaConfig(**{**SIZES, "num_hidden_layers": 12, "intermediate_size": 512}, vocab_size=101)
    step = STEP.replace(sequence_length=512)
    model = LlamaForCausalLM(narrow).train()
    if not hasattr(model, "activation_checkpointing_enable"):
        pytest.skip("this transformers checkpoints every layer")
    whole, some = (
        above_start(trace_step(LlamaForCausalLM(narrow), step.replace(gradient_checkpointing=asked)), *PHASES)
        for asked in (True, options)
    )
    few = {name: options[name] for name in ("every_n_layers",) if name in options}
    # a CPU's random state takes 5 KiB in each checkpoint
    asked = {"use_reentrant": options.get("use_reentrant", False), "preserve_rng_state": False}
    model.activation_checkpointing_enable(asked, **few)

    def run() -> None:
        model(**batch_of(tokens=512), use_cache=False).loss.backward()

    assert some == pytest.approx(peak_above_start(run), rel=0.002)
    assert some > whole * 1.01


def test_an_evaluation_takes_what_a_forward_pass_does_beside_the_optimizer() -> None:
    step = STEP.replace(eval_batch_size=16)
    trace = trace_step(made(), step)
    running = made().eval()
    held, batch = 3 * 8 * ROWS * TOKENS, batch_of(16)

    def run() -> None:
        with torch.no_grad():
            running(**{name: tensor.clone() for name, tensor in batch.items()}, use_cache=False)

    assert abs(above_start(trace, "evaluation") - peak_above_start(run) - held) <= 8  # a number
    assert trace.workload == step
    used = predict_memory(CONFIG, step.replace(optimizer="adamw"))
    alone = predict_memory(CONFIG, step.replace(optimizer="adamw", eval_batch_size=0))
    assert used.peak_at.startswith("evaluation")
    assert used.allocated_peak_bytes > alone.allocated_peak_bytes
    assert used.components["optimizer"] == alone.components["optimizer"] > 0
    assert any("compute_metrics=" in note for note in used.notes)
    assert not any("compute_metrics=" in note for note in alone.notes)
    few = predict_memory(CONFIG, step.replace(optimizer="adamw", eval_batch_size=1))
    assert few.allocated_peak_bytes == alone.allocated_peak_bytes


def test_a_plan_leaves_room_for_an_evaluation() -> None:
    plain, evaluated = (
        plan_device_map(made(), {0: "1GiB"}, workload=step) for step in (STEP, STEP.replace(eval_batch_size=64))
    )
    assert evaluated.devices[0].used > plain.devices[0].used


def test_fewer_rows_of_an_evaluation_are_suggested_where_it_decides() -> None:
    forecast = predict_memory(CONFIG, STEP.replace(eval_batch_size=64))
    found = [each.change for each in forecast.suggestions(forecast.total_bytes - 2**20)]
    assert found[0].startswith("eval_batch_size=")


def test_prompts_without_labels_take_less_of_a_fused_head() -> None:
    pytest.importorskip("trl", minversion="1.16", reason="this trl has no fused LM head")
    step = STEP.replace(fused_lm_head=True)
    prompts = batch_of()
    prompts["labels"][:, : TOKENS // 2] = -100
    every, half = predict_memory(CONFIG, step), predict_memory(CONFIG, step, inputs=prompts)
    assert half.allocated_peak_bytes < every.allocated_peak_bytes
    assert any("labels of -100" in note for note in every.notes)
    assert not any("labels of -100" in note for note in half.notes)


def test_a_state_in_8_bits_is_made_tensor_by_tensor() -> None:
    """The allocator rounds each of them: two moments in bytes, and two statistics of their blocks."""
    wide = LlamaConfig(**SIZES | {"hidden_size": 256}, vocab_size=1000)
    trace = trace_step(LlamaForCausalLM(wide), STEP.replace(optimizer="adamw_8bit"))
    made = [each.bytes for each in trace.allocations if each.component == "optimizer"]
    head, blocks = 1000 * 256, 1000 * 4
    place = made.index(head)
    assert made[place : place + 4] == [head, head, blocks, blocks]
    assert made.count(4 * head) == 2  # the embedding's, in 32 bits as the Trainer keeps them


def test_all_micro_batches_of_a_step_are_on_the_card() -> None:
    model = made()
    one, two, eight = (
        above_start(trace_step(model, STEP.replace(gradient_accumulation_steps=count)), *PHASES) for count in (1, 2, 8)
    )
    assert eight - two == 6 * 3 * 8 * ROWS * TOKENS  # ids, mask and labels
    assert two > one


def test_what_was_not_held_against_a_run_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"An evaluation was not held against DeepSpeed.*Workload\.train\("):
        predict_memory(CONFIG, STEP.replace(eval_batch_size=2), spread=Spread.zero(2, stage=2))
    with pytest.raises(ArgumentError, match="inputs= are those of a training step"):
        predict_memory(CONFIG, STEP.replace(eval_batch_size=8), inputs=batch_of())
    assert predict_memory(CONFIG, STEP.replace(eval_batch_size=ROWS), inputs=batch_of()).workload.eval_batch_size
    with pytest.raises(ArgumentError, match="Liger's head leaves out"):
        STEP.replace(label_smoothing=True, fused_lm_head="liger")
    with pytest.raises(ArgumentError, match="leave labels=False out"):
        STEP.replace(label_smoothing=True, labels=False)
    with pytest.raises(ArgumentError, match="not for GRPO"):
        Workload.grpo(2, 8, 8).replace(eval_batch_size=2)
    with pytest.raises(ArgumentError, match="eval_batch_size=-1"):
        STEP.replace(eval_batch_size=-1)
    step = STEP.replace(eval_batch_size=4, label_smoothing=True)
    assert eval(repr(step), {"Workload": Workload}) == step
    assert Workload.from_facts(step.facts()) == step


def test_the_evaluation_is_that_of_the_trainer(tmp_path: Path) -> None:
    model = made().train()
    rows = [{name: tensor[0] for name, tensor in batch_of().items()}]

    def audited(inputs: dict[str, torch.Tensor] | None = None, **options: Any) -> Any:
        asked = {"eval_strategy": "steps", "eval_dataset": rows, **options}
        return audit_model(model, STEP, trainer_of(model, tmp_path, **asked), inputs=inputs)

    def said(report: Any, text: str) -> bool:
        return any(text in each for each in report.skipped)

    assert audited().forecast.workload == STEP.replace(eval_batch_size=8)  # what the Trainer takes unless it is told
    assert audited(per_device_eval_batch_size=3).forecast.workload.eval_batch_size == 3
    assert audited(eval_strategy="no").forecast.workload == STEP
    assert said(audited(compute_metrics=lambda _: {}), "compute_metrics= collects")
    assert not said(audited(compute_metrics=lambda _: {}, eval_accumulation_steps=1), "compute_metrics=")
    other = audited(batch_of())
    assert other.forecast.workload == STEP
    assert said(other, "in batches of 8 rows")
    smoothed = audited(eval_strategy="no", label_smoothing_factor=0.1)
    assert smoothed.forecast.workload == STEP.replace(label_smoothing=True)


def test_a_loop_that_holds_its_output_holds_accelerates_copy_of_it() -> None:
    """Logits in float32 under autocast, and not those in 16 bits that the model itself returned."""
    logits = 8 * 128 * 2001 * 4
    step = Workload.train(8, 128, autocast="bfloat16")
    held, let_go = (predict_memory(CONFIG, step, keep_outputs=keep).allocated_peak_bytes for keep in (True, False))
    assert held - let_go == pytest.approx(logits, rel=0.3)


ON_CUDA = """
    import tempfile
    from accelerate import Accelerator
    from safe_loading import Workload, predict_memory
    from transformers import BertConfig, BertForMaskedLM, Trainer, TrainingArguments, default_data_collator

    SIZES = dict(hidden_size=128, num_hidden_layers=2, num_attention_heads=4, intermediate_size=256, vocab_size=4000)
    ROWS, TOKENS = 4, 128

    def compare(arguments, sizes=SIZES, **step):
        config = BertConfig(**sizes)
        work = Workload.train(ROWS, TOKENS, **step)
        predicted = predict_memory(BertConfig(**sizes), work, capability=(9, 0), auto_class=BertForMaskedLM)
        # without a mask, whose values no simulated kernel makes
        rows = [{"input_ids": [5] * TOKENS, "labels": [5] * TOKENS}] * 64
        args = TrainingArguments(
            tempfile.mkdtemp(), per_device_train_batch_size=ROWS, max_steps=3, report_to=[], save_strategy="no",
            disable_tqdm=True, **arguments,
        )
        assert Workload.from_training_args(args, TOKENS) == work
        model = BertForMaskedLM(config)
        Trainer(model, args, train_dataset=rows, eval_dataset=rows, data_collator=default_data_collator).train()
        return [predicted.allocated_peak_bytes, torch.cuda.max_memory_allocated(0)]

    def looped():
        step = Workload.train(ROWS, TOKENS, autocast="bfloat16", optimizer="adamw_foreach")
        held = dict(capability=(9, 0), auto_class=BertForMaskedLM, keep_outputs="across_steps")
        predicted = predict_memory(BertConfig(**SIZES), step, **held)
        accelerator = Accelerator(mixed_precision="bf16")
        model = BertForMaskedLM(BertConfig(**SIZES)).train()
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
        for _ in range(3):
            ids = torch.full((ROWS, TOKENS), 5, device="cuda")
            batch = {"input_ids": ids, "labels": ids.clone()}
            output = model(**batch)
            accelerator.backward(output.loss)
            optimizer.step()
            optimizer.zero_grad()
        return [predicted.allocated_peak_bytes, torch.cuda.max_memory_allocated(0)]

    case(looped, "loop of accelerate")
    case(lambda: compare({}), "plain")
    case(lambda: compare({"gradient_accumulation_steps": 4}, gradient_accumulation_steps=4), "micro-batches")
    case(lambda: compare({"label_smoothing_factor": 0.1}, label_smoothing=True), "smoothed")
    case(lambda: compare({"eval_strategy": "steps", "eval_steps": 1}, eval_batch_size=8), "evaluation")
    case(lambda: compare({"eval_strategy": "steps", "eval_steps": 1, "bf16": True, "gradient_checkpointing": True},
                         eval_batch_size=8, autocast="bfloat16", gradient_checkpointing=True), "mixed evaluation")
    for options in ({"use_reentrant": True}, {"every_n_layers": 2}):
        asked = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": options}
        few_words = SIZES | {"vocab_size": 100, "num_hidden_layers": 4}
        case(lambda: compare(asked, few_words, gradient_checkpointing=options), next(iter(options)))
"""


@pytest.mark.gpu
def test_the_trainer_itself_takes_the_forecast_on_a_card(simulated_cuda: CudaRunner) -> None:
    found = simulated_cuda.run(ON_CUDA, env={"SIMCUDA_GPU": "H100", "SIMCUDA_VALUES": None, "SIMCUDA_DEVICES": "1"})
    del found["code"]
    assert len(found) == 8
    for name, (predicted, real) in found.items():
        # the masks that are not passed here, and a few numbers a step
        assert predicted == pytest.approx(real, abs=8 * 4 * 128 * 4 + 4096), name
