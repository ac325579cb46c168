"""A step of GRPO or RLOO beside trl's own trainer, on the CPU's allocator: its samples, their scores and the loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from allocator import peak_above_start
from allocator_truth import NEVER, above_start
from models import WIDE, tokenizer
from peft import LoraConfig, get_peft_model
from test_trl_trainers import CONFIG, LORA, made, options, table, trl  # noqa: F401  # a fixture
from transformers import LlamaConfig

from safe_loading import ArgumentError, Spread, Workload, audit_model, largest_micro_batch, predict_memory
from safe_loading._memory.trace import fused_lm_head
from safe_loading._memory.trace.trace_step import trace_step
from safe_loading._memory.trace.two_ends import trace_two_ends

PROMPT, COMPLETION, ROWS, STEPS = 16, 48, 4, 2
WORDS = " ".join(f"w{number}" for number in range(4, 4 + PROMPT))


def trainer_of(kind: str, trl: Any, model: Any, folder: Path, **settings: Any) -> Any:  # noqa: F811  # the fixture
    args = getattr(trl, f"{kind}Config")(
        **options(folder),
        gradient_checkpointing=False,
        max_completion_length=COMPLETION,
        num_generations=ROWS,
        steps_per_generation=STEPS,
        generation_kwargs={"eos_token_id": NEVER},
        **settings,
    )

    def reward(completions: Any, **_: Any) -> list[float]:
        return [float(number) for number in range(len(completions))]

    rows = table({"prompt": [WORDS] * 16})
    made_by = getattr(trl, f"{kind}Trainer")
    return made_by(model, reward_funcs=reward, args=args, train_dataset=rows, processing_class=tokenizer())


@pytest.mark.parametrize(
    ("kind", "reference", "adapter", "old", "checkpointed"),
    [
        ("GRPO", None, None, False, False),
        ("GRPO", "model", None, False, False),
        ("GRPO", "adapter_off", LORA, True, True),
        ("RLOO", None, None, True, False),
        ("RLOO", "model", None, True, False),
        ("RLOO", "adapter_off", LORA, True, True),
    ],
)
def test_a_step_takes_what_the_allocator_gives(
    trl: Any,  # noqa: F811  # the fixture
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    reference: Any,
    adapter: LoraConfig | None,
    old: bool,
    checkpointed: bool,
) -> None:
    step = Workload.grpo(
        ROWS,
        PROMPT,
        COMPLETION,
        checkpointed,
        "none",
        adapter,
        steps_per_generation=STEPS,
        old_log_probs=old,
        reference=reference,
    )
    trained = above_start(trace_step(made(), step), "forward", "backward")
    generated = above_start(trace_two_ends(step.rollout, lambda work: trace_step(made(), work)), "prefill", "decode")
    monkeypatch.setattr(f"trl.trainer.{kind.lower()}_trainer.create_model_from_path", lambda *_, **__: made())
    running = made() if adapter is None else get_peft_model(made(), adapter)
    accumulated = {"gradient_accumulation_steps": 1 if old else STEPS, "beta": 0.1 if reference else 0.0}
    trainer = trainer_of(kind, trl, running, tmp_path, **accumulated)
    trainer.current_gradient_accumulation_steps = accumulated["gradient_accumulation_steps"]
    if checkpointed:
        # a CPU's random state takes 5 KiB in each checkpoint
        running.gradient_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})
        running.enable_input_require_grads()
        trainer.args.gradient_checkpointing_kwargs = {"use_reentrant": False, "preserve_rng_state": False}

    def run() -> None:
        batch = trainer._prepare_inputs([{"prompt": WORDS}] * (ROWS * STEPS))
        trainer.compute_loss(trainer.model.train(), batch).backward()

    def generate() -> Any:
        many = () if kind == "RLOO" else (ROWS,)
        return trainer._generate_single_turn([[5] * PROMPT] * (ROWS * STEPS), None, {}, *many)

    scores = 1 + (reference is not None)
    summed = scores * 4 * ROWS * STEPS * COMPLETION if kind == "RLOO" else 0  # it keeps one number of a row
    with fused_lm_head.fused_stand_ins():
        assert peak_above_start(generate) == pytest.approx(generated, rel=0.005)
        assert (
            abs(peak_above_start(run) + summed - max(trained, generated)) <= 64
        )  # advantages and other scalars of a row
    found = audit_model(running, Workload.train(ROWS, PROMPT + COMPLETION, checkpointed), trainer)
    assert found.findings == ()
    assert found.forecast is not None
    assert found.forecast.workload == step.replace(adapter=None, optimizer="adamw")


def test_samples_of_the_model_run_beside_all_that_the_step_finds() -> None:
    config = LlamaConfig(**WIDE)
    step = Workload.grpo(1, 32, 480, optimizer="adamw", steps_per_generation=0)
    alone, few, many = (predict_memory(config, step.replace(steps_per_generation=rows)) for rows in (0, 1, 512))
    assert alone.allocated_peak_bytes == few.allocated_peak_bytes  # vLLM's, or less than the training takes
    generation = predict_memory(config, step.replace(steps_per_generation=512).rollout)
    state = many.components["optimizer"]
    assert state == alone.components["optimizer"]
    more = many.allocated_peak_bytes - generation.allocated_peak_bytes
    assert state <= more <= state * 1.5  # and the scratch of the backward pass's products
    assert many.peak_at.startswith("decode")


def test_a_search_for_rows_generates_as_many_times_the_rows() -> None:
    config = LlamaConfig(**WIDE)
    step = Workload.grpo(None, 32, 96, optimizer="adamw", gradient_accumulation_steps=4)
    whole = predict_memory(config, step.replace(batch_size=8))
    found = largest_micro_batch(config, step, whole.total_bytes).workload
    assert found.batch_size == 8
    assert found.generated_rows == 32
    assert found.rollout.batch_size == 32
    changes = [change.change for change in whole.suggestions(whole.total_bytes * 9 // 10)]
    assert any("batch_size=4, gradient_accumulation_steps=8, steps_per_generation=8" in text for text in changes)


def test_what_is_no_step_of_grpo_is_refused() -> None:
    with pytest.raises(ArgumentError, match="completion_length=64: fewer tokens than a row of 64"):
        Workload.train(1, 64, fused_lm_head=True, completion_length=64)
    with pytest.raises(ArgumentError, match="pass fused_lm_head=True"):
        Workload.train(1, 64, completion_length=32)
    assert Workload.train(1, 64, fused_lm_head=True, completion_length=32).completion_length
    with pytest.raises(ArgumentError, match=r"pass completion_length= too"):
        Workload.train(1, 64, steps_per_generation=4)
    with pytest.raises(ArgumentError, match=r"Workload.grpo needs integers"):
        Workload.grpo(1, 0, 32)
    with pytest.raises(ArgumentError, match=r"Forecast one card, or the step with samples of vLLM: Workload\.train\("):
        predict_memory(CONFIG, Workload.grpo(1, 32, 32), spread=Spread.ddp(2))
    by_vllm = Workload.grpo(1, 32, 32).replace(steps_per_generation=0)
    assert predict_memory(CONFIG, by_vllm, spread=Spread.ddp(2)).allocated_peak_bytes
    with pytest.raises(ArgumentError, match=r"held against DeepSpeed. Spread.fsdp2\(ranks\) can be forecast"):
        predict_memory(CONFIG, by_vllm, spread=Spread.zero(2, stage=2))
    assert predict_memory(CONFIG, by_vllm, spread=Spread.fsdp2(2)).ranks
    assert eval(repr(Workload.grpo(2, 8, 8, old_log_probs=True)), {"Workload": Workload}) == Workload.grpo(
        2, 8, 8, old_log_probs=True
    )


def test_tokens_that_are_drawn_keep_their_probabilities() -> None:
    model = made()
    greedy, drawn = (
        above_start(trace_step(model, Workload.generate(64, 1, decode_steps=2, do_sample=sample)), "prefill", "decode")
        for sample in (False, True)
    )
    assert drawn - greedy == 64 * CONFIG.vocab_size * torch.float32.itemsize
