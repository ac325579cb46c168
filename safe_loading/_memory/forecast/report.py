"""``MemoryForecast``: the peak of a step, in components and modules, as text, HTML, JSON and a picture."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from safe_loading._core.bars import MemoryBar, Segment, draw_bars, in_words
from safe_loading._core.cards import CARDS, card_memory
from safe_loading._core.report import Finding, Report, Table, findings_html, findings_text, format_bytes
from safe_loading._core.workload import Workload
from safe_loading._memory.trace.allocator import replay
from safe_loading.errors import ArgumentError

from .vllm_share import largest_share

MEANINGS = {
    "weights": "the base model's parameters and buffers",
    "adapters": "the adapter's parameters",
    "gradients": "of the parameters that are trained",
    "optimizer": "the optimizer's state",
    "saved_activations": "kept by the forward pass for the backward pass",
    "kv_cache": "keys and values of the tokens so far",
    "temporary": "intermediate results that are alive at the peak",
    "workspaces": "cuBLAS's scratch, taken from the allocator",
    "rounding": "blocks are multiples of 512 B; tails of large blocks",
}
_WHEN = {"prompt": "while the prompt is read", "end": "as the last token is written"}
COMPONENTS = tuple(MEANINGS)  # in the order of the tables and of the picture
MODEL_IS_GONE = "This forecast does not know its model any more. Call predict_memory here."
_USUAL_CARDS = ("t4", "rtx-4090", "a100-40gb", "l40s", "h100", "h200", "b200")  # one of each size that people have


@dataclass(frozen=True)
class ModuleMemory:
    """The bytes that belong to one module and its children at the moment of the peak.

    Attributes:
        name: Its path in the model.
        weights: Of its parameters and buffers, adapters included; a tensor that several modules share is counted once.
        training: Of its gradients and the optimizer's state for it.
        activations: Of tensors that were made inside it and were alive at the peak.
    """

    name: str
    weights: int
    training: int
    activations: int

    @property
    def total(self) -> int:
        """The sum of the three."""
        return self.weights + self.training + self.activations


@dataclass(frozen=True)
class Suggestion:
    """One change to a step.

    Attributes:
        change: The arguments that change, as they are written.
        cost: The price of the change.
        forecast: The forecast of the changed step.
        fits: Whether the changed step runs on the card.
    """

    change: str
    cost: str
    forecast: MemoryForecast
    fits: bool

    def facts(self) -> dict[str, object]:
        """Return the change, its price and its total as JSON has them."""
        total = self.forecast.total_bytes
        return {"change": self.change, "cost": self.cost, "total_bytes": total, "fits": self.fits}


@dataclass(frozen=True)
class MemoryForecast(Report):
    """The memory that a step will take on one GPU. All sizes in bytes.

    Attributes:
        model: What was forecast.
        workload: The step; its text is the call that makes it.
        allocated_peak_bytes: What ``torch.cuda.max_memory_allocated()`` will say.
        reserved_peak_bytes: What ``torch.cuda.max_memory_reserved()`` will say: the segments that the caching allocator
            takes from the driver for these allocations, in their order.
        context_bytes: The CUDA context and loaded kernels, which no allocator counts; an allowance, see `notes`.
        components: The bytes of each component at the peak; they sum to `allocated_peak_bytes`.
        modules: The top of the module tree, children included.
        peak_at: When the peak is reached: the phase, and the module that is running.
        phases: For generation the most bytes allocated while the prompt is read (``"prompt"``), and while tokens are
            written (``"end"``, the last of them); empty for training.
        notes: What was assumed, in sentences.
        ranks: For a job over several ranks, the most bytes that are alive on each rank of a group, by its number. The
            forecast is that of the rank that takes the most.
        findings: What is worth knowing about the step beside its memory; whether it fits is not among them.
    """

    model: str
    workload: Workload
    allocated_peak_bytes: int
    reserved_peak_bytes: int
    context_bytes: int
    components: Mapping[str, int]
    modules: tuple[ModuleMemory, ...]
    peak_at: str
    notes: tuple[str, ...] = ()
    events: tuple[tuple[int, int], ...] = field(default=(), repr=False, compare=False)
    expandable_segments: bool = False
    ranks: Mapping[int, int] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()
    phases: Mapping[str, int] = field(default_factory=dict)
    suggest: Callable[[MemoryForecast, int], tuple[Suggestion, ...]] | None = field(
        default=None, repr=False, compare=False
    )

    @property
    def batch_size(self) -> int:
        """The rows of the workload's batch."""
        return self.workload.batch_size

    @property
    def total_bytes(self) -> int:
        """Reserved memory and context, the figure that ``nvidia-smi`` will show for the process."""
        return self.reserved_peak_bytes + self.context_bytes

    def fits(self, max_memory: int | str) -> bool:
        """Whether the step runs on a card with this memory: bytes, or text such as ``"24GB"`` or ``"h100"``.

        The allocator gives cached segments back before it fails, so a card may run a step whose `total_bytes` are
        more than it has. This replays the step's allocations with the memory of the card as their limit.
        """
        limit = card_memory(max_memory, {}) - self.context_bytes
        if self.reserved_peak_bytes <= limit or self.allocated_peak_bytes > limit:
            return self.reserved_peak_bytes <= limit
        return replay(self.events, limit=limit, expandable_segments=self.expandable_segments).failed_at is None

    def vllm_gpu_memory_utilization(self, max_memory: int | str) -> float:
        """Return the largest ``gpu_memory_utilization`` of a vLLM that shares the card with this step, in hundredths.

        vLLM takes that part of the whole card while the step runs, as in trl with ``vllm_mode="colocate"`` and without
        its sleep mode. The next hundredth would be too much: the allocations are replayed with the memory that is left.
        0.0 where the step leaves nothing.

        Args:
            max_memory: The memory of the card, as for `fits`.
        """
        return largest_share(self.fits, card_memory(max_memory, {}))

    def suggestions(self, max_memory: int | str) -> tuple[Suggestion, ...]:
        """Return changes with which the step takes less, each with its forecast, from the cheapest to the dearest.

        They are another attention, checkpointing, rows in several micro-batches, 8-bit Adam, activations on the host,
        a base in 4 bits, shorter rows, and FSDP2 over 2, 4 or 8 ranks, as far as each applies; of those with sizes the
        first that fits. Where none is enough, the last one is several together. Each takes a forecast or a few, so they
        are made when this is called.

        Args:
            max_memory: The memory of the card, as for `fits`.

        Raises:
            ArgumentError: The forecast was copied to another process, or its model is gone.
        """
        if self.suggest is None:
            raise ArgumentError(MODEL_IS_GONE)
        return self.suggest(self, card_memory(max_memory, {}))

    def __getstate__(self) -> dict[str, object]:
        """Return all attributes but `suggest`, which holds functions and cannot be pickled."""
        return {**self.__dict__, "suggest": None}

    def _title(self) -> str:
        return f"{self.model}, {self.workload}"

    def _tables(self) -> list[Table]:
        rows = [(name, format_bytes(size), _share(size, self.total_bytes), note) for name, size, note in self._rows()]
        return [
            Table(("component", "bytes", "of total", ""), rows),
            Table(("module", "weights", "training", "activations"), self._module_rows()),
        ]

    def _notes(self) -> list[str]:
        told = [f"The peak is reached in the {self.peak_at}."]
        if any(self.phases.values()):
            told += [
                f"Allocated at most: {' and '.join(f'{_WHEN[k]} {format_bytes(v)}' for k, v in self.phases.items())}."
            ]
        return [*told, *self.notes, findings_text(self.findings)]

    def _repr_html_(self) -> str:
        return super()._repr_html_() + findings_html(self.findings)

    def _rows(self) -> list[tuple[str, int, str]]:
        parts = self.components
        rows = [(in_words(name), size, MEANINGS.get(name, "")) for name, size in parts.items() if size]
        cached = self.reserved_peak_bytes - self.allocated_peak_bytes
        return [
            *rows,
            ("allocated", self.allocated_peak_bytes, "the sum of these: torch.cuda.max_memory_allocated()"),
            ("cached", cached, "reserved by the allocator beyond that, at most"),
            ("context", self.context_bytes, "CUDA's own; not counted by any allocator"),
            ("total", self.total_bytes, "reserved and context: what nvidia-smi shows"),
        ]

    def _module_rows(self) -> list[tuple[str, ...]]:
        """Return a line for each module, and a single one for neighbors that are alike."""
        rows: list[tuple[str, ...]] = []
        for sizes, group in itertools.groupby(self.modules, key=lambda m: (m.weights, m.training, m.activations)):
            alike = [module.name or "(the step itself)" for module in group]
            name = alike[0] if len(alike) == 1 else f"{alike[0]} to {alike[-1]}, each"
            rows.append((name, *map(format_bytes, sizes)))
        return rows

    def _picture(self) -> str:
        return draw_bars(self._bars(), inline=True)

    def _facts(self) -> Mapping[str, object]:
        """Return all but the events, which are many."""
        facts = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.repr}
        del facts["expandable_segments"]
        facts |= {"workload": self.workload.facts(), "total_bytes": self.total_bytes}
        lists = {"modules": self.modules, "findings": self.findings}
        return {**facts, **{name: [vars(each) for each in listed] for name, listed in lists.items()}}

    def _repr_svg_(self) -> str:
        return draw_bars(self._bars(), title=self._title())

    def _bars(self) -> list[MemoryBar]:
        """Return the components inside two cards: the largest of some usual ones that is too small, and the next."""
        cards = sorted((CARDS[name] for name in _USUAL_CARDS), key=lambda card: card.memory)
        enough = next((place for place, card in enumerate(cards) if self.fits(card.memory)), len(cards))
        return [forecast_bar(self, card.name, card.memory) for card in cards[max(enough - 1, 0) : enough + 1]]


def forecast_bar(forecast: MemoryForecast, label: str, limit: int | None = None) -> MemoryBar:
    """Return a forecast's row in a picture; `limit` is the memory of the card that is drawn around it."""
    segments = [Segment(name, size) for name, size in forecast.components.items()]
    cached = Segment("cached", forecast.reserved_peak_bytes - forecast.allocated_peak_bytes)
    verdict = ""
    if limit is not None and forecast.total_bytes > limit and forecast.fits(limit):
        verdict = "fits with less cache"
    return MemoryBar(label, [*segments, cached, Segment("context", forecast.context_bytes)], limit, verdict=verdict)


def _share(size: int, total: int) -> str:
    return f"{100 * size / total:.1f} %" if total else ""
