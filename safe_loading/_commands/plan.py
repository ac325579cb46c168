"""``python -m safe_loading plan``."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from safe_loading.errors import ArgumentError

from .answer import INFEASIBLE, NOT_OK, OK, Answer, Commands, example
from .quantization import add_quantization, capability, quantization
from .training import OF_A_STEP, add_training, refuse_unused, training

if TYPE_CHECKING:
    from safe_loading._core.workload import Workload
    from safe_loading._memory.plan.device_map_plan import DeviceMapPlan
    from safe_loading.errors import DeviceMapInfeasible

_FEWEST = "fewest"


def add(commands: Commands) -> None:
    """Declare the command."""
    summary = "plan a device map that stays under a limit per device, before a byte is loaded"
    parser = commands.add_parser(
        "plan",
        help=summary,
        description=f"{summary}. Exits with 3 if the model does not fit.",
        epilog=example("plan meta-llama/Llama-3-8B --max-memory 0=24GB"),
    )
    declare = parser.add_argument
    declare("model", metavar="MODEL", help="folder or hub id; its config is enough")
    limits = "such as 0=20GiB 1=16e9 cpu=64GiB (default: what is free now)"
    declare("--max-memory", nargs="+", metavar="DEVICE=SIZE", help=limits)
    declare(
        "--card", metavar="NAME|SIZE", help="plan for cards such as h100, 'rtx 4090' or 24GB, which may be elsewhere"
    )
    declare("--gpus", metavar="N|fewest", help="how many of --card, or the fewest that hold the model (default: 1)")
    declare("--batch", type=int, help="rows of a batch (default: 1)")
    declare("--context", type=int, help="tokens in the KV cache; without it only weights are counted")
    add_training(parser)
    add_quantization(parser)
    declare("--capability", metavar="X.Y", help="compute capability of the cards, which decides whether fp8 stays: 9.0")
    declare("--dtype", help="dtype of the weights, such as bfloat16 (default: the checkpoint's)")
    declare("--attention", metavar="NAME", help="as attn_implementation of from_pretrained, such as eager")
    objectives = "load evenly, or use as few as possible"
    declare("--auto-class", metavar="CLASS", help="class of transformers to build (default: the config's)")
    declare("--objective", choices=("balance", "fill"), default="balance", help=objectives)
    declare("--offload", choices=("never", "cpu", "disk"), default="never", help="where to put what does not fit")
    declare("--overhead", metavar="SIZE", help="bytes to keep free on each accelerator")
    declare("--no-verify", action="store_true", help="do not run the step on simulated devices")
    declare("--trust-remote-code", action="store_true", help="run the repository's own code")
    declare("--json", action="store_true", help="print the plan as JSON")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> Answer:
    quantized = quantization(arguments)  # which refuses a name before the engines are imported
    from safe_loading.errors import DeviceMapInfeasible

    options = {
        "workload": _workload(arguments),
        "dtype": arguments.dtype,
        "auto_class": arguments.auto_class,
        "attn_implementation": arguments.attention,
        "quantization_config": quantized,
        "prepare_for_kbit": arguments.kbit,
        "capability": capability(arguments.capability),
        "objective": arguments.objective,
        "offload": arguments.offload,
        "overhead": arguments.overhead,
        "verify": not arguments.no_verify,
        "trust_remote_code": arguments.trust_remote_code,
    }
    try:
        plan = _planned(arguments, options)
    except DeviceMapInfeasible as error:
        return Answer([_infeasible_json(error) if arguments.json else f"safe_loading: {error}"], INFEASIBLE)
    if arguments.json:
        return Answer([plan.to_json()], OK if plan.ok else NOT_OK)
    shown = "\n".join(f"{path or '(all)'}: {device}" for path, device in plan.items())
    return Answer([f"{plan}\n\n{shown}"], OK if plan.ok else NOT_OK)


def _planned(arguments: argparse.Namespace, options: dict[str, Any]) -> DeviceMapPlan:
    """Return the plan under limits, or on cards by name."""
    from safe_loading._core.cards import card_memory
    from safe_loading._memory.fewest_cards import fewest_cards
    from safe_loading._memory.plan.device_memory import CUDA_CONTEXT
    from safe_loading._memory.plan_device_map import plan_device_map

    limits = _limits(arguments.max_memory)
    if arguments.card is None:
        refuse_unused(arguments, "gpus", needs="--card")
        return plan_device_map(arguments.model, limits, **options)
    of_host = _limits_of_host(limits)
    named = {name: value for name, value in options.items() if value is not None}  # what a named card may fill in
    if arguments.gpus == _FEWEST:
        if of_host or arguments.offload != "never":
            raise ArgumentError(
                "--gpus fewest holds all of the model: drop --offload and --max-memory, or give a number."
            )
        del named["offload"]
        return fewest_cards(arguments.model, arguments.card, **named)
    memory = card_memory(arguments.card, named, overhead=CUDA_CONTEXT)
    return plan_device_map(
        arguments.model, {**dict.fromkeys(range(_number(arguments.gpus)), memory), **of_host}, **named
    )


def _limits_of_host(limits: Mapping[str, str] | None) -> Mapping[str, str]:
    """Return the limits beside those of ``--card``, which may be those of the host and the disk."""
    others = [device for device in limits or () if device not in ("cpu", "disk")]
    if others:
        raise ArgumentError(f"--max-memory {others[0]}=... and --card are two limits of one card: drop one of them.")
    return limits or {}


def _number(gpus: str | None) -> int:
    if gpus is not None and (not gpus.isdecimal() or int(gpus) == 0):
        raise ArgumentError(f"--gpus {gpus}: write a number of cards from 1 on, or {_FEWEST}.")
    return 1 if gpus is None else int(gpus)


def _infeasible_json(error: DeviceMapInfeasible) -> str:
    from safe_loading._core.report import to_json

    shortages = {str(device): size for device, size in error.shortages.items()}
    facts = {"missing_bytes": error.missing_bytes, "device": error.device, "shortages": shortages}
    return to_json({"error": "DeviceMapInfeasible", "message": str(error), "problems": list(error.problems), **facts})


def _limits(pairs: list[str] | None) -> dict[str, str] | None:
    if pairs is None:
        return None
    limits: dict[str, str] = {}
    for pair in pairs:
        device, equals, size = pair.partition("=")
        if not equals or device in limits:
            problem = "names a device for the second time" if equals else "is not DEVICE=SIZE"
            raise ArgumentError(f"--max-memory {pair}: {problem}; write one limit per device: 0=20GiB cpu=64GiB.")
        limits[device] = size
    return limits


def _workload(arguments: argparse.Namespace) -> Workload:
    from safe_loading._core.workload import Workload

    if arguments.train is not None and arguments.context is not None:
        raise ArgumentError("--train and --context cannot be combined: a plan is for training or for generation.")
    rows = 1 if arguments.batch is None else arguments.batch
    if arguments.train is not None:
        return training(arguments, rows)
    refuse_unused(arguments, *OF_A_STEP)
    if arguments.context is not None:
        return Workload.generate(rows, arguments.context, adapter=arguments.adapter)
    refuse_unused(arguments, "batch", "adapter", needs="--context or --train")
    return Workload.weights_only()
