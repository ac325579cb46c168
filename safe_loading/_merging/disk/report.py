"""The report of a merge on disk. Imports no torch."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping

from safe_loading._core.report import Finding, Table, Verdict, format_bytes
from safe_loading._merging.weights.rounding_loss import RoundingLoss

_HEADER = ("what", "tensors", "size", "largest change")


@dataclasses.dataclass(frozen=True)
class MergedTensor:
    """One tensor of the output.

    Attributes:
        name: Its name on disk.
        file: Its file.
        action: ``"merged"`` (the delta was added), ``"rescaled"`` (the scales of codes to which it was added),
            ``"re-tied"`` (merged, under another name of a tied weight), ``"replaced"`` (its content is the adapter's,
            with the delta on top where there is one), ``"added"`` (the base has no tensor of that name), ``"cast"``
            (only its dtype changed) or ``"copied"``.
        dtype: Its safetensors dtype, such as ``"BF16"``.
        bytes: Its size.
        seconds: The time that a thread spent on it; 0 when an interrupted call wrote it.
        max_delta: The largest absolute change of an element; None where nothing was added.
        xxh3_128: The XXH3-128 of its bytes, as hexadecimal; None with ``verify=False``.
        rounding: What rounding the merged weight to codes again lost, where the output keeps the base's codes; None
            otherwise.
    """

    name: str
    file: str
    action: str
    dtype: str
    bytes: int
    seconds: float = dataclasses.field(compare=False)  # alike twice only by chance
    max_delta: float | None
    xxh3_128: str | None = None
    rounding: RoundingLoss | None = None


@dataclasses.dataclass(frozen=True)
class MergeReport(Verdict):
    """The report of :func:`merge_lora_checkpoint`.

    Attributes:
        output: The folder.
        base: The base: its source, and its commit when it came from the hub.
        adapters: The same of each adapter, with the SHA-256 of its files.
        tensors: Every tensor of the output.
        dropped: The tensors of the base that the output has no use for (the head for another task).
        carried: The files that were copied along.
        left_out: The files of the base that were not.
        bytes_read: The bytes of tensors that this call read from the base.
        bytes_written: The bytes of weight files that this call wrote.
        resumed: The weight files that an interrupted call had written, and that were verified and kept.
        seconds: The time that the call took.
        findings: What is worth knowing.
        weights: The factor of what each adapter adds, in their order.
    """

    output: str
    base: Mapping[str, str | None]
    adapters: tuple[Mapping[str, str | None], ...]
    tensors: tuple[MergedTensor, ...]
    dropped: tuple[str, ...]
    carried: tuple[str, ...]
    left_out: tuple[str, ...]
    bytes_read: int
    bytes_written: int
    resumed: tuple[str, ...]
    seconds: float
    findings: tuple[Finding, ...] = ()
    weights: tuple[float, ...] = ()

    def of(self, action: str) -> tuple[MergedTensor, ...]:
        """Return the tensors that something was done to, as ``"merged"`` or ``"copied"``."""
        return tuple(tensor for tensor in self.tensors if tensor.action == action)

    def _tables(self) -> list[Table]:
        counts = Counter(tensor.action for tensor in self.tensors)
        rows: list[tuple[str, ...]] = []
        for action in sorted(counts):
            own = self.of(action)
            deltas = [tensor.max_delta for tensor in own if tensor.max_delta is not None]
            size = format_bytes(sum(tensor.bytes for tensor in own))
            rows.append((action, str(len(own)), size, f"{max(deltas):.3g}" if deltas else "-"))
        return [Table(_HEADER, rows)]

    def _title(self) -> str:
        return f"{self.base['source']} + {', '.join(str(a['source']) for a in self.adapters)} -> {self.output}"

    def _notes(self) -> list[str]:
        speed = self.bytes_written / max(self.seconds, 1e-9)
        notes = [f"{format_bytes(self.bytes_written)} written in {self.seconds:.2f} s ({format_bytes(int(speed))}/s)"]
        if self.resumed:
            notes.append(f"{len(self.resumed)} file(s) of an interrupted call were verified and kept")
        return [*notes, *super()._notes()]
