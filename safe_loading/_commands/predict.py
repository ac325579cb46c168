"""``python -m safe_loading predict``."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .answer import INFEASIBLE, OK, Answer, Commands, example
from .grpo import OF_GRPO, add_grpo, sizes_of_grpo, with_grpo
from .quantization import add_quantization, quantization
from .training import OF_A_STEP, add_training, refuse_unused, training

if TYPE_CHECKING:
    from peft import LoraConfig

    from safe_loading._core.cards import Card
    from safe_loading._core.spread import Spread, Wrapper
    from safe_loading._core.workload import Workload
    from safe_loading._memory.forecast.on_cards import ForecastsOnCards, OnCards
    from safe_loading._memory.forecast.report import MemoryForecast, Suggestion

_CARDS = ("l4", "l40s", "h100")
_FIRST = {"batch": 1, "length": 512}
_MOST_VALUES = 8
_FEWEST = "fewest"
_SHORT = {"alpha": "lora_alpha", "dropout": "lora_dropout", "targets": "target_modules"}


def add(commands: Commands) -> None:
    """Declare the command."""
    summary = "forecast the GPU memory of a step, and which cards it fits on, from the config alone"
    more = f"{summary}. Exits with 3 if the step takes more than --limit."
    parser = commands.add_parser(
        "predict", help=summary, description=more, epilog=example("predict meta-llama/Llama-3-8B --train 4x1024")
    )
    declare = parser.add_argument
    declare("model", metavar="MODEL", help="folder or hub id of a model or an adapter; its config is enough")
    ends = "a prompt of ROWS x TOKENS and one token more, or NEW tokens more: the peaks of both ends"
    declare("--generate", metavar="[ROWSx]TOKENS[+NEW]", help=ends)
    add_training(parser)
    add_grpo(parser)
    declare("--lora", nargs="+", metavar="FIELD=VALUE", help="train a LoRA: r=16 alpha=32 targets=q_proj,v_proj")
    add_quantization(parser)
    declare("--dtype", help="dtype of the weights, such as bfloat16 (default: the checkpoint's)")
    declare("--auto-class", metavar="CLASS", help="class of transformers to build (default: the config's)")
    declare("--attention", metavar="NAME", help="as attn_implementation of from_pretrained, such as eager")
    what = "spread over N GPUs, or the fewest of --card; --train is what each runs (default: with --fsdp)"
    declare("--gpus", type=_gpus, metavar="N|fewest", help=what)
    ways = parser.add_mutually_exclusive_group()
    ways.add_argument("--fsdp", action="store_true", help="shard with FSDP2")
    ways.add_argument("--fsdp1", action="store_true", help="shard with FSDP1, FullyShardedDataParallel")
    ways.add_argument("--ddp", action="store_true", help="the whole model on each GPU, with DistributedDataParallel")
    ways.add_argument("--zero", type=int, metavar="STAGE", help="1, 2 or 3: DeepSpeed's ZeRO with its defaults")
    declare(
        "--cpu-offload",
        action="store_true",
        help="keep FSDP's shards and the optimizer on the host; with --zero, the optimizer",
    )
    wrappers = "who makes FSDP's units: accelerate for the Trainer and trl (default: safe_loading, as load_at_prepare)"
    declare("--wrapped-by", choices=("safe_loading", "accelerate"), help=wrappers)
    declare("--activation-offload", action="store_true", help="keep what is saved for the backward pass on the host")
    emptied = "the loop empties the allocator's cache after each step, as the Trainer's torch_empty_cache_steps=1"
    declare("--empties-cache", action="store_true", help=emptied)
    packed = "the ROWS of --train lie one after the other in one row without padding, as trl packs them"
    declare("--packing", action="store_true", help=packed)
    cards = f"such as h100 'rtx 4090' 24GB (default: {' '.join(_CARDS)})"
    declare("--card", nargs="+", metavar="NAME|SIZE", help=cards)
    declare("--sweep", choices=("batch", "length"), help="forecast several sizes, until none of the cards takes it")
    declare("--values", metavar="N,N,...", help="the sizes of --sweep (default: doubled from 1 row or 512 tokens)")
    declare("--limit", metavar="SIZE", help="exit with 3 if a step takes more than this, context included: 80GB")
    declare("--picture", metavar="FILE", help="write the bars and the cards' memory to an SVG")
    declare("--trust-remote-code", action="store_true", help="run the repository's own code")
    declare("--json", action="store_true", help="print the forecasts as JSON")
    parser.set_defaults(run=_run)


def _gpus(text: str) -> int | str:
    if text != _FEWEST and not re.fullmatch("-?[0-9]+", text):
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number nor {_FEWEST!r}")
    return text if text == _FEWEST else int(text)


def _run(arguments: argparse.Namespace) -> Answer:
    quantized = quantization(arguments)  # which refuses a name before the engines are imported
    from safe_loading._core.cards import card_of
    from safe_loading._core.parse_size import parse_size
    from safe_loading._memory.forecast.on_cards import ForecastsOnCards
    from safe_loading.errors import ArgumentError

    if arguments.sweep is None:
        refuse_unused(arguments, "values", needs="--sweep")
    if arguments.gpus == _FEWEST and (len(arguments.card or ()) != 1 or arguments.sweep is not None):
        raise ArgumentError("--gpus fewest is for one card and one size: name the card, such as --card h100.")
    limit = None if arguments.limit is None else parse_size(arguments.limit, "--limit")
    cards = tuple(card_of(name) for name in arguments.card or _CARDS)
    workload = _workload(arguments)
    forecast = _forecaster(arguments, quantized)
    rows = tuple(_rows(arguments, workload, cards, forecast))
    report = ForecastsOnCards(arguments.sweep or "", cards, rows)
    if arguments.picture is not None:
        _write(Path(arguments.picture), report._repr_svg_())
    fits = limit is None or all(forecast.fits(limit) for row in rows for forecast in row.forecasts)
    name, changes = _suggestions(report, arguments.limit, limit)
    if arguments.json:
        return Answer([_json(report, limit, changes, fits=fits)], OK if fits else INFEASIBLE)
    verdict = _verdict(report, arguments.limit, fits=fits, fewest=arguments.gpus == _FEWEST)
    texts = [" ".join(verdict), *_changes_text(name, changes), ""]
    texts += [] if report.varied else [f"{rows[0].forecasts[0]}\n"]
    return Answer([*texts, str(report)], OK if fits else INFEASIBLE)


def _verdict(report: ForecastsOnCards, limit: str | None, *, fits: bool, fewest: bool) -> Iterator[str]:
    """Yield sentences: the limit, the cards, and how many of them; of several sizes each row says its own."""
    from safe_loading._core.parse_size import forgotten_unit, parse_size

    if limit is not None:
        yield f"{'Within' if fits else 'MORE THAN'} the limit of {limit}."
    sizes = [card.memory for card in report.cards] + ([] if limit is None else [parse_size(limit, "--limit")])
    yield from filter(None, [forgotten_unit(sizes)])
    if report.varied:
        yield f"By {report.varied}, {len(report.rows)} sizes:"
        return
    by_answer: dict[bool, list[str]] = {True: [], False: []}
    for card, answer in zip(report.cards, report.rows[0].fits, strict=True):
        by_answer[answer].append(card.name)
    for answer, names in by_answer.items():
        if names:
            yield f"{'Fits' if answer else 'Does NOT fit'} on {', '.join(names)}."
    if fewest:
        yield f"The fewest GPUs that take it: {_gpus_of(report)}."


def _suggestions(report: ForecastsOnCards, text: str | None, limit: int | None) -> tuple[str, tuple[Suggestion, ...]]:
    """Return the name of the limit or the largest card, whichever does not take the step, and changes for it."""
    if report.varied:
        return "", ()
    (row,) = report.rows
    if text is not None and limit is not None and not all(made.fits(limit) for made in row.forecasts):
        return text, max(row.forecasts, key=lambda made: made.total_bytes).suggestions(limit)
    if any(row.fits):
        return "", ()
    largest = max(range(len(report.cards)), key=lambda place: report.cards[place].memory)
    return report.cards[largest].name, row.forecasts[largest].suggestions(report.cards[largest].memory)


def _changes_text(name: str, changes: tuple[Suggestion, ...]) -> Iterator[str]:
    from safe_loading._memory.forecast.suggestions import suggestions_table

    if changes:
        yield f"\nChanges that take less, from the cheapest to the dearest:\n\n{suggestions_table(changes, name)}"


def _json(report: ForecastsOnCards, limit: int | None, changes: tuple[Suggestion, ...], *, fits: bool) -> str:
    facts = json.loads(report.to_json())
    facts |= {"gpus": _gpus_of(report), "limit": limit, "within_limit": None if limit is None else fits}
    facts["suggestions"] = [each.facts() for each in changes]
    return json.dumps(facts, indent=2)


def _gpus_of(report: ForecastsOnCards) -> int:
    return max(1, len(report.rows[0].forecasts[0].ranks))


def _rows(
    arguments: argparse.Namespace,
    workload: Workload,
    cards: tuple[Card, ...],
    forecast: Callable[[Workload, Card], MemoryForecast],
) -> Iterator[OnCards]:
    from safe_loading._memory.forecast.on_cards import OnCards

    field = {"batch": "batch_size", "length": "sequence_length"}.get(arguments.sweep or "")
    for value in sizes_of_grpo(arguments, _values(arguments)) if field else [None]:
        step = workload if field is None else workload.replace(**{field: value})
        kinds = {card.capability: card for card in cards}
        by_capability = {capability: forecast(step, card) for capability, card in kinds.items()}
        forecasts = tuple(by_capability[card.capability] for card in cards)
        fits = tuple(made.fits(card.memory) for made, card in zip(forecasts, cards, strict=True))
        yield OnCards("" if value is None else str(value), forecasts, fits)
        if arguments.values is None and not any(fits):
            return


def _values(arguments: argparse.Namespace) -> list[int]:
    from safe_loading.errors import ArgumentError

    if arguments.values is None:
        return [_FIRST[arguments.sweep] << place for place in range(_MOST_VALUES)]
    if not re.fullmatch(r"[0-9]+(,[0-9]+)*", arguments.values):
        raise ArgumentError(f"--values {arguments.values}: write whole numbers with commas between them: 1,2,4.")
    return sorted({int(value) for value in arguments.values.split(",")})


def _workload(arguments: argparse.Namespace) -> Workload:
    from safe_loading._core.workload import Workload
    from safe_loading.errors import ArgumentError

    kinds = [name for name in ("train", "generate") if getattr(arguments, name) is not None]
    if len(kinds) != 1:
        raise ArgumentError("say what is run, with one of --train 4x1024 and --generate 1x4096.")
    if arguments.lora is not None and arguments.adapter is not None:
        raise ArgumentError("--lora and --adapter are two ways to say what is trained: give one of them.")
    adapter = arguments.adapter if arguments.lora is None else _lora(arguments.lora)
    if kinds == ["train"]:
        step = training(arguments).replace(adapter=adapter, activation_offload=arguments.activation_offload)
        return with_grpo(arguments, step)
    refuse_unused(arguments, *OF_A_STEP, *OF_GRPO, "activation_offload", "empties_cache", "packing")
    match = re.fullmatch(r"(?:(\d+)x)?(\d+)(?:\+(\d+))?", arguments.generate.lower())
    if match is None:
        raise ArgumentError(
            f"--generate {arguments.generate}: write ROWSxTOKENS, such as 1x4096, or only TOKENS. 1x4096+512 has 512 "
            f"new tokens."
        )
    return Workload.generate(int(match[1] or 1), int(match[2]), adapter=adapter, new_tokens=int(match[3] or 0))


def _lora(pairs: list[str]) -> LoraConfig:
    import dataclasses

    from peft import LoraConfig

    from safe_loading.errors import ArgumentError

    # the type of each field, of which some take a list, and a name alone is a list of one
    known = {field.name: str(field.type) for field in dataclasses.fields(LoraConfig)}
    fields: dict[str, Any] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        name = _SHORT.get(name, name)
        if not equals or name not in known:
            problem = f"peft.LoraConfig has no field {name!r}" if equals else "is not FIELD=VALUE"
            raise ArgumentError(f"--lora {pair}: {problem}; write r=16 alpha=32 targets=q_proj,v_proj.")
        fields[name] = _value(value, listed="list[" in known[name])
    try:
        return LoraConfig(**fields)
    except (TypeError, ValueError) as error:
        raise ArgumentError(f"--lora {' '.join(pairs)}: peft refuses it: {error}") from error


def _value(text: str, *, listed: bool) -> object:
    """Return a number, a flag, a list of names or a name, as the text of one is written in JSON or with commas."""
    try:
        return json.loads(text.lower() if text in ("True", "False") else text)
    except ValueError:
        return text.split(",") if listed and ("," in text or not text.startswith("all-")) else text


def _forecaster(
    arguments: argparse.Namespace, quantized: dict[str, Any] | None
) -> Callable[[Workload, Card], MemoryForecast]:
    from safe_loading._memory.fewest_ranks import fewest_ranks
    from safe_loading._memory.predict_memory import predict_memory

    spread = _spread(arguments)

    def forecast(workload: Workload, card: Card) -> MemoryForecast:
        options: dict[str, Any] = {
            "capability": card.capability,
            "dtype": arguments.dtype,
            "auto_class": arguments.auto_class,
            "attn_implementation": arguments.attention,
            "quantization_config": quantized,
            "prepare_for_kbit": arguments.kbit,
            "empties_cache": arguments.empties_cache,
            "trust_remote_code": arguments.trust_remote_code,
        }
        if arguments.packing:
            workload = workload.replace(padding_free=True)
        if spread is not None and arguments.gpus == _FEWEST:
            return fewest_ranks(arguments.model, workload, card.memory, spread, **options)
        return predict_memory(arguments.model, workload, spread=spread, **options)

    return forecast


def _spread(arguments: argparse.Namespace) -> Spread | None:
    from safe_loading._core.spread import Spread

    if arguments.gpus is None:
        refuse_unused(arguments, "fsdp", "fsdp1", "ddp", "zero", "cpu_offload", "wrapped_by", needs="--gpus")
        return None
    gpus = 2 if arguments.gpus == _FEWEST else arguments.gpus  # any number: the search replaces it
    offloaded = arguments.cpu_offload
    wrapper: Wrapper = arguments.wrapped_by or "safe_loading"
    if arguments.fsdp1:
        return Spread.fsdp1(gpus, cpu_offload=offloaded, wrapped_by=wrapper)
    if arguments.zero is not None or arguments.ddp:
        refuse_unused(arguments, "wrapped_by", needs="--fsdp or --fsdp1")
    if arguments.zero is not None:
        return Spread.zero(gpus, stage=arguments.zero, offload_optimizer=offloaded)
    if arguments.ddp:
        refuse_unused(arguments, "cpu_offload", needs="--fsdp")
        return Spread.ddp(gpus)
    if gpus == 1 and not (arguments.fsdp or offloaded or arguments.wrapped_by):
        return None
    return Spread.fsdp2(gpus, cpu_offload=offloaded, wrapped_by=wrapper)


def _write(path: Path, text: str) -> None:
    from safe_loading.errors import OutputError

    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise OutputError(f"--picture {path} cannot be written: {error}") from error
