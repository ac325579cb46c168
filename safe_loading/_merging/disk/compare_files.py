"""The stream of bytes of two folders, the base and the merged one, into verdicts; each is read once."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from safe_loading._checkpoint.header import TensorInfo
from safe_loading._core.interrupts import signals_held
from safe_loading._model.formats.stored import QuantizedTensor

from .compare_blocks import BlocksComparer, may_be_quantized_first
from .compare_codes import CodesComparer, rows_of_codes, shape_of_codes
from .compare_layouts import Gathered
from .compare_report import RIGHT, CheckedTensor
from .compare_swaps import Judged, with_swaps
from .compare_tensors import TensorComparer
from .compare_verdicts import is_better, judge
from .input_files import InputFiles
from .output_plan import TensorPlan
from .thread_buffers import Buffers
from .write_files import one_torch_thread


@dataclasses.dataclass(frozen=True)
class Pair:
    """A tensor of the merged folder, and the plan of its content, with that tensor as its target."""

    plan: TensorPlan
    file: Path
    scales: tuple[Path, TensorInfo] | None = None  # of the folder, where the tensor is codes that change
    gathered: Gathered | None = None  # where the folder holds it in parts, or as a part of another tensor
    blocks: QuantizedTensor | None = None  # where the folder holds it in codes, and the plan is of what they stand for

    @property
    def files(self) -> tuple[Path, ...]:
        """The files that are read for it."""
        source = () if self.plan.path is None else (self.plan.path,)
        return tuple({self.file, *source, *(() if self.gathered is None else self.gathered.paths)})

    @property
    def stored_bytes(self) -> int:
        """The bytes of it that the folder has."""
        if self.blocks is not None:
            return self.blocks.info.nbytes
        return self.plan.target.nbytes + (self.scales[1].nbytes if self.scales else 0)

    @property
    def base(self) -> TensorInfo | None:
        """The base's tensor on disk."""
        return self.plan.source if self.plan.quantized is None else self.plan.quantized.info


def compare_files(
    pairs: Sequence[Pair], folder: Path, threads: int, advance: Callable[[int], None]
) -> list[CheckedTensor]:
    """Compare tensors, a file's largest first; ``advance`` is called with a number of compared bytes, in any thread."""
    memory, stop = threading.local(), threading.Event()
    with InputFiles(path for pair in pairs for path in pair.files) as inputs:

        def compare(pair: Pair) -> list[Judged]:
            if not hasattr(memory, "buffers"):
                memory.buffers = Buffers()
            with contextlib.ExitStack() as opened:
                files = {path: opened.enter_context(inputs.opened(path)) for path in pair.files}
                return _compare(pair, files, folder, memory.buffers, stop, advance)

        # File by file, so that few are open at once.
        order = sorted(pairs, key=lambda pair: (pair.file, -pair.plan.target.nbytes))
        with (
            one_torch_thread(),
            concurrent.futures.ThreadPoolExecutor(threads, "verify", torch.set_num_threads, (1,)) as pool,
        ):
            tasks: list[concurrent.futures.Future[list[Judged]]] = []
            try:
                with signals_held():  # a thread that is interrupted as it starts is not waited for
                    tasks += [pool.submit(compare, pair) for pair in order]
                results = [task.result() for task in tasks]
            except BaseException:
                stop.set()
                for task in tasks:
                    task.cancel()
                raise
    return with_swaps([judged for result in results for judged in result])


def _compare(
    pair: Pair,
    files: Mapping[Path, int],
    folder: Path,
    buffers: Buffers,
    stop: threading.Event,
    advance: Callable[[int], None],
) -> list[Judged]:
    """Compare one tensor, or codes and their scales; nothing is returned when something failed in another thread."""
    plan, codes = pair.plan, pair.plan.codes
    source, target = -1 if plan.path is None else files[plan.path], files[pair.file]
    comparer: TensorComparer | CodesComparer
    if codes is not None and pair.scales is not None:
        comparer = CodesComparer(codes, source, plan.target, target, pair.scales)
        plan = dataclasses.replace(plan, rows=rows_of_codes(codes))
    elif pair.blocks is not None:
        return _compare_blocks(pair, pair.blocks, (source, target), folder, buffers, advance, stop)
    else:
        comparer = TensorComparer(plan, source, target, buffers, pair.gathered, files)
    for count in comparer.compare():
        advance(count)
        if stop.is_set():
            return []
    result = comparer.result
    samples = [sample for _, sums in result.sections for sample in sums.samples]
    shape = plan.target.shape if codes is None else shape_of_codes(codes)
    tensor = judge(plan, pair.file.relative_to(folder).as_posix(), result, shape)
    if pair.gathered is not None:
        tensor = dataclasses.replace(tensor, within=tuple(dict.fromkeys(info.name for info in pair.gathered.infos)))
    judged = [Judged(tensor, samples)]
    if pair.scales is not None and isinstance(comparer, CodesComparer):
        judged.append(Judged(_scales_of(tensor, pair.scales, folder, differ=comparer.scales_differ)))
    return judged


def _compare_blocks(
    pair: Pair,
    found: QuantizedTensor,
    descriptors: tuple[int, int],
    folder: Path,
    buffers: Buffers,
    advance: Callable[[int], None],
    stop: threading.Event,
) -> list[Judged]:
    """Compare one weight of codes with the merge; where it is not that, with a merge into the base's own codes."""
    roads = (False, True) if may_be_quantized_first(pair.plan) else (False,)
    best: Judged | None = None
    told = 0
    # A road that is the wrong one is left at its first wrong block; where all are wrong, each is gone to its end.
    for quantized_first, until_wrong in ((road, until) for until in (len(roads) > 1, False) for road in roads):
        comparer = BlocksComparer(pair.plan, *descriptors, buffers, found, quantized_first=quantized_first)
        done = 0
        for count in comparer.compare():
            done += count
            advance(max(done - told, 0))
            told = max(done, told)
            if stop.is_set():
                return []
            if until_wrong and comparer.is_wrong:
                break
        else:
            result = comparer.result
            tensor = judge(pair.plan, pair.file.relative_to(folder).as_posix(), result, found.shape)
            tensor = dataclasses.replace(tensor, dtype=found.info.dtype, bytes=found.info.nbytes)
            if quantized_first and tensor.verdict in RIGHT:
                tensor = dataclasses.replace(tensor, detail="merged into the base's codes")
            if best is None or is_better(tensor, best.tensor):
                best = Judged(tensor, [sample for _, sums in result.sections for sample in sums.samples])
            if best.tensor.verdict in RIGHT:
                break
    return [] if best is None else [best]


def _scales_of(codes: CheckedTensor, scales: tuple[Path, TensorInfo], folder: Path, *, differ: bool) -> CheckedTensor:
    """Return the verdict on scales: they are right where the codes under them are."""
    path, info = scales
    verdict = codes.verdict if differ else "exact"
    verdict = "rounding" if verdict == "exact" and differ else verdict
    file = path.relative_to(folder).as_posix()
    action = "copied" if codes.expected == "copied" else "rescaled"
    return CheckedTensor(info.name, file, verdict, action, info.dtype, info.nbytes, scale=codes.scale)
