"""The files beside the weights of a merged folder: its config, and files of the base and adapters that it lost."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
import transformers
from transformers import PreTrainedConfig

from safe_loading._checkpoint.model_folder import CONFIG, GENERATION_CONFIG, ModelFolder
from safe_loading._checkpoint.tokenizer_ids import SETTINGS, TEMPLATES, inline_template
from safe_loading._checkpoint.trained_beside import MODULES, folders_named_in, of_modules
from safe_loading._core.log import quiet
from safe_loading._core.protocols import JsonObject
from safe_loading._core.report import Finding
from safe_loading._model.meta_model import build_on_meta

from .changes import Changes
from .compare_changed_files import changed_files, content_here
from .output_model import new_config
from .sources import MergeSources, is_tokenizer

_TIE_FLAG = "tie_word_embeddings"
# Entries of config.json that a merge must have as the base has them, unless it changes them.
_SAID_ALIKE = ("vocab_size", "model_type")
# Entries that change no value of a forward pass, or that programs of training are used to change.
_NO_MATTER = {
    "architectures", "bos_token_id", "chunk_size_feed_forward", "decoder_start_token_id", "dtype", "eos_token_id",
    "id2label", "is_decoder", "label2id", "max_position_embeddings", "model_type", "name_or_path", "num_labels",
    "output_attentions", "output_hidden_states", "pad_token_id", "pretraining_tp", "problem_type",
    "quantization_config", "return_dict", "sep_token_id", "torch_dtype", "transformers_version", "use_cache",
    "vocab_size",
}  # fmt: skip
_OF_TRAINING = ("dropout", "pdrop", "init", "loss", "router_jitter", "checkpointing")


def small_file_findings(
    sources: MergeSources, changes: Changes, expected: Mapping[str, bytes], merged: ModelFolder
) -> list[Finding]:
    """Return the findings about the files beside the weights; ``expected`` holds those that the merge would write."""
    stale = [*_tokenizer_findings(sources, expected, merged.path)]
    return [
        *_config_findings(sources, changes, merged),
        *_lost_files(expected, merged.path, stale=bool(stale)),
        *stale,
        *changed_files({} if stale else expected, merged.path),  # a template of the base's is said already
    ]


def _config_findings(sources: MergeSources, changes: Changes, merged: ModelFolder) -> Iterator[Finding]:
    config, path = merged.config, merged.path / CONFIG
    if config is None:
        return
    right, kind = new_config(sources.base.config, changes.config), type(sources.base.model_config)
    changed, part = changes.config, changes.adapted_config
    own = [changes.adapted_class]
    if part is not None and config.get("architectures") == own != right.get("architectures"):
        # An adapter for features, or for text, is merged into a part of the base, which is saved alone.
        changed = {key.rpartition(".")[2]: value for key, value in changed.items()}
        right, kind = {**new_config(part.to_dict(), changed), "architectures": own}, type(part)
    # An entry that is absent has the default of its class, which nothing here can tell.
    wrong = [
        f"{key} is {config[key]!r:.60} and should be {right[key]!r:.60}"
        for key in sorted(right.keys() & config.keys() & {*changed, *_SAID_ALIKE} - {"dtype"})
        if config[key] != right[key] and {str(key): value for key, value in _items(config[key])} != right[key]
    ]
    wrong += _read_otherwise(kind, right, config, has_ties=bool(changes.ties))
    if wrong:
        fix = "write the entries so; or merge again with merge_lora_checkpoint, which does"
        yield Finding("merged-config", "error", str(path), "; ".join(dict.fromkeys(wrong)) + ".", f"{fix}.")


def _read_otherwise(
    kind: type[PreTrainedConfig], right: JsonObject, merged: JsonObject, *, has_ties: bool
) -> list[str]:
    """Return the entries with which another model is built than with those that the merge writes.

    Both are read by one class of configs, because each version of transformers writes another form.
    """
    found: list[str] = []
    own, classes = merged.get("architectures"), right.get("architectures")
    # where transformers lacks the base's class, it writes that of the model type
    if own != classes and isinstance(classes, list) and any(hasattr(transformers, str(name)) for name in classes):
        found.append(f"architectures is {own} and should be {classes}")
    if merged.get("model_type") != right.get("model_type"):
        return found  # which is said already
    try:
        with quiet():
            config, found_config = (kind.from_dict(copy.deepcopy(document)) for document in (right, merged))
            one, other = config.to_dict(), found_config.to_dict()
    except Exception:  # of remote code, or of entries that check_checkpoint names
        return found
    differences = list(_differences(one, other, ""))
    if differences:
        built = {path for path, *_ in _differences(_once_built(config), other, "")}
        differences = [each for each in differences if each[0] in built]
    if not has_ties:  # peft takes back a flag that is without effect (BigBirdPegasus)
        differences = [each for each in differences if each != (_TIE_FLAG, True, False)]
    return found + [f"{path} is {own!r:.60} and should be {value!r:.60}" for path, value, own in differences]


def _once_built(config: PreTrainedConfig) -> JsonObject:
    """Return a config as its class leaves it that has built the model: Levit's adds to the list of its stages."""
    read: JsonObject = config.to_dict()
    classes = [getattr(transformers, str(name), None) for name in config.architectures or ()]
    try:
        with quiet():
            build_on_meta(classes[0], config, torch.float32)
    except Exception:  # there is no such class, or no model of this config
        return read
    built: JsonObject = config.to_dict()
    return built


