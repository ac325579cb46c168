"""Every class of transformers that tests/tiny_models.py can make: a training step forecast, measured and audited."""

from __future__ import annotations

import random
import re
import warnings
from typing import Any

import pytest
import torch
import transformers
from allocator import peak_above_start
from allocator_truth import above_start, tokens
from peft import LoraConfig, get_peft_model
from tiny_models import causal_lm_classes, image_text_classes, skip_unless_buildable, tiny_config

from safe_loading import AdapterError, TraceError, Workload, audit_model
from safe_loading._memory.trace.trace_step import trace_step

ROWS, COLUMNS = 2, 24
CLASSES = sorted({*causal_lm_classes(), *image_text_classes()})
CASES = [(name, lora, on) for name in CLASSES for lora in (False, True) for on in (False, True)]
CHOSEN = random.Random(11).sample(CASES, 8)
NEAR = 1e-3
# Its router chooses some experts more often here, and a forecast takes them to be chosen equally often: 0.5 % less.
UNEVEN = "JetMoe"
# Which steps do not run for real with a batch of text and this tests' tiny configs either.
TEXT_IS_NOT_ENOUGH = (
    "Git Idefics InstructBlip InstructBlipVideo Kosmos2 Musicgen MusicgenMelody PI0 Pix2Struct "
    "Qwen2_5OmniThinker Reformer Step3p7 Udop Zamba2"
)
IMAGES_ARE_MADE = "Blip Blip2 VisionEncoderDecoder"  # by the forecast; the batch of the real step here has none
NO_ADAPTER = "DeepseekV4 FalconH1 FalconMamba Llama4 Mamba Mamba2 NemotronH Phimoe"  # on all linear layers
NO_CHECKPOINTING = "CpmAnt CTRL GPTNeoXJapanese JetMoe OpenAIGPT XLM XLNet"
# These run for real, but choose how much they compute by values that a trace does not know.
DEPEND_ON_VALUES = "Blt Glm5Next"


def among(kinds: str, name: str) -> bool:
    return any(re.match(rf"{kind}(For|Model|With|LMHead|$)", name) for kind in kinds.split())


def refused(name: str, *, lora: bool, checkpointing: bool) -> bool:
    """Whether the forecast of a step has to be an error that says why."""
    return (
        among(f"{TEXT_IS_NOT_ENOUGH} {DEPEND_ON_VALUES}", name)
        or (lora and among(NO_ADAPTER, name))
        or (checkpointing and among(NO_CHECKPOINTING, name))
        # adds to its embeddings in place, which peft has made a leaf with a gradient
        or (checkpointing and lora and among("Blip", name))
    )


@pytest.fixture(autouse=True)
def all_experts_are_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """LongcatFlash runs an expert only if a token chose it, and all tokens here are alike: let them choose in turn."""
    router: Any = pytest.importorskip("transformers.models.longcat_flash.modeling_longcat_flash").LongcatFlashTopkRouter
    forward = router.forward

    def choosing_in_turn(self: Any, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits, weights, chosen = forward(self, hidden_states)
        if type(chosen) is torch.Tensor:  # in a trace they are, without values
            chosen = (torch.arange(chosen.numel()) % logits.shape[-1]).view_as(chosen)
        return logits, weights, chosen

    monkeypatch.setattr(router, "forward", choosing_in_turn)


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
        loss.backward()

    return peak_above_start(step)


def compared(name: str, *, lora: bool, checkpointing: bool) -> tuple[int, int]:
    """Return the forecast and the measured peak of a step, in bytes above its start."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, config = built(name, lora=lora)
        workload = Workload.train(ROWS, COLUMNS, checkpointing, adapter=config, optimizer="none")
        mine = above_start(trace_step(model, workload), "forward", "backward")
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
    if among(IMAGES_ARE_MADE, name):
        model, config = built(name, lora=lora)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert trace_step(model, Workload.train(ROWS, COLUMNS, checkpointing, adapter=config)).devices
        return
    mine, real = compared(name, lora=lora, checkpointing=checkpointing)
    assert mine == pytest.approx(real, rel=6e-3 if among(UNEVEN, name) else NEAR)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if index % 59 == 0 else pytest.mark.slow) for index, name in enumerate(CLASSES)],
)
def test_an_audit_of_every_class(name: str) -> None:
    """A fresh model with a LoRA has no error; a step that cannot run is said to be one."""
    skip_unless_buildable(name)
    if among("FalconH1 FalconMamba Mamba Mamba2 NemotronH", name):
        pytest.skip("peft puts no adapter on all of its linear layers")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, config = built(name, lora=True)
        report = audit_model(get_peft_model(model, config).train(), Workload.train(ROWS, COLUMNS), forecast=False)
    errors = {finding.code for finding in report.findings if finding.severity == "error"}
    assert errors <= {"SL126"}
    assert not refused(name, lora=True, checkpointing=False) or errors == {"SL126"}
