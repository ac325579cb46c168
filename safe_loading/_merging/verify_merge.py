"""Whether a merged folder is its base plus its adapters, whoever merged it: the merge's own plan, and a comparison.

The way is that of :func:`merge_lora_checkpoint` up to the plan of every tensor of the output. In the place of writing
it, ``disk/compare_files.py`` reads the folder beside the base, once, and ``disk/compare_verdicts.py`` judges.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from safe_loading._checkpoint.base_config import quantization_of
from safe_loading._checkpoint.faults import raise_faults
from safe_loading._checkpoint.hub import folder_here
from safe_loading._checkpoint.index import Checkpoint
from safe_loading._checkpoint.model_folder import CONFIG, ModelFolder
from safe_loading._checkpoint.other_things import is_adapter_alone
from safe_loading._core import progress as _progress
from safe_loading._core.arguments import whole_number
from safe_loading._core.engine_names import VERIFY, VerifyNames
from safe_loading._core.log import logger
from safe_loading._core.report import Finding, errors_of, worst_first
from safe_loading._loading.base_arguments import as_model_class
from safe_loading._loading.check_checkpoint import check_checkpoint
from safe_loading._loading.sources import BaseRequest, LoadRequest, Source
from safe_loading._model.formats.registry import STORED, format_named
from safe_loading._model.formats.stored import QuantizedTensor
from safe_loading._model.torch_state import torch_kept_when_raised
from safe_loading._ranks.default_device import tensors_on_host
from safe_loading._ranks.launcher import cores
from safe_loading.errors import ArgumentError, CheckpointNotFound, MergeError

from .disk.changes import Changes
from .disk.compare_files import Pair, compare_files
from .disk.compare_layouts import Gathered
from .disk.compare_names import find_elsewhere, match_tensors, merged_dtypes
from .disk.compare_report import CheckedTensor, MergeCheck
from .disk.compare_small_files import small_file_findings
from .disk.compare_verdicts import dtype_findings, findings_of
from .disk.find_changes import find_changes
from .disk.match_blocks import are_transposed, verdicts_of_parts, with_blocks
from .disk.output_plan import FilePlan, plan_files
from .disk.quantized_base import read_as_plain
from .disk.record import origins_of, weights_of
from .disk.small_files import small_files
from .disk.sources import MergeSources, checked_weights, merge_request, open_sources
from .disk.write_files import one_torch_thread

if TYPE_CHECKING:
    from typing_extensions import Unpack

_CODES = ("F8_E4M3", "F8_E5M2", "U8", "I8")


@torch_kept_when_raised
@tensors_on_host()
def verify_merge(
    base_model: Source,
    adapter: Source | Sequence[Source],
    merged: Source,
    *,
    threads: int | None = None,
    progress: bool | None = None,
    adapter_revision: str | None = None,
    adapter_subfolder: str | None = None,
    base_revision: str | None = None,
    base_subfolder: str | None = None,
    base_kwargs: Mapping[str, Any] | None = None,
    adapter_weights: Sequence[float] | None = None,
    tokenizer: Literal["adapter", "base"] | None = None,
    auto_class: type | str | None = None,
    allow_pickle: bool = False,
    key_mapping: Mapping[str, str] | None = None,
    **other: Unpack[VerifyNames],
) -> MergeCheck:
    """Prove that a merged folder is its base plus its adapters, whichever program merged it.

    Every tensor of the folder is compared with the exact sum, and gets a verdict: right, right but for rounding as
    other merges round, or wrong and how. Base and folder are read once, block by block; nothing is written.

    Args:
        base_model: Folder or hub id of the base, with safetensors weights.
        adapter: Folder or hub id of the adapter, or several.
        merged: The folder to judge, with safetensors weights. Its dtypes may be others than the base's.
        threads: How many threads read and compute; by default one for each core, four at the most.
        progress: Whether to show a bar; by default in a terminal.
        adapter_revision: Branch, tag or commit of adapters on the hub; never used for the base.
        adapter_subfolder: Folder inside the adapter's repository; never used for the base.
        base_revision: Branch, tag or commit of the base.
        base_subfolder: Folder inside the base's repository.
        base_kwargs: More arguments of the base's ``from_pretrained``, as :func:`merge_lora_checkpoint` takes them.
        adapter_weights: The factor that each adapter should have, in their order.
        tokenizer: Whose tokenizer the folder should have, as :func:`merge_lora_checkpoint` takes it.
        auto_class: The class that loads the base, or its name; by default the one of the adapter's task.
        allow_pickle: Whether adapters that were saved as ``adapter_model.bin`` are read, with ``weights_only=True``.
        key_mapping: Regular expressions and replacements for the adapters' keys, as for :func:`load_peft_on_rank`.
        **other: ``trust_remote_code``, ``token``, ``cache_dir`` and ``local_files_only``, which go into
            ``base_kwargs``.

    Returns:
        The verdicts; ``ok`` when the folder is what it should be.

    Raises:
        MergeError: The adapter cannot be merged on disk, so there is nothing to compare with; or the folder holds
            codes of a kind that are not compared.
        AdapterError: The adapter does not fit the base.
        CheckpointError: A file of one of the three is missing or damaged.
        ArgumentError: An argument cannot be honored.
    """
    begin = time.perf_counter()
    (base_kwargs,) = VERIFY.placed(verify_merge, other, {}, base_kwargs)
    if threads is not None:
        whole_number(threads, "threads", least=1, what="a number of threads, or None for one for each core")
    if tokenizer not in (None, "adapter", "base"):
        raise ArgumentError(f'tokenizer={tokenizer!r}: pass "adapter", "base", or None for the one that differs.')
    asked_base, kwargs = BaseRequest(base_model, base_revision, base_subfolder), dict(base_kwargs or {})
    request = merge_request(adapter, asked_base, adapter_revision, adapter_subfolder, kwargs, allow_pickle=allow_pickle)
    judged = _Judged(folder_here(merged, "merged"))
    weights, model_class = checked_weights(adapter_weights, request), as_model_class(auto_class)
    with one_torch_thread(), _progress.engine_bars(0):
        sources = _open(request, weights, judged, key_mapping)
        changes, _ = find_changes(sources, None, model_class, (judged.plain, judged.opened.config or {}))
        elsewhere = find_elsewhere(sources.base.template.tensors, changes)
        dtypes = merged_dtypes(judged.plain, sources.base.checkpoint.tensors, changes, elsewhere)
    base = sources.base
    # Other programs encode every weight anew, so that unchanged ones are judged by their values, too.
    for name, weight in base.quantized.items() if base.keeps_codes else ():
        changes.merges.setdefault(name, ((), weight.shape[-1]))
    plans = plan_files(base, changes, {} if base.keeps_codes else dtypes, None)
    small, _ = small_files(sources, changes, plans, resharded=False, tokenizer=tokenizer)
    pairs, checked = judged.matched(plans, changes, elsewhere)
    nbytes = sum(pair.plan.target.nbytes + (pair.scales[1].nbytes if pair.scales else 0) for pair in pairs)
    shown = _progress.wanted(0) if progress is None else progress
    with _progress.Bar("verifying", nbytes, shown=shown) as bar:
        checked += compare_files(pairs, judged.folder, threads or min(4, cores()), bar.advance)
    checked += verdicts_of_parts(checked, judged.blocks, judged.checkpoint, judged.plain)
    for opened in (base.opened, judged.opened):
        opened.require_unchanged()
    order = {name: number for number, name in enumerate(judged.checkpoint.tensors)}
    checked.sort(key=lambda tensor: (order.get((tensor.name, *tensor.within)[-1], len(order)), tensor.name))
    findings = [
        *findings_of(checked),
        *dtype_findings(checked, {pair.plan.target.name: pair.base for pair in pairs}),
        *small_file_findings(sources, changes, small, judged.opened),
        *judged.findings,
    ]
    read = sum(pair.plan.source.nbytes for pair in pairs if pair.plan.source is not None and pair.plan.value is None)
    read += sum(pair.stored_bytes for pair in pairs)
    report = _report(judged, sources, checked, findings, read, time.perf_counter() - begin)
    logger.info("%s", report)
    return report


class _Judged:
    """The folder that is judged, opened once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        if is_adapter_alone(folder):
            raise CheckpointNotFound(f"{folder} is the folder of an adapter. Pass the one that the merge wrote.")
        # Its errors are raised where they leave nothing to compare, and are findings otherwise.
        self.findings: list[Finding] = [
            f for f in check_checkpoint(folder, headers=True).findings if f.severity != "info"
        ]
        self.opened = ModelFolder(folder)
        checkpoint, faults = self.opened.inspect_checkpoint(kind="model")
        if checkpoint is None:
            raise_faults(folder, errors_of(faults))
        self.checkpoint: Checkpoint = checkpoint
        self.plain, self.blocks = checkpoint, dict[str, QuantizedTensor]()  # where codes stand for other tensors

    @property
    def method(self) -> object:
        """The method by which its config says that it is quantized; None without one."""
        settings = quantization_of(self.opened.config or {})
        return settings.get("quant_method") if isinstance(settings, Mapping) else None

    def read_blocks(self) -> bool:
        """Describe codes in blocks as the plain weights that they stand for; False where there are none."""
        try:
            plain, quantized, _ = read_as_plain(self.checkpoint, self.opened.config or {})
        except MergeError:  # some of its codes are of a kind that nothing here reads
            return False
        if any(STORED[weight.kind].in_blocks is None for weight in quantized.values()):
            return False
        self.plain, self.blocks = plain, dict(quantized)
        return True

    def matched(
        self, plans: Sequence[FilePlan], changes: Changes, elsewhere: Mapping[str, Gathered]
    ) -> tuple[list[Pair], list[CheckedTensor]]:
        """Return the tensors to compare, and the verdicts on those that need no value."""
        if are_transposed(plans, self.blocks):
            raise MergeError(_not_judged(self, self.method, "its codes are of transposed weights (Conv1D)"))
        pairs, checked = match_tensors(plans, self.plain, changes, elsewhere)
        pairs, unchecked = with_blocks(pairs, self.blocks)
        return pairs, [*checked, *unchecked]


