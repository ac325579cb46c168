"""Every exception that this package raises, in one tree.

::

    SafeLoadingError
    ├── ArgumentError           (ValueError) (TypeError) arguments that contradict each other or the call
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

import re
from collections.abc import Iterable, Mapping

SHOWN = 24  # problems in the text; an adapter for another model has hundreds, and the first ones say it
_MOST = 4000  # characters of one message
_UNPRINTABLE = re.compile(
    # control characters, and those that are not seen or turn the direction of what follows; then lone surrogates
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff]"
    # the first sign of a line that a runner of GitHub or Azure takes for a command
    r"|(?<![^\n])[ \t]*(?::(?=:)|#(?=#(?:\[|vso)))"
)


def printable(text: object, most: int | None = _MOST, *, lines: bool = True) -> str:
    """Return a text with words of others so that it can be printed: at most so long, and acting on no terminal or log.

    Names of modules, tensors and files are whatever their author wrote: an escape sequence, a line that a CI runner
    takes for a command, half a character that no encoding has. Those are shown as Python writes them in a string. Of a
    text that is too long the middle is left out, since the remedy stands at its end. Without ``lines`` it is one line.
    """
    shown = str(text)
    if most is not None and len(shown) > most:
        tail = most // 4
        shown = f"{shown[: most - tail]} ... ({len(shown) - most} characters left out) ... {shown[-tail:]}"
    if not lines:
        shown = shown.replace("\n", "\\n")
    return _UNPRINTABLE.sub(lambda found: "".join(map(_as_in_a_string, found[0])), shown)


def _as_in_a_string(character: str) -> str:
    if character in " \t":
        return character
    return f"\\x{ord(character):02x}" if character in ":#" else character.encode("unicode_escape").decode("ascii")


class SafeLoadingError(Exception):
    """The root of every exception of this package.

    Args:
        message: What happened, with both sides and the fix.
        problems: The single problems, when there are several; the first 24 are lines of the message.
    """

    def __init__(self, message: str, problems: Iterable[str] = ()) -> None:
        self.problems: tuple[str, ...] = tuple(map(printable, problems))
        lines = [printable(message), *(f"  - {problem}" for problem in self.problems[:SHOWN])]
        if len(self.problems) > SHOWN:
            lines.append(f"  ... and {len(self.problems) - SHOWN} more, all in `.problems` of this exception")
        super().__init__("\n".join(lines))


class ArgumentError(SafeLoadingError, ValueError, TypeError):
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
    """A folder cannot be written, or not without harm to its files or to the inputs."""


class MergeError(SafeLoadingError, ValueError):
    """Adapters cannot be merged into their base; nothing was changed."""


class WrapError(SafeLoadingError, ValueError):
    """User code cannot go around a model, or would not run there; nothing was changed."""


class TraceError(SafeLoadingError, RuntimeError):
    """A model cannot be run on fake tensors, so the memory of its step is not known.

    Attributes:
        fix: The way to mend it, with which the message ends; empty where none is known.
    """

    fix: str = ""


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
