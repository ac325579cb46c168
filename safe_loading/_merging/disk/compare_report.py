"""The report of a merged folder against its base and adapters. Imports no torch."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Literal

from safe_loading._core.report import Finding, Table, Verdict, counted, format_bytes

MergeVerdict = Literal[
    "exact",
    "rounding",
    "left out",
    "narrowed",
    "base",
    "twice",
    "scaled",
    "transposed",
    "swapped",
    "other",
    "not finite",
    "shape",
    "missing",
    "extra",
    "unchecked",
]
"""A verdict on one tensor."""

RIGHT = ("exact", "rounding", "left out")
_HEADER = ("kind", "tensors", "verdict", "size", "largest distance")


@dataclasses.dataclass(frozen=True)
class CheckedTensor:
    """One tensor of a merged folder, or one that it should have.

    Attributes:
        name: Its name in the folder; that in the base where it is not a tensor of its own there.
        file: Its file; empty where the folder lacks it.
        verdict: ``"exact"`` (each value is the nearest to base plus update in the stored dtype), ``"rounding"`` (it
            differs only as other merges round), ``"left out"`` (nothing needs it: a tied one stands for it),
            ``"narrowed"`` (each value went through another 16-bit dtype), ``"base"`` (the update is absent),
            ``"twice"``, ``"scaled"`` (the update is there, times ``scale``), ``"transposed"`` (the update is),
            ``"swapped"`` (it holds what another tensor, or other rows, should hold), ``"other"``, ``"not finite"``,
            ``"shape"``, ``"missing"``, ``"extra"``, or ``"unchecked"`` (codes
            without their scales, or scales without codes).
        expected: What the merge does with it, such as ``"merged"`` or ``"copied"``.
        dtype: Its safetensors dtype.
        bytes: Its size.
        wrong: How many of its values differ from the right one by more than rounding; of an ``"exact"`` one 0.
        distance: The largest distance of a value from the exact sum; 0 where it is ``"exact"``.
        scale: The factor of the update by least squares; None where nothing tells it.
        detail: More of it in words: which rows, the first value that differs, or that a right merge was made into the
            codes of a base that is quantized while it is loaded.
        within: The tensors of the folder that hold it, where they hold other tensors too or it lies in several.
    """

    name: str
    file: str
    verdict: MergeVerdict
    expected: str
    dtype: str
    bytes: int
    wrong: int = 0
    distance: float = 0.0
    scale: float | None = None
    detail: str = ""
    within: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class MergeCheck(Verdict):
    """The report of :func:`verify_merge`: whether a folder is its base plus its adapters.

    Attributes:
        merged: The folder that was judged.
        base: The base: its source, and its commit when it came from the hub.
        adapters: The same of each adapter, with the SHA-256 of its files.
        tensors: Every tensor of the folder, and those that it lacks.
        bytes_read: The bytes of tensors that were read of the base and of the folder.
        seconds: The time that the call took.
        findings: Everything worth knowing, errors first.
        weights: The factor of what each adapter should have added, in their order.
    """

    merged: str
    base: Mapping[str, str | None]
    adapters: tuple[Mapping[str, str | None], ...]
    tensors: tuple[CheckedTensor, ...]
    bytes_read: int
    seconds: float
    findings: tuple[Finding, ...] = ()
    weights: tuple[float, ...] = ()

    def of(self, verdict: str) -> tuple[CheckedTensor, ...]:
        """Return the tensors with a verdict, as ``"exact"`` or ``"base"``."""
        return tuple(tensor for tensor in self.tensors if tensor.verdict == verdict)

    def _title(self) -> str:
        made_of = " + ".join([str(self.base["source"]), *(str(a["source"]) for a in self.adapters)])
        right = sum(tensor.verdict in RIGHT for tensor in self.tensors)
        verdict = "ok" if self.ok else "NOT OK"
        return f"{self.merged}: {verdict}; {right} of {counted(len(self.tensors), 'tensor')} are {made_of}"

    def _tables(self) -> list[Table]:
        groups: dict[tuple[str, str], list[CheckedTensor]] = {}
        for tensor in self.tensors:
            groups.setdefault((kind_of(tensor.name), tensor.verdict), []).append(tensor)
        rows = [
            (
                kind,
                str(len(own)),
                verdict,
                format_bytes(sum(tensor.bytes for tensor in own)),
                f"{max(tensor.distance for tensor in own):.3g}",
            )
            for (kind, verdict), own in sorted(groups.items())
        ]
        return [Table(_HEADER, rows)]

    def _notes(self) -> list[str]:
        speed = format_bytes(int(self.bytes_read / max(self.seconds, 1e-9)))
        return [f"{format_bytes(self.bytes_read)} read in {self.seconds:.2f} s ({speed}/s)", *super()._notes()]


def kind_of(name: str) -> str:
    """Return the kind of a tensor: the last levels of its name, without the numbers of layers and experts."""
    levels = [level for level in name.split(".") if not re.fullmatch(r"\d+", level)]
    return ".".join(levels[-2:])
