"""Where the base and its adapters lie, what they say before a tensor is read, and the files that come along."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from safe_loading._checkpoint.hub import Resolved, adapter_files, base_files
from safe_loading._checkpoint.index import Checkpoint, read_checkpoint
from safe_loading._checkpoint.strict_json import read_json_object
from safe_loading._checkpoint.weight_files import PICKLE_SUFFIXES
from safe_loading._core.paths import path_text
from safe_loading._loading.adapter_facts import AdapterFacts, digest
from safe_loading._loading.base_model import check_base_kwargs
from safe_loading._loading.sources import BaseRequest, LoadRequest, Source, resolve_all
from safe_loading._model.layout.tensor_contents import REPORT
from safe_loading.errors import ArgumentError, MergeError

from .quantized_base import QuantizedTensor, decoded

TEMPLATES = frozenset({"chat_template.jinja", "chat_template.json"})
TOKENIZER = TEMPLATES | {
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "spiece.model",
    "tokenizer.model",
    "sentencepiece.bpe.model",
    "tekken.json",
}

# Other formats of the same weights, what training left, and what describes an adapter or an earlier merge.
_WEIGHTS = (".safetensors", ".gguf", ".h5", ".msgpack", ".onnx", ".npz", ".ot", *PICKLE_SUFFIXES)
_LEFT_OUT = frozenset({REPORT, "adapter_config.json", "trainer_state.json", "optimizer.pt", "scheduler.pt"})
_TEMPLATE_FOLDER = "additional_chat_templates"


@dataclasses.dataclass(frozen=True)
class MergeSources:
    """What is merged.

    Attributes:
        base: Where the base lies.
        checkpoint: Its weight files.
        adapters: The adapters, by the names that they get, in the order in which they are merged.
        digests: The SHA-256 of each adapter.
        carried: The other files of the base that belong to the output, by their name there.
        left_out: The names of files that do not.
        base_kwargs: More arguments of the base's ``from_pretrained``.
        codes: What quantized weights of the base are on disk; ``checkpoint`` has what they stand for.
        relaid: The files of which not every tensor is carried along as it is, so that their headers do not hold.
    """

    base: Resolved
    checkpoint: Checkpoint
    adapters: Mapping[str, AdapterFacts]
    digests: Mapping[str, str]
    carried: Mapping[str, Path]
    left_out: tuple[str, ...]
    base_kwargs: Mapping[str, Any]
    codes: Mapping[str, QuantizedTensor] = dataclasses.field(default_factory=dict)
    relaid: frozenset[str] = frozenset()

    @property
    def folders(self) -> dict[str, Path]:
        """The folders that are read, by what they are."""
        return {"the base": self.base.folder, **{f"adapter {n!r}": f.folder for n, f in self.adapters.items()}}


def ask(
    adapter: Source | Sequence[Source], base: BaseRequest, *, base_kwargs: Mapping[str, object], **options: Any
) -> LoadRequest:
    """Return what a call asks for; ``options`` are the other fields of the request.

    Raises:
        ArgumentError: No adapter, or ``base_kwargs`` says what the call decides itself.
    """
    several = isinstance(adapter, Sequence) and not isinstance(adapter, (str, bytes))
    asked: Sequence[Source] = [*adapter] if several else [adapter]  # type: ignore[list-item,misc]  # checked below
    for each, argument in ((base.source, "base_model"), *((one, "adapter") for one in asked)):
        path_text(each, argument)
    if not asked:
        raise ArgumentError("adapter is empty; pass a folder or hub id, or several.")
    check_base_kwargs(base_kwargs)
    names = ["default"] if len(asked) == 1 else [f"adapter_{number}" for number in range(1, len(asked) + 1)]
    return LoadRequest(dict(zip(names, asked, strict=True)), base, base_kwargs=base_kwargs, **options)


def find(request: LoadRequest, *, dequantize: bool = False) -> MergeSources:
    """Find and read everything but tensors; ``dequantize`` takes a quantized base as what it stands for.

    Raises:
        CheckpointNotFound: Something is not there.
        CheckpointError: A file is damaged, or (:class:`PickleRefused`) a pickle.
        MergeError: The base is quantized.
    """
    options = request.base_kwargs
    choose = base_files({"variant": options.get("variant")})

    def everything(names: frozenset[str], fetch: Callable[[str], Path]) -> list[str]:
        chosen = choose(names, fetch)
        return [*chosen, *sorted(name for name in names if name not in chosen and belongs(name))]

    found = resolve_all(request, choose_adapter=_with_tokenizer, choose_base=everything)
    base, adapters = found.require_base(), found.adapters
    checkpoint = read_checkpoint(base.folder, variant=options.get("variant"), kind="model")
    codes: Mapping[str, QuantizedTensor] = {}
    relaid: frozenset[str] = frozenset()
    carried, left_out = _others(base.folder, checkpoint)
    if _quantized(base.folder, refused=not dequantize):
        checkpoint, codes, relaid = decoded(checkpoint, read_json_object(base.folder / "config.json"))
    digests = {name: digest(facts) for name, facts in adapters.items()}
    return MergeSources(base, checkpoint, adapters, digests, carried, left_out, options, codes, relaid)


def is_tokenizer(name: str) -> bool:
    """Return whether a file belongs to a tokenizer, its chat templates included."""
    return name in TOKENIZER or is_template(name)


def is_template(name: str) -> bool:
    """Return whether a file is a chat template."""
    return name in TEMPLATES or name.startswith(f"{_TEMPLATE_FOLDER}/")


def belongs(name: str) -> bool:
    """Return whether a file of the base that is no weight file belongs to the output."""
    folder, _, file = name.rpartition("/")
    if folder not in ("", _TEMPLATE_FOLDER) or file.startswith(".") or file in _LEFT_OUT:
        return False
    return not file.endswith((*_WEIGHTS, ".index.json")) and not file.startswith(("rng_state", "adapter_"))


def _with_tokenizer(names: frozenset[str], fetch: Callable[[str], Path]) -> list[str]:
    return [*adapter_files(names, fetch), *sorted(filter(is_tokenizer, names))]


def _others(folder: Path, checkpoint: Checkpoint) -> tuple[dict[str, Path], tuple[str, ...]]:
    carried, left_out = {}, []
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if not path.is_file() or name in checkpoint.headers or any(part.startswith(".") for part in name.split("/")):
            continue
        if checkpoint.index is not None and path == checkpoint.index.path:
            continue
        if belongs(name):
            carried[name] = path
        else:
            left_out.append(name)
    return carried, tuple(left_out)


def _quantized(folder: Path, *, refused: bool) -> bool:
    """Return whether the config says that the base is quantized; raises when that is refused."""
    config = folder / "config.json"
    if not config.is_file():
        return False
    quantized = read_json_object(config).get("quantization_config")
    if quantized and refused:
        method = quantized.get("quant_method") if isinstance(quantized, dict) else quantized
        raise MergeError(
            f"{config} says that the base is quantized ({method}); adding to its codes would be wrong. Merge into the "
            f"base that it was made from, and quantize the result; or pass dequantize=True, which writes a plain one."
        )
    return bool(quantized)
