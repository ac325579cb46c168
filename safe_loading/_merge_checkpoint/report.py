"""What a merge on disk did. Imports no torch."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping

from safe_loading._report import format_bytes, html_table, text_table, to_json

_HEADER = ("what", "tensors", "size")


@dataclasses.dataclass(frozen=True)
class MergedTensor:
    """One tensor of the output.

    Attributes:
        name: Its name on disk.
        file: Its file.
        action: ``"merge"`` (the delta was added), ``"replace"`` (its content is the adapter's) or ``"copy"``.
        bytes: Its size.
        sha256: The hash of its bytes; None with ``verify=False``.
    """

    name: str
    file: str
    action: str
    bytes: int
    sha256: str | None


@dataclasses.dataclass(frozen=True)
class MergeReport:
    """What :func:`merge_lora_checkpoint` wrote.

    Attributes:
        output: The folder.
        base: The base: its source, and its commit when it came from the hub.
        adapters: The same of each adapter, with the SHA-256 of its files.
        tensors: Every tensor of the output.
        carried: The files that were copied along.
        left_out: The files of the base that were not.
        bytes_read: The bytes of tensors that this call read from the base.
        bytes_written: The bytes of weight files that this call wrote.
        resumed: The weight files that an interrupted call had written, and that were verified and kept.
        seconds: The time that the call took.
    """

    output: str
    base: Mapping[str, str | None]
    adapters: tuple[Mapping[str, str | None], ...]
    tensors: tuple[MergedTensor, ...]
    carried: tuple[str, ...]
    left_out: tuple[str, ...]
    bytes_read: int
    bytes_written: int
    resumed: tuple[str, ...]
    seconds: float

    def of(self, action: str) -> tuple[MergedTensor, ...]:
        """Return the tensors that something was done to: ``"merge"``, ``"replace"`` or ``"copy"``."""
        return tuple(tensor for tensor in self.tensors if tensor.action == action)

    def _rows(self) -> list[tuple[str, ...]]:
        counts = Counter(tensor.action for tensor in self.tensors)
        sizes: Counter[str] = Counter()
        for tensor in self.tensors:
            sizes[tensor.action] += tensor.bytes
        return [(action, str(counts[action]), format_bytes(sizes[action])) for action in sorted(counts)]

    def __str__(self) -> str:
        """Return what was done with how many tensors."""
        speed = self.bytes_written / max(self.seconds, 1e-9)
        lines = [
            f"{self.base['source']} + {', '.join(str(a['source']) for a in self.adapters)} -> {self.output}",
            text_table(_HEADER, self._rows()),
            f"{format_bytes(self.bytes_written)} written in {self.seconds:.2f} s ({format_bytes(int(speed))}/s)",
        ]
        if self.resumed:
            lines.append(f"{len(self.resumed)} file(s) of an interrupted call were verified and kept")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return html_table(_HEADER, self._rows())

    def to_json(self) -> str:
        """Return the report as a JSON object."""
        return to_json(dataclasses.asdict(self))
