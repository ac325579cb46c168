"""Every exception that this package raises, in one tree.

::

    SafeLoadingError
    ├── ArgumentError           (ValueError)         arguments that contradict each other or the call
    ├── EngineError             (ImportError)        an engine (torch, transformers, ...) is missing or too old
    ├── CheckpointError         (ValueError)         a folder or file is not whole, or not safe to read
    │   ├── CheckpointNotFound  (FileNotFoundError)  there is nothing of the kind where it was looked for
    │   └── PickleRefused                            the weights are a pickle, and nobody asked for one
    ├── AdapterError            (ValueError)         an adapter does not fit its model
    │   └── AdapterExists                            another adapter already has that name
    ├── OutputError             (OSError)            a folder cannot be written, or not without harm
    ├── MergeError              (ValueError)         adapters cannot be merged into their base
    ├── WrapError               (ValueError)         user code cannot go around a model, or would not run
    ├── TraceError              (RuntimeError)       a model cannot be run on fake tensors, so its step is not known
    ├── DeviceMapInfeasible     (ValueError) (MemoryError) a model does not fit under its limits
    ├── DeviceError             (RuntimeError)       no device for this rank, or something landed on another one
    └── RankError               (RuntimeError)       another rank failed, so this one stops too
        ├── RankTimeout         (TimeoutError)       a rank did not arrive within the limit
        └── RanksDisagree                            the ranks would load different things

Each derives from the builtin that callers expect, so ``except ValueError`` and
``except SafeLoadingError`` both work. An error that was found in several places
carries all of them in ``problems``, one line each.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

SHOWN = 24  # problems in the text; an adapter for another model has hundreds, and the first ones say it


class SafeLoadingError(Exception):
    """The root of every exception of this package.

    Args:
        message: What happened, with both sides and the fix.
        problems: The single problems, when there are several; the first 24 are lines of the message.
    """

    def __init__(self, message: str, problems: Iterable[str] = ()) -> None:
        self.problems: tuple[str, ...] = tuple(problems)
        lines = [message, *(f"  - {problem}" for problem in self.problems[:SHOWN])]
        if len(self.problems) > SHOWN:
            lines.append(f"  ... and {len(self.problems) - SHOWN} more, all in `.problems` of this exception")
        super().__init__("\n".join(lines))


class ArgumentError(SafeLoadingError, ValueError):
    """Arguments that contradict each other, or that this call cannot honor."""


class EngineError(SafeLoadingError, ImportError):
    """A package that this one calls is missing, or too old for the call."""


class CheckpointError(SafeLoadingError, ValueError):
    """A folder or file is not whole, or not safe to read."""


class CheckpointNotFound(CheckpointError, FileNotFoundError):
    """There is nothing of the kind where it was looked for."""


class PickleRefused(CheckpointError):
    """The weights are a pickle, which can run code when it is read, and nobody asked for one."""


class AdapterError(SafeLoadingError, ValueError):
    """An adapter does not fit the model that it should be attached to."""


class AdapterExists(AdapterError):
    """Another adapter of the model already has that name."""


class OutputError(SafeLoadingError, OSError):
    """A folder cannot be written, or not without harm to what is there or is read."""


class MergeError(SafeLoadingError, ValueError):
    """Adapters cannot be merged into their base; nothing was changed."""


class WrapError(SafeLoadingError, ValueError):
    """User code cannot go around a model, or would not run there; nothing was changed."""


class TraceError(SafeLoadingError, RuntimeError):
    """A model cannot be run on fake tensors, so what its step takes is not known."""


class DeviceMapInfeasible(SafeLoadingError, ValueError, MemoryError):
    """A model does not fit under its limits, in no order of the devices.

    Args:
        message: What is missing where.
        problems: The changes of which any one would do.
        missing_bytes: The least that is missing, when it is added to `device`.
        device: The device that is the least short.
        shortages: For each device the bytes that would do if they were added to it alone.
        more_cards: How many more cards like one of the limits would do, by the first card of each kind.
    """

    def __init__(
        self,
        message: str,
        problems: Iterable[str] = (),
        *,
        missing_bytes: int = 0,
        device: int | str = 0,
        shortages: Mapping[int | str, int] | None = None,
        more_cards: Mapping[int | str, int] | None = None,
    ) -> None:
        super().__init__(message, problems)
        self.missing_bytes = missing_bytes
        self.device = device
        self.shortages: Mapping[int | str, int] = dict(shortages or {})
        self.more_cards: Mapping[int | str, int] = dict(more_cards or {})


class DeviceError(SafeLoadingError, RuntimeError):
    """This rank has no device, or something landed on a device that is not its own."""


class RankError(SafeLoadingError, RuntimeError):
    """Another rank failed; its cause is in the text."""


class RankTimeout(RankError, TimeoutError):
    """A rank did not arrive within the limit."""


class RanksDisagree(RankError):
    """The ranks resolved or read different things."""