def _open(
    request: LoadRequest, weights: Mapping[str, float], judged: _Judged, key_mapping: Mapping[str, str] | None
) -> MergeSources:
    """Open base and adapters; a quantized base is decoded where the folder that is judged holds no codes."""
    codes = {name: info for name, info in judged.checkpoint.tensors.items() if info.dtype in _CODES}
    method = judged.method
    if not codes or method is None:
        return open_sources(request, weights, dequantize=not codes, key_mapping=key_mapping)
    known = format_named(method)
    if known is not None and known.read_on_disk and not known.merged_on_disk and judged.read_blocks():
        if len(request.adapters) > 1:
            raise MergeError(_not_judged(judged, method, "several adapters are rounded to codes one after the other"))
        return open_sources(request, weights, dequantize=True, key_mapping=key_mapping)
    if known is None or not known.merged_on_disk:
        raise MergeError(_not_judged(judged, method, "codes of that kind are not compared"))
    sources = open_sources(request, weights, key_mapping=key_mapping)
    if {info.dtype for info in codes.values()}.isdisjoint(i.dtype for i in sources.base.template.tensors.values()):
        raise MergeError(_not_judged(judged, method, f"{sources.base.folder} is not"))
    return sources


def _not_judged(judged: _Judged, method: object, why: str) -> str:
    return (
        f"{judged.folder / CONFIG} says that the folder is quantized ({method}), and {why}. Pass the folder that it "
        f"was made from, before it is quantized."
    )


def _report(
    judged: _Judged,
    sources: MergeSources,
    checked: Sequence[CheckedTensor],
    findings: Sequence[Finding],
    nbytes: int,
    seconds: float,
) -> MergeCheck:
    return MergeCheck(
        merged=str(judged.folder),
        base={"source": sources.base.source, "commit": sources.base.commit},
        adapters=tuple(origins_of(sources)),
        tensors=tuple(checked),
        bytes_read=nbytes,
        seconds=seconds,
        findings=worst_first(findings),
        weights=weights_of(sources),
    )
