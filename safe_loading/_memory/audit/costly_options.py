"""Checks of options of the model that cost memory in the step, each compared with the step without it."""

from __future__ import annotations

from collections.abc import Iterator

from transformers import PreTrainedConfig, PreTrainedModel

from safe_loading._core.report import Finding, format_bytes

from .traced_step import TracedStep

_OUTPUTS = ("output_hidden_states", "output_attentions")


def check_options(step: TracedStep) -> Iterator[Finding]:
    """Yield findings for outputs that are kept for nobody, and for attention that writes its scores to memory."""
    base = step.audited.base
    if base is None:
        return
    yield from _check_outputs(step, base)
    yield from _check_attention(step, base)


def _check_outputs(step: TracedStep, base: PreTrainedModel) -> Iterator[Finding]:
    asked = [name for name in _OUTPUTS if getattr(base.config, name, False)]
    if not asked:
        return

    def switch_off() -> None:
        for config in _configs(base):
            for name in asked:
                # private in a config of transformers 5, whose setter warns of eager attention
                vars(config)[f"_{name}" if f"_{name}" in vars(config) else name] = False

    cost = _saved_by(step, step.peak_when(switch_off))
    message = (
        f"config.{' and config.'.join(asked)} {'are' if len(asked) > 1 else 'is'} on: every layer's output is kept "
        f"until the step is over{_in_words(cost)}, although a loss needs none of them."
    )
    fix = " ".join(f"model.config.{name} = False;" for name in asked).rstrip(";") + ", and pass it in the one call."
    yield Finding("SL130", "warning", type(base).__name__, message, fix, cost)


def _check_attention(step: TracedStep, base: PreTrainedModel) -> Iterator[Finding]:
    asked = any(getattr(base.config, name, False) for name in _OUTPUTS)
    if base.config._attn_implementation != "eager" or not getattr(base, "_supports_sdpa", False) or asked:
        return

    def fuse() -> None:
        for config in _configs(base):
            vars(config)["_attn_implementation_internal"] = "sdpa"

    cost = _saved_by(step, step.peak_when(fuse))
    if cost:
        message = (
            f"attention is 'eager' and writes the scores of all pairs of tokens to memory{_in_words(cost)}, although "
            f"a fused kernel computes the same."
        )
        fix = "model.set_attn_implementation('sdpa'), or from_pretrained(..., attn_implementation='sdpa')."
        yield Finding("SL131", "warning", type(base).__name__, message, fix, cost)


def _configs(base: PreTrainedModel) -> list[PreTrainedConfig]:
    configs = [
        config for module in base.modules() if isinstance(config := vars(module).get("config"), PreTrainedConfig)
    ]
    return list({id(config): config for config in configs}.values())


def _saved_by(step: TracedStep, peak: int | None) -> int:
    """Return the bytes that changing an option saves in the step; 0 where the step does not have its planned size."""
    return 0 if peak is None or not step.planned else max(0, step.peak_bytes - peak)


def _in_words(cost: int) -> str:
    return f", {format_bytes(cost)} at the peak" if cost else ""
