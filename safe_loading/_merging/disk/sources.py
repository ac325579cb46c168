"""The sources of a merge: the base, the adapters, and the files of the base that come along."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

import torch

from safe_loading._checkpoint.hub import adapter_files, base_files
from safe_loading._checkpoint.index import Checkpoint
from safe_loading._checkpoint.model_folder import CONFIG
from safe_loading._checkpoint.sha256sums import SUMS
from safe_loading._checkpoint.signing_manifest import MANIFEST
from safe_loading._checkpoint.tokenizer_ids import FAST, SETTINGS, SPECIAL_MAP, TEMPLATES
from safe_loading._checkpoint.trained_beside import MODULES, in_modules, module_folders, module_names, trained_beside
from safe_loading._checkpoint.weight_files import ADAPTER_CONFIG, PICKLE_SUFFIXES
from safe_loading._core.paths import path_text
from safe_loading._core.protocols import EngineKwargs
from safe_loading._core.report import Finding
from safe_loading._loading.adapter_file import digest_of
from safe_loading._loading.adapter_values import Adapter
from safe_loading._loading.base_and_adapter import in_order
from safe_loading._loading.base_arguments import check_merge_kwargs
from safe_loading._loading.inject import prepare
from safe_loading._loading.sources import BaseRequest, LoadRequest, Source, other_base_findings, resolve_all
from safe_loading._merging.weights.packed_base import packed_base_findings
from safe_loading._model.layout.tensor_contents import REPORT
from safe_loading.errors import ArgumentError

from .base import MergeBase, open_base

_VOCABULARIES = {"vocab.json", "vocab.txt", "merges.txt", "spiece.model", "tokenizer.model", "sentencepiece.bpe.model"}
_TOKENIZER = {FAST, SETTINGS, SPECIAL_MAP, "added_tokens.json", "tekken.json"}

# Other formats of the same weights, what training left, and what describes an adapter, other bytes or an earlier merge.
_WEIGHTS = (".safetensors", ".gguf", ".h5", ".msgpack", ".npz", ".ot", ".tflite", ".pte", ".distcp", *PICKLE_SUFFIXES)
_ONNX = (".onnx", ".onnx_data", ".onnx.data")  # a graph, and the values that it keeps beside itself
_LEFT_OUT = frozenset(
    {REPORT, MANIFEST, SUMS, "adapter_config.json", "trainer_state.json", "trainer_log.jsonl", "training_args.json"}
    | {"training_args.yaml", "training_loss.png", "training_eval_loss.png", "zero_to_fp32.py", "latest"}
)
_PROCESSORS = frozenset(
    {
        "preprocessor_config.json",
        "processor_config.json",
        "video_preprocessor_config.json",
        "image_processor_config.json",
    }
)
_TEMPLATE_FOLDER = "additional_chat_templates"


@dataclasses.dataclass(frozen=True)
class MergeSources:
    """The sources of a merge: a base, the adapters in the order of merging, and the other files of the output."""

    base: MergeBase
    adapters: Mapping[str, Adapter]  # by name, read and checked
    weights: Mapping[str, float]  # the factor of what each adapter adds
    digests: Mapping[str, str]  # the SHA-256 of each adapter
    carried: Mapping[str, Path]  # the other files of the base that belong to the output, by their name there
    left_out: tuple[str, ...]  # the names of its files that do not

    @property
    def folders(self) -> dict[str, Path]:
        """The folders that are read, by role."""
        return {"the base": self.base.folder, **{f"adapter {n!r}": a.facts.path for n, a in self.adapters.items()}}

    @property
    def findings(self) -> list[Finding]:
        """The warnings about adapters: of their values and configs, weights beside theirs, other or packed bases."""
        own = [found for each in self.adapters.values() for found in each.findings if found.severity == "warning"]
        # Some of what is beside an adapter comes along.
        own = [found for found in own if found.code != "trained-beside"]
        beside = [found for each in self.adapters.values() for found in trained_beside(each.facts.path, carried=True)]
        configs = {} if self.base.quantized else {name: each.facts.config for name, each in self.adapters.items()}
        of_base = packed_base_findings({name: each.get("base_model_name_or_path") for name, each in configs.items()})
        other = other_base_findings(self.adapters.values(), self.base.plain_on_disk)
        return [*own, *beside, *of_base, *other]


def merge_request(
    adapter: Source | Sequence[Source],
    base: BaseRequest,
    adapter_revision: str | None,
    adapter_subfolder: str | None,
    base_kwargs: EngineKwargs,
    *,
    allow_pickle: bool,
) -> LoadRequest:
    """Return the checked request of a call; the arguments are those of ``merge_lora_checkpoint``."""
    base_source, adapter = in_order(base.source, adapter, adapter_subfolder)
    several = isinstance(adapter, Sequence) and not isinstance(adapter, (str, bytes))
    adapters: Sequence[Source] = [*adapter] if several else [adapter]  # type: ignore[list-item,misc]  # checked below
    path_text(base_source, "base_model")
    for source in adapters:
        path_text(source, "adapter")
    if not adapters:
        raise ArgumentError("adapter is empty; pass a folder or hub id, or several.")
    check_merge_kwargs(base_kwargs)
    named = {f"adapter_{number}": source for number, source in enumerate(adapters, 1)}
    named = {"default": adapters[0]} if len(adapters) == 1 else named
    base = dataclasses.replace(base, source=base_source)
    return LoadRequest(named, base, adapter_revision, adapter_subfolder, allow_pickle, base_kwargs)


def checked_weights(weights: Sequence[float] | None, request: LoadRequest) -> dict[str, float]:
    """Return the factor of each adapter by its name; 1 by default."""
    names = list(request.adapters)
    if weights is None:
        return dict.fromkeys(names, 1.0)
    if isinstance(weights, (str, bytes)) or not isinstance(weights, Sequence) or len(weights) != len(names):
        raise ArgumentError(
            f"adapter_weights={weights!r:.80}: pass a list of one number for each of {len(names)} adapters."
        )
    wrong = [w for w in weights if isinstance(w, bool) or not isinstance(w, (int, float)) or not math.isfinite(w)]
    if wrong:
        raise ArgumentError(f"adapter_weights={list(weights)}: {wrong} are no finite numbers.")
    return dict(zip(names, map(float, weights), strict=True))


def open_sources(
    request: LoadRequest,
    weights: Mapping[str, float],
    *,
    dtype: torch.dtype | None = None,
    dequantize: bool = False,
    key_mapping: Mapping[str, str] | None = None,
) -> MergeSources:
    """Find base and adapters, and read everything of them but the base's tensors; ``dtype`` is the output's."""
    _refuse_swapped(request)
    choose = base_files({"variant": request.base_kwargs.get("variant")})

    def with_all_that_belongs(names: frozenset[str], fetch: Callable[[str], Path]) -> list[str]:
        weights = choose(names, fetch)
        folders = module_folders(fetch(MODULES)) if MODULES in names else frozenset()
        return [*weights, *sorted(name for name in names if name not in weights and _belongs(name, folders))]

    resolved = resolve_all(request, choose_adapter=_with_tokenizer, choose_base=with_all_that_belongs)
    base = open_base(resolved.require_base(), request.base_kwargs, dtype=dtype, dequantize=dequantize)
    adapters = {
        name: prepare(name, facts, is_trainable=False, key_mapping=key_mapping)
        for name, facts in resolved.adapters.items()
    }
    digests = {name: digest_of(adapter.facts, adapter.tensors) for name, adapter in adapters.items()}
    _refuse_twice(adapters, digests)
    return MergeSources(base, adapters, weights, digests, *_other_files(base.checkpoint))


def _refuse_swapped(request: LoadRequest) -> None:
    """Refuse a base in the place of an adapter and an adapter in that of the base, where the folders tell."""
    base = None if request.base is None else request.base.source
    swapped = [s for s in request.adapters.values() if _holds(s, CONFIG) and not _holds(s, ADAPTER_CONFIG)]
    facts = [f"the adapter, {os.fspath(source)!r}, holds a model and no {ADAPTER_CONFIG}" for source in swapped]
    if base is not None and _holds(base, ADAPTER_CONFIG) and not _holds(base, CONFIG):
        facts.insert(0, f"the base, {os.fspath(base)!r}, holds an adapter and no {CONFIG}")
    if facts:
        raise ArgumentError("The order is base, adapter, output; these folders are something else:", facts)


def _holds(source: Source, name: str) -> bool:
    return os.path.lexists(Path(source, name))


def _refuse_twice(adapters: Mapping[str, Adapter], digests: Mapping[str, str]) -> None:
    first: dict[str, str] = {}
    for name, sha256 in digests.items():
        known = first.setdefault(sha256, name)
        if known != name:
            one, other = adapters[known].facts.source, adapters[name].facts.source
            raise ArgumentError(
                f"{one!r} and {other!r} are the same adapter, which would be added twice. Name it once; "
                f"adapter_weights=[2.0] (ADAPTER=2 on the command line) doubles what it adds."
            )


def is_tokenizer(name: str) -> bool:
    """Return whether a file belongs to a tokenizer, its chat templates included."""
    return name in _TOKENIZER or name in _VOCABULARIES or is_template(name)


def is_processor(name: str) -> bool:
    """Return whether a file says how images and sounds are made ready for the model."""
    return name in _PROCESSORS


def is_vocabulary(name: str) -> bool:
    """Return whether a file holds the words of a tokenizer."""
    return name in _VOCABULARIES or name in ("tokenizer.json", "tekken.json")


def is_template(name: str) -> bool:
    """Return whether a file is a chat template."""
    return name in TEMPLATES or name.startswith(f"{_TEMPLATE_FOLDER}/")


def _belongs(name: str, modules: Collection[str] = ()) -> bool:
    """Return whether a file of the base that is not a weight file belongs to the output; ``modules`` are folders."""
    folder, _, file = name.rpartition("/")
    if in_modules(name, modules):
        return True  # a dense layer has weights of its own there
    if folder not in ("", _TEMPLATE_FOLDER) or file.startswith(".") or file in _LEFT_OUT:
        return False
    return not file.endswith((*_WEIGHTS, *_ONNX, "_results.json", ".index.json"))


def _with_tokenizer(names: frozenset[str], fetch: Callable[[str], Path]) -> list[str]:
    beside = sorted(name for name in names if is_tokenizer(name) or is_processor(name))
    return [*adapter_files(names, fetch), *beside, *module_names(names, fetch)]


def _other_files(checkpoint: Checkpoint) -> tuple[dict[str, Path], tuple[str, ...]]:
    """Return the files beside the weights that belong to the output, and the names of those that do not."""
    carried, left_out = {}, []
    modules = checkpoint.folder / MODULES
    folders = module_folders(modules) if modules.is_file() else frozenset()
    for path in sorted(checkpoint.folder.rglob("*")):
        name = path.relative_to(checkpoint.folder).as_posix()
        # Hidden folders (.git, .cache/huggingface) are no part of the model.
        if not path.is_file() or name in checkpoint.headers or any(level.startswith(".") for level in name.split("/")):
            continue
        if checkpoint.index is not None and path == checkpoint.index.path:
            continue
        if _belongs(name, folders):
            carried[name] = path
        else:
            left_out.append(name)
    return carried, tuple(left_out)
