"""The report of a wrap: units, bytes read and sent, the peak of this rank, and findings."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from safe_loading._core.report import Finding, Table, Verdict, format_bytes

if TYPE_CHECKING:
    from torch import nn

_HEADER = ("unit", "parameters", "gathered", "stays gathered")


@dataclasses.dataclass(frozen=True)
class FsdpUnit:
    """Modules whose parameters are gathered, and freed, together.

    Attributes:
        name: The canonical names of the modules, joined by ``" + "``; ``"(root)"`` is the model.
        parameters: How many parameters it gathers.
        bytes: Their size while they are gathered.
        keeps: Whether they stay gathered from the forward to the backward pass.
    """

    name: str
    parameters: int
    bytes: int
    keeps: bool


@dataclasses.dataclass(frozen=True)
class FsdpReport(Verdict):
    """The report of :func:`wrap_fsdp_meta_safe` on one rank.

    Attributes:
        version: 2 for ``fully_shard``, 1 for ``FullyShardedDataParallel``.
        rank: The rank among those that wrapped together.
        ranks: How many wrapped together.
        shards: Over how many of them each parameter is split; the others hold copies (HSDP) or other parts.
        device: Where the shards are.
        units: What is gathered together, the root last.
        model_bytes: The parameters and buffers of the model, whole.
        local_bytes: Those that this rank holds.
        bytes_read: Weight bytes that this rank read from disk.
        bytes_sent: Weight bytes that this rank sent to others.
        peak_bytes: The most host memory of this process during the call beyond what it had before, sampled; on an
            accelerator the most device memory. 0 where it cannot be told.
        seconds: The time of the call.
        verified: ``"off"``, ``"structure"`` or ``"bytes"``.
        ignored: The parameters that every rank keeps whole.
        parts: Into how many parts tensor parallelism splits a layer, each of which is sharded.
        undivided: The modules that it leaves whole, because their size does not divide by the parts.
        findings: What is worth knowing.
    """

    version: int
    rank: int
    ranks: int
    shards: int
    device: str
    units: tuple[FsdpUnit, ...]
    model_bytes: int
    local_bytes: int
    bytes_read: int
    bytes_sent: int
    peak_bytes: int
    seconds: float
    verified: str
    ignored: tuple[str, ...] = ()
    parts: int = 1
    undivided: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()

    @property
    def largest_unit(self) -> FsdpUnit:
        """The unit that takes the most memory while it is gathered."""
        return max(self.units, key=lambda unit: unit.bytes)

    def _tables(self) -> list[Table]:
        rows = [
            (unit.name, str(unit.parameters), format_bytes(unit.bytes), "yes" if unit.keeps else "no")
            for unit in self.units
        ]
        return [Table(_HEADER, rows)]

    def _title(self) -> str:
        shards = "1 shard" if self.shards == 1 else f"{self.shards} shards"
        shards += f" of {self.parts} parts" if self.parts > 1 else ""
        shards += f", {len(self.undivided)} modules undivided" if self.undivided else ""
        return (
            f"FSDP{self.version}, rank {self.rank} of {self.ranks} ({shards}) on {self.device}: holds "
            f"{format_bytes(self.local_bytes)} of {format_bytes(self.model_bytes)}, read "
            f"{format_bytes(self.bytes_read)}, sent {format_bytes(self.bytes_sent)}, peak "
            f"{format_bytes(self.peak_bytes)}, {self.seconds:.3f} s, verified: {self.verified}"
        )


if TYPE_CHECKING:

    class ShardedModel(nn.Module):
        """A wrapped model and its report, as type checkers see it; the class at run time is FSDP's."""

        fsdp_report: FsdpReport
