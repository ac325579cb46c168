"""What a merge reads: the base, the adapters, and the files of the base that come along."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from safe_loading._checkpoint.hub import adapter_files, base_files
from safe_loading._checkpoint.index import Checkpoint
from safe_loading._checkpoint.weight_files import ADAPTER_CONFIG, PICKLE_SUFFIXES
from safe_loading._core.paths import path_text
from safe_loading._core.protocols import EngineKwargs
from safe_loading._loading.adapter_facts import AdapterFacts, digest
from safe_loading._loading.base_arguments import check_base_kwargs
from safe_loading._loading.sources import BaseRequest, LoadRequest, Source, resolve_all
from safe_loading._model.layout.tensor_contents import REPORT
from safe_loading._model.model_config import CONFIG
from safe_loading.errors import ArgumentError

from .base import MergeBase, open_base

_TEMPLATES = frozenset({"chat_template.jinja", "chat_template.json"})
_VOCABULARIES = {"vocab.json", "vocab.txt", "merges.txt", "spiece.model", "tokenizer.model", "sentencepiece.bpe.model"}
_TOKENIZER = {"tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tekken.json"}

# Other formats of the same weights, what training left, and what describes an adapter or an earlier merge.
_WEIGHTS = (".safetensors", ".gguf", ".h5", ".msgpack", ".onnx", ".npz", ".ot", *PICKLE_SUFFIXES)
_LEFT_OUT = frozenset({REPORT, "adapter_config.json", "trainer_state.json", "optimizer.pt", "scheduler.pt"})
_TEMPLATE_FOLDER = "additional_chat_templates"


@dataclasses.dataclass(frozen=True)
class MergeSources:
    """What is merged: a base, the adapters in the order of merging, and what else belongs to the output."""

    base: MergeBase
    adapters: Mapping[str, AdapterFacts]
    weights: Mapping[str, float]  # the factor of what each adapter adds
    digests: Mapping[str, str]  # the SHA-256 of each adapter
    carried: Mapping[str, Path]  # the other files of the base that belong to the output, by their name there
    left_out: tuple[str, ...]  # the names of its files that do not

    @property
    def folders(self) -> dict[str, Path]:
        """The folders that are read, by what they are."""
        return {"the base": self.base.folder, **{f"adapter {n!r}": f.folder for n, f in self.adapters.items()}}


def merge_request(
    adapter: Source | Sequence[Source],
    base: BaseRequest,
    adapter_revision: str | None,
    adapter_subfolder: str | None,
    base_kwargs: EngineKwargs,
) -> LoadRequest:
    """Return what a call asks for; the arguments are those of ``merge_lora_checkpoint``."""
    several = isinstance(adapter, Sequence) and not isinstance(adapter, (str, bytes))
    adapters: Sequence[Source] = [*adapter] if several else [adapter]  # type: ignore[list-item,misc]  # checked below
    path_text(base.source, "base_model")
    for source in adapters:
        path_text(source, "adapter")
    if not adapters:
        raise ArgumentError("adapter is empty; pass a folder or hub id, or several.")
    check_base_kwargs(base_kwargs)
    named = {f"adapter_{number}": source for number, source in enumerate(adapters, 1)}
    named = {"default": adapters[0]} if len(adapters) == 1 else named
    return LoadRequest(named, base, adapter_revision, adapter_subfolder, base_kwargs=base_kwargs)


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
) -> MergeSources:
    """Find base and adapters, and read everything of them but tensors; ``dtype`` is that of the output."""
    _refuse_swapped(request)
    choose = base_files({"variant": request.base_kwargs.get("variant")})

    def with_all_that_belongs(names: frozenset[str], fetch: Callable[[str], Path]) -> list[str]:
        weights = choose(names, fetch)
        return [*weights, *sorted(name for name in names if name not in weights and _belongs(name))]

    resolved = resolve_all(request, choose_adapter=_with_tokenizer, choose_base=with_all_that_belongs)
    base = open_base(resolved.require_base(), request.base_kwargs, dtype=dtype, dequantize=dequantize)
    digests = {name: digest(facts) for name, facts in resolved.adapters.items()}
    _refuse_twice(resolved.adapters, digests)
    return MergeSources(base, resolved.adapters, weights, digests, *_other_files(base.checkpoint))


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


def _refuse_twice(adapters: Mapping[str, AdapterFacts], digests: Mapping[str, str]) -> None:
    first: dict[str, str] = {}
    for name, sha256 in digests.items():
        known = first.setdefault(sha256, name)
        if known != name:
            raise ArgumentError(
                f"{adapters[known].source!r} and {adapters[name].source!r} are the same adapter, which would be added "
                f"twice. Name it once; adapter_weights=[2.0] (ADAPTER=2 on the command line) doubles what it adds."
            )


def is_tokenizer(name: str) -> bool:
    """Return whether a file belongs to a tokenizer, its chat templates included."""
    return name in _TOKENIZER or name in _VOCABULARIES or is_template(name)


def is_vocabulary(name: str) -> bool:
    """Return whether a file holds the words of a tokenizer."""
    return name in _VOCABULARIES or name in ("tokenizer.json", "tekken.json")


def is_template(name: str) -> bool:
    """Return whether a file is a chat template."""
    return name in _TEMPLATES or name.startswith(f"{_TEMPLATE_FOLDER}/")


def _belongs(name: str) -> bool:
    """Return whether a file of the base that is not a weight file belongs to the output."""
    folder, _, file = name.rpartition("/")
    if folder not in ("", _TEMPLATE_FOLDER) or file.startswith(".") or file in _LEFT_OUT:
        return False
    return not file.endswith((*_WEIGHTS, ".index.json")) and not file.startswith(("rng_state", "adapter_"))


def _with_tokenizer(names: frozenset[str], fetch: Callable[[str], Path]) -> list[str]:
    return [*adapter_files(names, fetch), *sorted(filter(is_tokenizer, names))]


def _other_files(checkpoint: Checkpoint) -> tuple[dict[str, Path], tuple[str, ...]]:
    """Return the files beside the weights that belong to the output, and the names of those that do not."""
    carried, left_out = {}, []
    for path in sorted(checkpoint.folder.rglob("*")):
        name = path.relative_to(checkpoint.folder).as_posix()
        # Hidden folders (.git, .cache/huggingface) are no part of the model.
        if not path.is_file() or name in checkpoint.headers or any(level.startswith(".") for level in name.split("/")):
            continue
        if checkpoint.index is not None and path == checkpoint.index.path:
            continue
        if _belongs(name):
            carried[name] = path
        else:
            left_out.append(name)
    return carried, tuple(left_out)
