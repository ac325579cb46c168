"""Ctrl-C at a chosen line of this package: as a signal, or raised right there as other threads and debuggers do it."""

from __future__ import annotations

import hashlib
import os
import random
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import peft
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import safe_loading

PACKAGE = str(Path(safe_loading.__file__).parent)
WITHIN = (PACKAGE, str(Path(peft.__file__).parent))  # peft changes a model as well
# A look at every object of the process: nearly all the lines of a wrap, and none of them changes anything.
PASSED_OVER = "stale_holders"


class Lines:
    """The lines that ran, and where the interruption came."""

    def __init__(self) -> None:
        self.count = 0
        self.place = ""


@contextmanager
def interrupted_at(
    number: int = 0, *, signalled: bool = False, within: tuple[str, ...] = WITHIN, also: Sequence[int] = ()
) -> Iterator[Lines]:
    """Interrupt at the line of this number, counted from 1 over the files ``within``; 0 only counts them.

    The processes ``also`` get the signal too, as those of a launcher do at Ctrl-C.
    """
    lines = Lines()

    def local(frame: Any, event: str, _: Any) -> Any:
        if event == "line" and (signalled or not answers_for_a_device(frame)):
            lines.count += 1
            if lines.count == number:
                lines.place = f"{frame.f_code.co_filename}:{frame.f_lineno}"
                for process in also:
                    if process != os.getpid():
                        os.kill(process, signal.SIGINT)
                if not signalled:
                    raise KeyboardInterrupt
                signal.raise_signal(signal.SIGINT)
        return local

    def traced(frame: Any, *_: Any) -> Any:
        code = frame.f_code
        return local if code.co_filename.startswith(within) and code.co_name != PASSED_OVER else None

    before = sys.gettrace()
    sys.settrace(traced)
    try:
        yield lines
    finally:
        sys.settrace(before)


def answers_for_a_device(frame: Any) -> bool:
    """Whether torch's C++ asks a tensor for its device, where any exception ends the process: nobody can hold one back
    that another thread raises."""
    return frame.f_code.co_name == "__torch_dispatch__" and frame.f_locals.get("func") is torch.ops.prim.device.default


def sampled(count: int, most: int, seed: int = 0) -> list[int]:
    """Return the numbers of at most so many lines, the same ones each time."""
    numbers = range(1, count + 1)
    return sorted(random.Random(seed).sample(numbers, most)) if count > most else list(numbers)


def problems_at(
    numbers: list[int],
    make: Callable[[], Any],
    call: Callable[[Any], Any],
    facts: Callable[[Any], Any],
    *,
    signalled: bool,
) -> list[str]:
    """Return the lines after whose interruption the facts of what ``make`` returns are other than before."""
    problems = []
    for number in numbers:
        made = make()
        before = facts(made)
        try:
            with interrupted_at(number, signalled=signalled) as lines:
                call(made)
        except KeyboardInterrupt:
            pass
        else:
            problems.append(f"{number}, {lines.place}: not interrupted")
            continue
        after = facts(made)
        problems += [f"{number}, {lines.place}: {name}" for name in before if before[name] != after.get(name)]
        problems += [f"{number}, {lines.place}: new {name}" for name in after.keys() - before.keys()]
    return problems


def bits(tensor: torch.Tensor) -> Any:
    data = tensor.detach().contiguous()
    content = hashlib.sha256(data.view(torch.uint8).numpy().tobytes()).hexdigest() if data.numel() else ""
    return type(tensor), tensor.dtype, tuple(tensor.shape), str(tensor.device), content


def facts(made: Any) -> dict[str, Any]:
    """What a caller can see of the modules that it passed, and of torch."""
    found: dict[str, Any] = {
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "generator": torch.get_rng_state().numpy().tobytes(),
        "modes": (len(_get_current_dispatch_mode_stack()), len(_get_current_function_mode_stack())),
        "switches": (
            torch._C._is_torch_function_enabled(),
            str(torch._C._dispatch_tls_local_include_set()),
            str(torch._C._dispatch_tls_local_exclude_set()),
        ),
        "Ctrl-C": signal.getsignal(signal.SIGINT),
        "functions": (nn.functional.softmax, nn.functional.dropout, nn.functional.scaled_dot_product_attention),
    }
    for number, module in enumerate(made if isinstance(made, tuple) else (made,)):
        for path, each in module.named_modules():
            own = {
                name: value
                for name, value in vars(each).items()
                if not isinstance(value, (nn.Module, torch.Tensor, dict)) and not callable(value)
            }
            found[f"{number} {path}"] = (id(each), type(each), str(own), list(each._modules), list(each._parameters))
            hooks = {name: list(value) for name, value in vars(each).items() if "hooks" in name and value}
            found[f"{number} {path} hooks"] = str(hooks)
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            found[f"{number} {name}"] = (id(tensor), tensor.requires_grad, *bits(tensor))
        for name, config in getattr(module, "peft_config", {}).items():
            found[f"{number} config {name}"] = str(sorted(config.to_dict().items(), key=str))
    return found


def everything(model: nn.Module) -> dict[str, Any]:
    """The facts, and all else that a wrap could change.

    A tensor without memory of its own has no bits, and a DTensor has those of its shard.
    """
    found = facts(())
    for path, each in model.named_modules():
        own = {name: id(value) for name, value in vars(each).items() if not isinstance(value, dict)}
        registries = {name: [*value] for name, value in vars(each).items() if isinstance(value, dict)}
        found[path] = (id(each), type(each), own, registries)
    for name, tensor in (*model.named_parameters(remove_duplicate=False), *model.named_buffers()):
        own = {key: id(value) for key, value in vars(tensor).items()}
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        empty = local.is_meta or local.untyped_storage().nbytes() < local.nbytes
        found[f"tensor {name}"] = (
            id(tensor),
            tensor.requires_grad,
            own,
            id(tensor.grad),
            None if empty else bits(local),
        )
    return found
