"""Every class of transformers that tests/tiny_models.py can make: a training step forecast, measured and audited."""

from __future__ import annotations

import gc
import random
import re
import warnings
from typing import Any

import pytest
import torch
import transformers
from allocator_truth import above_start, peak_above_start, tokens
from peft import LoraConfig, get_peft_model
from tiny_models import causal_lm_classes, image_text_classes, skip_unless_buildable, tiny_config

from safe_loading import AdapterError, TraceError, Workload, audit_model
from safe_loading._memory.trace.trace_step import trace_step

ROWS, COLUMNS = 2, 24
CLASSES = sorted({*causal_lm_classes(), *image_text_classes()})
CASES = [(name, lora, on) for name in CLASSES for lora in (False, True) for on in (False, True)]
CHOSEN = random.Random(11).sample(CASES, 8)
NEAR = 1e-3
# Steps that may differ by more, by 1.2 % at most: tables of positions or windows, some KiB, that the CPU makes alone.
KNOWN = frozenset(
    f"{name}For{head}"
    for head, names in {
        "CausalLM": ("Cohere2", "Gemma4", "Gemma4Unified", "GPTNeoX", "Moshi"),
        "ConditionalGeneration": ("AyaVision", "Gemma4Unified"),
    }.items()
    for name in names
)
# Which steps do not run with a batch of text alone: the model or peft refuses the real one too.
TEXT_IS_NOT_ENOUGH = (
    "Blt Glm5Next Idefics InstructBlip Musicgen MusicgenMelody Qwen2_5OmniThinker Step3p7 Udop VisionEncoderDecoder"
)
NO_ADAPTER = "DeepseekV4 FalconMamba Llama4 NemotronH Phimoe"
NO_CHECKPOINTING = "GPTNeoXJapanese OpenAIGPT XLM"


def refused(name: str, *, lora: bool, checkpointing: bool) -> bool:
    """Whether a step of a class cannot run, so that its forecast has to be an error that says why."""

    def among(kinds: str) -> bool:
        return any(re.match(rf"{kind}(For|Model|With|LMHead)", name) for kind in kinds.split())

    return among(TEXT_IS_NOT_ENOUGH) or (lora and among(NO_ADAPTER)) or (checkpointing and among(NO_CHECKPOINTING))


def built(name: str, *, lora: bool) -> tuple[Any, LoraConfig | None]:
    torch.manual_seed(0)
    model = getattr(transformers, name)(tiny_config(name))
    return model, LoraConfig(r=4, target_modules="all-linear") if lora else None


def measured(model: Any, config: LoraConfig | None, *, checkpointing: bool) -> int:
    """Run the step for real, and return what the CPU's allocator gave above the start."""
    running = model if config is None else get_peft_model(model, config)
    running.train()
    if checkpointing:
        options = {"use_reentrant": False, "preserve_rng_state": False}  # the generators' states lie on the host
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
        if config is not None:
            model.enable_input_require_grads()
    extra = {"use_cache": False} if hasattr(model.config.get_text_config(), "use_cache") else {}

    def step() -> None:
        batch = tokens(model, ROWS, COLUMNS)
        batch["labels"] = torch.full((ROWS, COLUMNS), 5)
        loss = running(**batch, **extra).loss
        del batch
        loss.backward()

    return peak_above_start(step)


def compared(name: str, *, lora: bool, checkpointing: bool) -> tuple[int, int]:
    """Return the forecast and the measured peak of a step, in bytes above its start."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, config = built(name, lora=lora)
        workload = Workload.train(ROWS, COLUMNS, checkpointing, adapter=config, optimizer="none")
        mine = above_start(trace_step(model, workload), "forward", "backward")
        gc.collect()
        return mine, measured(model, config, checkpointing=checkpointing)


@pytest.mark.parametrize(
    ("name", "lora", "checkpointing"),
    [*CHOSEN, *(pytest.param(*case, marks=pytest.mark.slow) for case in CASES if case not in CHOSEN)],
)
def test_a_training_step_of_every_class(name: str, lora: bool, checkpointing: bool) -> None:
    skip_unless_buildable(name)
    if refused(name, lora=lora, checkpointing=checkpointing):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model, config = built(name, lora=lora)
            step = Workload.train(ROWS, COLUMNS, checkpointing, adapter=config, optimizer="none")
            with pytest.raises((TraceError, AdapterError)):
                trace_step(model, step)
        return
    mine, real = compared(name, lora=lora, checkpointing=checkpointing)
    assert mine == pytest.approx(real, rel=NEAR if name not in KNOWN else 0.012)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if index % 59 == 0 else pytest.mark.slow) for index, name in enumerate(CLASSES)],
)
def test_an_audit_of_every_class(name: str) -> None:
    """A fresh model with a LoRA has no error; a step that cannot run is said to be one."""
    skip_unless_buildable(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, config = built(name, lora=True)
        report = audit_model(get_peft_model(model, config).train(), Workload.train(ROWS, COLUMNS), forecast=False)
    assert {finding.code for finding in report.findings if finding.severity == "error"} <= {"SL126"}
