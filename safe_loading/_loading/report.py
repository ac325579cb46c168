"""The report of a load: which bytes went where, in which dtype and time, and the findings about it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from safe_loading._core.report import Finding, Table, Verdict, format_bytes

if TYPE_CHECKING:
    from peft import PeftModel

FROM_PRETRAINED, INTO_PLACE = "from_pretrained", "into place"
_HEADER = ("what", "source", "device", "dtypes", "tensors", "size", "seconds")


@dataclasses.dataclass(frozen=True)
class LoadedPart:
    """The base model or one adapter on its device.

    Attributes:
        name: ``"base"`` or the adapter's name.
        source: The folder or hub id that it came from; the class name of a model that the caller passed.
        commit: The hub's commit; None for a local folder.
        device: The device.
        dtypes: The number of tensors of each dtype.
        tensors: The number of tensors.
        bytes: Their size in bytes.
        seconds: The time it took to load.
        renamed: ``{key on disk: key used}`` for keys that have another name in the model.
        method: How the weights of a base were read: by ``"from_pretrained"``, or those that transformers would copy
            more than once went ``"into place"`` from their files; empty for adapters and a base loaded already.
        method_reason: Why so.
    """

    name: str
    source: str
    commit: str | None
    device: str
    dtypes: Mapping[str, int]
    tensors: int
    bytes: int
    seconds: float
    renamed: Mapping[str, str] = dataclasses.field(default_factory=dict)
    method: str = ""
    method_reason: str = ""


@dataclasses.dataclass(frozen=True)
class LoadReport(Verdict):
    """The report of :func:`load_peft_on_rank` or :func:`load_adapter_on_rank`.

    Attributes:
        rank: The position of this rank among those that loaded together.
        ranks: How many ranks loaded together.
        device: The one device that everything is on.
        parts: The base model first (not for a later adapter), then the adapters.
        findings: What is worth knowing; with ``strict=False`` also what would have been an error.
    """

    rank: int
    ranks: int
    device: str
    parts: tuple[LoadedPart, ...]
    findings: tuple[Finding, ...] = ()

    @property
    def bytes(self) -> int:
        """The bytes on the device because of this load."""
        return sum(part.bytes for part in self.parts)

    def _tables(self) -> list[Table]:
        rows = [
            (
                part.name,
                f"{part.source}@{part.commit[:8]}" if part.commit else part.source,
                part.device,
                ", ".join(f"{dtype} x{count}" for dtype, count in part.dtypes.items()),
                str(part.tensors),
                format_bytes(part.bytes),
                f"{part.seconds:.3f}",
            )
            for part in self.parts
        ]
        return [Table(_HEADER, rows)]

    def _notes(self) -> Sequence[str]:
        told = [part for part in self.parts if part.method == INTO_PLACE]  # the other method is what people expect
        return [*(f"{part.name}: {part.method}; {part.method_reason}" for part in told), *super()._notes()]

    def _title(self) -> str:
        return f"rank {self.rank} of {self.ranks} on {self.device}"

    def _facts(self) -> Mapping[str, object]:
        return {"bytes": self.bytes, **super()._facts()}


if TYPE_CHECKING:

    class LoadedPeftModel(PeftModel):
        """A PeftModel and its report, as type checkers see it; the class at run time is peft's."""

        load_report: LoadReport
