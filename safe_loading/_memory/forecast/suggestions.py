"""Changes that make a step smaller, each with its forecast, from those that cost little to those that cost much.

A change is listed where it applies to the step, can be forecast, and is enough or takes at least 1 % less than the step
does as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from safe_loading._core import progress
from safe_loading._core.report import format_bytes, text_table
from safe_loading._core.spread import Spread
from safe_loading._core.workload import Workload
from safe_loading._memory.trace.read_adapter import with_read_adapter
from safe_loading._model.attention_names import FLASH_2
from safe_loading._model.formats.four_bit import QLORA, QLORA_WRITTEN
from safe_loading._ranks.launcher import local_rank
from safe_loading.errors import ArgumentError, SafeLoadingError

from .report import MODEL_IS_GONE, MemoryForecast, Suggestion

_ADAM = ("adam", "adamw", "adamw_foreach")
_SHORTEST_ROW = 128
_RANKS = (2, 4, 8)
_LEAST_SHARE = 100  # what saves less than a hundredth is no advice, unless that is enough


@dataclass(frozen=True)
class Origin:
    """The call that made a forecast, to be made again with changes.

    Attributes:
        predict: ``predict_memory`` of the same source with changed options.
        is_there: Whether the source is still there: a forecast does not keep a model alive.
        options: The options that were passed.
        built: Whether the source was a model, which is neither quantized nor given another attention any more.
        quantized: Whether its weights are quantized.
        flash: Whether the kernels of flash attention take its numbers.
    """

    predict: Callable[[Workload, Mapping[str, object]], MemoryForecast]
    is_there: Callable[[], bool]
    options: Mapping[str, Any]
    built: bool
    quantized: bool
    flash: bool


@dataclass(frozen=True)
class _Change:
    """Changed fields of a workload, and changed options of ``predict_memory``."""

    text: str
    cost: str
    step: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    combines: bool = True  # whether it is among those that are tried together


def suggestions_for(origin: Origin, forecast: MemoryForecast, memory: int) -> tuple[Suggestion, ...]:
    """Return the changes in the order of their cost; where none is enough by itself, those that are enough together."""
    if not origin.is_there():
        raise ArgumentError(MODEL_IS_GONE)
    if memory <= forecast.context_bytes:
        return ()  # no step at all runs there
    workload = with_read_adapter(forecast.workload)
    kinds = list(_changes(workload, origin))
    shown = progress.bar_of_a_rank("suggesting", len(kinds) + 1, local_rank(), unit=" changes")
    with shown as bar, progress.without_bars():  # of the traces, of which a kind of change takes a few
        return _search(kinds, workload, origin, forecast, memory, bar)


def _search(
    kinds: Sequence[Sequence[_Change]],
    workload: Workload,
    origin: Origin,
    forecast: MemoryForecast,
    memory: int,
    bar: progress.Bar,
) -> tuple[Suggestion, ...]:
    """Return the changes that help, one of each kind, and several together; the bar counts the kinds."""
    found: list[Suggestion] = []
    useful: list[_Change] = []
    cards: list[_Change] = []
    for sizes in kinds:
        made = _first_that_fits(sizes, workload, origin, memory)
        bar.advance()
        if made is not None and _helps(made[1], forecast):
            useful += [made[0]] if made[0].combines else []
            cards += [made[0]] if "spread" in made[0].options else []
            found.append(made[1])
    if not any(each.fits for each in found):
        steps = [_joined(useful[:count]) for count in range(2, len(useful) + 1)]
        steps += [_joined([*useful[:count], *cards]) for count in range(1, len(useful) + 1) if cards]
        together = _first_that_fits(steps, workload, origin, memory)
        found += [together[1]] if together is not None and together[1].fits else []
    bar.advance()
    return tuple(found)


def suggestions_table(suggestions: Sequence[Suggestion], card: str) -> str:
    """Return the changes as a table of text."""
    rows = [
        (each.change, format_bytes(each.forecast.total_bytes), "fits" if each.fits else "no", each.cost)
        for each in suggestions
    ]
    return text_table(("change", "total", card, "cost"), rows)


def _helps(made: Suggestion, forecast: MemoryForecast) -> bool:
    saved = forecast.total_bytes - made.forecast.total_bytes
    return saved > 0 and (made.fits or saved * _LEAST_SHARE >= forecast.total_bytes)


def _first_that_fits(
    sizes: Sequence[_Change], workload: Workload, origin: Origin, memory: int
) -> tuple[_Change, Suggestion] | None:
    """Return the first of some changes that is enough, else the last one; None where none can be forecast."""
    last = None
    for change in sizes:
        try:
            made = origin.predict(workload.replace(**change.step), change.options)
        except SafeLoadingError:
            continue  # the model or the step cannot be changed so
        last = change, Suggestion(change.text, change.cost, made, made.fits(memory))
        if last[1].fits:
            break
    return last


def _joined(changes: Sequence[_Change]) -> _Change:
    step = {name: value for change in changes for name, value in change.step.items()}
    options = {name: value for change in changes for name, value in change.options.items()}
    return _Change(", ".join(change.text for change in changes), "that of each of them", step, options)


def _changes(workload: Workload, origin: Origin) -> Iterator[list[_Change]]:
    """Yield each kind of change in its sizes, the least first."""
    trains, options = workload.kind == "train", origin.options
    if not origin.built:
        yield _attention(options.get("attn_implementation"), flash=origin.flash)
    if trains and not workload.gradient_checkpointing:
        cost = "a second forward pass, about a third of the time"
        yield [_Change("gradient_checkpointing=True", cost, {"gradient_checkpointing": True})]
    if options.get("inputs") is None:
        yield list(_fewer_rows(workload))
    if workload.eval_batch_size > 1:
        halved = (workload.eval_batch_size >> times for times in range(1, workload.eval_batch_size.bit_length()))
        cost = "more batches in an evaluation"
        yield [_Change(f"eval_batch_size={rows}", cost, {"eval_batch_size": rows}) for rows in halved]
    if trains and workload.optimizer in _ADAM:
        yield [_Change('optimizer="adamw_8bit"', "moments rounded to 8 bits", {"optimizer": "adamw_8bit"})]
    if trains and not workload.activation_offload:
        cost = "transfers to the host and back in each step"
        yield [_Change("activation_offload=True", cost, {"activation_offload": True})]
    if not origin.built and not origin.quantized and (not trains or workload.adapter is not None):
        yield [_Change(QLORA_WRITTEN, "a base rounded to 4 bits", options={"quantization_config": QLORA})]
    if options.get("inputs") is None:
        yield list(_shorter_rows(workload))
    if trains and options.get("spread") is None and not origin.quantized:
        spreads = {ranks: {"spread": Spread.fsdp2(ranks)} for ranks in _RANKS}
        yield [
            _Change(f"spread=Spread.fsdp2({ranks})", f"{ranks} cards", options=option, combines=False)
            for ranks, option in spreads.items()
        ]


def _attention(now: object, *, flash: bool) -> list[_Change]:
    names = {"eager": ["sdpa", FLASH_2], None: [FLASH_2], "sdpa": [FLASH_2]}
    costs = {"sdpa": "none", FLASH_2: "the package flash-attn"}
    key = now if isinstance(now, str) or now is None else ""
    return [
        _Change(f'attn_implementation="{name}"', costs[name], options={"attn_implementation": name})
        for name in names.get(key, [])
        if flash or name != FLASH_2
    ]


def _fewer_rows(workload: Workload) -> Iterator[_Change]:
    """Yield the parts into which a batch can be cut, largest first; in training with the steps that sum them up.

    Pairs of preferences stay whole: those of a loss of pairs, and of DPO, which no step with a reference is told from.
    """
    paired = workload.pair_loss or (workload.reference and not workload.completion_length)
    whole = 2 if paired and workload.batch_size % 2 == 0 else 1
    for rows in range(workload.batch_size // 2, 0, -1):
        if workload.batch_size % rows or rows % whole:
            continue
        parts = workload.batch_size // rows
        if workload.kind != "train":
            yield _Change(f"batch_size={rows}", f"{parts} batches for one", {"batch_size": rows})
            continue
        step = {"batch_size": rows, "gradient_accumulation_steps": workload.gradient_accumulation_steps * parts}
        if workload.steps_per_generation:
            step["steps_per_generation"] = workload.steps_per_generation * parts
        text = ", ".join(f"{name}={value}" for name, value in step.items())
        yield _Change(text, f"{parts} micro-batches for one", step)


def _shorter_rows(workload: Workload) -> Iterator[_Change]:
    if workload.completion_length:
        return  # of which nobody knows whether the prompts or the completions may be shorter
    length = workload.sequence_length // 2
    name = "sequence_length" if workload.kind == "train" else "context_length"
    while length >= _SHORTEST_ROW:
        yield _Change(f"{name}={length}", "the rest of each row", {"sequence_length": length}, combines=False)
        length //= 2