def _differences(right: JsonObject, found: JsonObject, outer: str) -> Iterator[tuple[str, object, object]]:
    for key in sorted(right.keys() & found.keys()):
        value, other = right[key], found[key]
        if key in _NO_MATTER or key.startswith("_") or any(part in key for part in _OF_TRAINING) or value == other:
            continue
        if isinstance(value, dict) and isinstance(other, dict):
            yield from _differences(value, other, f"{outer}{key}.")
        else:
            yield f"{outer}{key}", value, other


def _items(entry: object) -> Iterable[tuple[object, object]]:
    return entry.items() if isinstance(entry, dict) else ()


def _lost_files(expected: Mapping[str, bytes], folder: Path, *, stale: bool) -> Iterator[Finding]:
    """Yield the files that the merge would carry along and the folder lacks.

    Where the settings of its tokenizer are ``stale``, so is the template in them, which is said then.
    """
    kinds = {
        "generation": [GENERATION_CONFIG],
        "processor": ["preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"],
        "code": sorted(name for name in expected if name.endswith(".py")),
    }
    if MODULES in expected:
        kinds["modules"] = of_modules(expected, folders_named_in(expected[MODULES]))
    lost = [name for names in kinds.values() for name in names if name in expected and not (folder / name).exists()]
    tokenizer = [name for name in expected if is_tokenizer(name)]
    if tokenizer and not any((folder / name).exists() for name in tokenizer):
        lost += sorted(tokenizer)
    elif not _has_template(folder):
        lost += _templates_in({} if stale and not any(name in expected for name in TEMPLATES) else expected)
    if lost:
        fix = f"copy {'it' if len(lost) == 1 else 'them'} from the base or the adapter"
        message = f"{', '.join(lost)} of the base or the adapter {'is' if len(lost) == 1 else 'are'} not there."
        yield Finding("merged-files-lost", "warning", str(folder), message, f"{fix}.")


def _templates_in(expected: Mapping[str, bytes]) -> list[str]:
    """Return where the chat template is, of the places that a tokenizer has for one."""
    inline = f"the chat_template in {SETTINGS}"
    held = [name for name in TEMPLATES if name in expected]
    return held or ([] if inline_template(expected.get(SETTINGS)) is None else [inline])


def _has_template(folder: Path) -> bool:
    """Return whether a folder has a chat template: in a file of its own, or in the tokenizer's settings."""
    if any((folder / name).exists() for name in TEMPLATES):
        return True
    return inline_template(content_here(folder / SETTINGS)) is not None


def _tokenizer_findings(sources: MergeSources, expected: Mapping[str, bytes], folder: Path) -> Iterator[Finding]:
    """Yield the files of a tokenizer that are the base's where the merge takes the adapter's."""
    stale = [
        name
        for name, path in sources.carried.items()
        if is_tokenizer(name)
        and (own := content_here(folder / name)) is not None
        and own == content_here(path)
        and own != expected.get(name, own)
    ]
    if stale:
        message = f"{', '.join(sorted(stale))} are the base's, and the adapter was trained with its own."
        fix = "copy the adapter's; or none, with tokenizer='base'"
        yield Finding("merged-tokenizer-of-base", "warning", str(folder), message, f"{fix}.")
