"""The model of the output on meta: the base's with the head and the vocabulary of the adapters, and its config.

Whether a base of the output's config would find every tensor is checked here too, before a byte is written.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
import json
import re
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from safe_loading._checkpoint.copy_bytes import read_into
from safe_loading._checkpoint.files import open_regular
from safe_loading._checkpoint.index import Checkpoint
from safe_loading._checkpoint.model_folder import CONFIG
from safe_loading._core.engines import dtype_plan
from safe_loading._core.log import quiet
from safe_loading._core.protocols import JsonObject, ModelClass
from safe_loading._core.report import Finding
from safe_loading._loading.adapter_values import Adapter
from safe_loading._loading.base_arguments import checked_class
from safe_loading._loading.base_model import check_fit
from safe_loading._loading.choose_class import ChosenClass, choose_class
from safe_loading._loading.vocabulary import labels_of_heads, replaced_shapes, vocabulary_of
from safe_loading._model.dtypes import DTYPES
from safe_loading._model.embeddings_and_head import computes_by_tie_flag
from safe_loading._model.layout.fit import missing_names, optional_names
from safe_loading._model.layout.layout import CheckpointLayout, read_layout
from safe_loading._model.layout.ties import UntiedPair, held_apart, untie, untied_finding
from safe_loading._model.model_config import failed_code
from safe_loading._model.tensor_values import as_buffer
from safe_loading._model.tensors import all_names
from safe_loading._model.text_config import text_config
from safe_loading.errors import MergeError

from .base import MergeBase
from .changes import FLOATS, NAMES, Changes, info_of
from .compare_layouts import OtherLayout
from .place_edits import is_one_tensor

_TIE_FLAG = "tie_word_embeddings"
_QUANTIZATION = "quantization_config"
# Mllama has eight rows more than words, DeepSeek V4 tables beside the vocabulary, T5Gemma 2 one vocabulary twice.
_NO_SUCH_VOCABULARY = (
    ". transformers saves no {} with another vocabulary that it could load again. Keep the adapter: load the base, "
    "call resize_token_embeddings({}), and pass it to load_peft_on_rank"
)


@dataclasses.dataclass(frozen=True, eq=False)
class OutputModel:
    """The model of the output, on meta; adapters are attached to it later."""

    model: PreTrainedModel
    layout: CheckpointLayout
    num_labels: int | None  # of its head, where the caller or an adapter says how many
    resized: Mapping[str, int]  # weights of which the adapters' vocabulary has other rows, and how many
    ties: Mapping[str, tuple[str, ...]]  # all names of each parameter, by each of them
    untied: Sequence[UntiedPair] = ()  # what the config ties and the files hold with different values
    findings: Sequence[Finding] = ()  # about the choice of the class


def build_output_model(base: MergeBase, adapters: Sequence[Adapter], model_class: ModelClass | None) -> OutputModel:
    """Build the base on meta as the adapters need it, and check that its checkpoint fits.

    Without a class, it is the one of the first adapter's task.
    """
    given = None if model_class is None else ChosenClass(checked_class(model_class, base.model_config))
    chosen = given or _chosen_class(base, adapters[0])
    model, num_labels = _with_head(base, chosen.auto_class, adapters)
    layout = read_layout(model, base.checkpoint.tensors)
    check_fit(model, base.checkpoint, adapters, layout)
    untied = held_apart(model, base.plain_on_disk, layout)
    resized = {}
    rows = vocabulary_of(replaced_shapes(adapters, model), model)
    if rows is not None:
        model.resize_token_embeddings(rows, mean_resizing=False)
        shapes = {name: tuple(tensor.shape) for name, tensor in model.named_parameters(remove_duplicate=False)}
        resized = {name: rows for name, whole in layout.of.items() if shapes.get(name, whole.shape) != whole.shape}
    untie(model, untied)  # not before, because resize_token_embeddings() ties again
    return OutputModel(model, layout, num_labels, resized, all_names(model), untied, chosen.findings)


def _chosen_class(base: MergeBase, adapter: Adapter) -> ChosenClass:
    """Return the class that the adapter's tensors fit, of those that adapter and base name."""

    def build(model_class: ModelClass) -> PreTrainedModel | None:
        try:
            return base.on_meta(model_class)
        except Exception:  # a class may refuse anything on meta
            return None

    return choose_class(adapter, base.model_config, base.kwargs, build)


def _with_head(base: MergeBase, model_class: Any, adapters: Sequence[Adapter]) -> tuple[PreTrainedModel, int | None]:
    """Return the base on meta, with a head of the size that the adapters bring, and the number of labels if told."""
    base.refuse_unknown_arguments(model_class)
    try:
        model = base.on_meta(model_class)
    except Exception as error:  # the class of the model, or code of its repository
        if of_code := failed_code(error, vars(base.model_config)):
            raise MergeError(f"{base.folder / CONFIG}: {of_code}") from error
        raise MergeError(
            f"{base.folder / CONFIG}: transformers cannot build this model on meta, so the names of its tensors cannot "
            f"be told ({type(error).__name__}: {error}); it may need remote code (base_kwargs={{'trust_remote_code': "
            f"True}}), or another version. Load it, merge it with merge_lora_inplace and save it."
        ) from error
    if base.num_labels is not None:
        return model, base.num_labels
    size = labels_of_heads(model, adapters, lambda labels: base.on_meta(model_class, num_labels=labels))
    return (model, None) if size is None else (base.on_meta(model_class, num_labels=size), size)


def decides_more_by_tie_flag(model: PreTrainedModel, base: MergeBase) -> bool:
    """Return whether ``tie_word_embeddings`` decides more of a model than which of its weights are tied.

    T5 scales what it hands to the head unless config.json says False, or holds ``scale_decoder_outputs`` itself.
    """
    if computes_by_tie_flag(model):
        return True
    configs = []
    for flag in (True, False):
        with contextlib.suppress(Exception):  # a class may refuse anything about its config
            config = type(model.config).from_dict({**copy.deepcopy(base.config), _TIE_FLAG: flag}).to_dict()
            configs.append({name: value for name, value in config.items() if name != _TIE_FLAG})
    return len(configs) == 2 and configs[0] != configs[1]


def ties_on_disk(output: OutputModel) -> dict[str, tuple[str, ...]]:
    """Return the names on disk of each tied parameter, by each of them; a name without a tensor is the model's."""
    ties: dict[str, tuple[str, ...]] = {}
    for names in set(output.ties.values()):
        wholes = {name: output.layout.of.get(name) for name in names}
        tensors = {n: w.pieces[0].tensor for n, w in wholes.items() if w is not None and is_one_tensor(w)}
        if len(names) > 1 and tensors:
            group = tuple(dict.fromkeys(tensors.get(name, name) for name in names))
            ties |= dict.fromkeys(group, group)
    return ties


def ties_by_config(output: OutputModel, config: JsonObject) -> tuple[tuple[str, str], ...]:
    """Return the pairs on disk that a model by another config.json ties, in the order in which it fills them.

    Its class decides, whatever ``tie_word_embeddings`` says: T5 always ties its embeddings. Before transformers 5 a
    class does not say which weight stands for which.
    """
    kind: Any = type(output.model)
    with contextlib.suppress(Exception), quiet(), torch.device("meta"):  # a class may refuse anything about its config
        model = kind(type(output.model.config).from_dict(copy.deepcopy(dict(config))))
        on_disk = {name: whole.pieces[0].tensor for name, whole in output.layout.of.items() if is_one_tensor(whole)}
        ties: Mapping[str, str] | None = getattr(model, "all_tied_weights_keys", None)
        groups = set(all_names(model).values()) if ties is None else set()
        pairs = (
            [pair for names in groups for pair in itertools.combinations(names, 2)] if ties is None else ties.items()
        )
        return tuple((on_disk.get(one, one), on_disk.get(other, other)) for one, other in pairs)
    return ()


def layout_of_judged(output: OutputModel, base: MergeBase, merged: Checkpoint) -> OtherLayout | None:
    """Return where a merged folder holds the base's tensors; None where it does under their names, in their shapes."""
    there, own = merged.tensors, base.template.tensors
    if there.keys() == own.keys() and all(there[name].shape == info.shape for name, info in own.items()):
        return None
    layout = read_layout(output.model, own) if base.keeps_codes else output.layout
    return OtherLayout(layout, output.model, own, merged)


def adapt_config(changes: Changes, output: OutputModel, base: MergeBase) -> None:
    """Bring config and tensors of the output in line, and note as problems the tensors that its class would miss."""
    config = output.model.config
    changes.findings += output.findings
    changes.findings += [untied_finding(base.folder, pair) for pair in output.untied]
    changes.config = {**_asked(output, base), **changes.config}
    if output.resized:
        text = text_config(config)
        key = next((name for name, value in vars(config).items() if value is text), None)
        changes.config[f"{key}.vocab_size" if key else "vocab_size"] = max(output.resized.values())
        _cut_rows(changes, output, base)
        changes.problems += _not_resized(changes, output)
    architecture = type(output.model).__name__
    if output.layout.mismatched or any(source is None for source in changes.added.values()):  # a head of its own
        changes.config["architectures"] = [architecture]
        if output.num_labels is not None:
            changes.config["id2label"] = {str(number): name for number, name in (config.id2label or {}).items()}
            changes.config["label2id"] = dict(config.label2id or {})
        changes.dropped |= _no_longer_known(base, output.layout)
    if changes.dropped:
        names, nbytes = sorted(changes.dropped), sum(base.checkpoint.tensors[name].nbytes for name in changes.dropped)
        why = f"{len(names)} tensor(s) of the base are no part of a {architecture}, which the adapter makes of it."
        changes.findings.append(Finding("tensors-left-behind", "info", ", ".join(names[:4]), why, "none.", nbytes))
    if changes.config and not changes.problems:
        problems = _not_found(changes, output, base)
        advice = _NO_SUCH_VOCABULARY.format(type(output.model).__name__, max(output.resized.values(), default=0))
        changes.problems += [problem + advice if output.resized else problem for problem in problems]
    if base.quantized and not base.keeps_codes:
        changes.config[_QUANTIZATION] = None


def _asked(output: OutputModel, base: MergeBase) -> dict[str, object]:
    """Return the entries that the caller asked for, but that weights are tied which the files hold apart."""
    return {key: value for key, value in base.asked.items() if not (output.untied and key.endswith(_TIE_FLAG))}


def _cut_rows(changes: Changes, output: OutputModel, base: MergeBase) -> None:
    """Replace the weights of a vocabulary that shrank, and that no adapter holds, by the first rows of the base's."""
    for name, rows in output.resized.items():
        whole = output.layout.of[name]
        tensor = whole.pieces[0].tensor
        is_plain = is_one_tensor(whole) and tensor not in base.quantized and tensor not in changes.merges
        if rows < whole.shape[0] and is_plain and tensor not in changes.values:
            info = base.checkpoint.tensors[tensor]
            kept = torch.empty((rows, *info.shape[1:]), dtype=DTYPES[info.dtype], device="cpu")
            with open_regular(base.checkpoint.file_of[tensor]) as file:
                read_into(file.fileno(), as_buffer(kept), info.start)
            changes.values[tensor] = kept


def _not_resized(changes: Changes, output: OutputModel) -> list[str]:
    """Return the weights whose new rows neither the base nor an adapter has."""
    of = output.layout.of
    return [
        f"{name}: the adapter's vocabulary has {rows} rows and the base's {of[name].shape[0]}, and the adapter does "
        f"not hold this weight, whose new rows were made when it was trained. Save the adapter with this module in "
        f"modules_to_save; or save the base with the new vocabulary, and merge into that"
        for name, rows in output.resized.items()
        if of[name].pieces[0].tensor not in changes.values
    ]


def _no_longer_known(base: MergeBase, layout: CheckpointLayout) -> set[str]:
    """Return the tensors that the base's own class knows and the output's does not (the head for another task)."""
    tensors = base.checkpoint.tensors
    for name in base.config.get("architectures") or ():
        # A class may be missing from transformers, or refuse anything on meta.
        with contextlib.suppress(Exception):
            model = base.on_meta(getattr(transformers, str(name), None))
            return (tensors.keys() - set(read_layout(model, tensors).unknown)) & set(layout.unknown)
    return set()


def _not_found(changes: Changes, output: OutputModel, base: MergeBase) -> list[str]:
    """Build the output's model on meta from its config, and return the parameters that the output's tensors lack.

    Other parameters that the base ties besides those that were untied (the biases of a BERT's head) are tied no more,
    either: each such name gets a tensor of its own.
    """
    model_class = type(output.model)
    try:
        # From a file, as it will be read: transformers writes infinity as an object, which from_dict() leaves as it is.
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / CONFIG).write_bytes(config_bytes(base.config, changes.config))
            config = type(output.model.config).from_pretrained(folder)
        with torch.device("meta"):
            model = model_class(config)
    except Exception as error:  # a class may refuse anything about its config
        return [f"config.json of the output would make no {model_class.__name__}: {error}"]
    tensors = {n: info for n, info in base.checkpoint.tensors.items() if n not in changes.dropped}
    for name, source in changes.added.items():
        if source is not None:
            tensors[name] = tensors[source]
    for name, value in changes.values.items():
        tensors[name] = info_of(name, value)
    layout, state = read_layout(model, tensors), model.state_dict()
    problems = [f"{name}: {why}" for name, why in layout.opaque.items() if name in state and "the checkpoint" in why]
    # What neither the base nor an adapter has may still be a name that the base ties to another one.
    optional = optional_names(model)
    for name in missing_names(state, {*layout.of, *layout.opaque}, all_names(model)):
        names = output.ties.get(name, ())
        source = _one_tensor_of(names, output.layout)
        if source is None:
            first = next((each for each in names if each in changes.added and each in changes.values), None)
            if first is not None:  # of a head that the adapter brings
                changes.added[name], changes.values[name] = None, changes.values[first]
            elif not optional(name):
                problems.append(f"{name}: neither the base nor the adapter has it, so it would start at random")
            continue
        changes.added[name] = source
        if source in changes.merges:
            changes.merges[name] = changes.merges[source]
        if source in changes.values:
            changes.values[name] = changes.values[source]
    return problems


def _one_tensor_of(names: Iterable[str], layout: CheckpointLayout) -> str | None:
    """Return the tensor on disk that holds all of a parameter under one of its names."""
    wholes = (layout.of[name] for name in names if name in layout.of)
    return next((whole.pieces[0].tensor for whole in wholes if is_one_tensor(whole)), None)


def cast_dtypes(changes: Changes, output: OutputModel, base: MergeBase, dtype: torch.dtype) -> dict[str, str]:
    """Return the new dtype of each tensor that gets another one, and write it into the config.

    What transformers would keep in float32 for this class is left as it is.
    """
    plan: Mapping[str, torch.dtype] = dtype_plan(output.model, dtype)
    kept = {
        block.tensor
        for name, whole in output.layout.of.items()
        if any(re.search(pattern.replace("*", r"\d+"), name) for pattern in plan)
        for block in whole.pieces
    }
    changes.config["dtype"] = str(dtype).removeprefix("torch.")
    dtypes = {name: info.dtype for name, info in base.checkpoint.tensors.items()}
    dtypes |= {name: dtypes[source] for name, source in changes.added.items() if source is not None}
    dtypes |= {name: NAMES[value.dtype] for name, value in changes.values.items()}
    return {name: NAMES[dtype] for name, before in dtypes.items() if name not in kept and before in FLOATS}


def new_config(config: JsonObject, changed: Mapping[str, object]) -> JsonObject:
    """Return a copy of a config with new values; a dotted key is that of a nested one.

    ``dtype`` and ``tie_word_embeddings`` are changed in each nested config that has them, too, and a
    ``quantization_config`` that is None is taken out of all.
    """
    document = copy.deepcopy(config)
    configs = [document, *(nested for nested in document.values() if isinstance(nested, dict))]
    for name, value in changed.items():
        if name == "dtype":
            for nested, key in itertools.product(configs, ("dtype", "torch_dtype")):
                if key in nested:
                    nested[key] = value
            if "torch_dtype" not in document:
                document["dtype"] = value
            continue
        for nested in configs if name == _TIE_FLAG else ():
            if name in nested:
                nested[name] = value
        if name == _QUANTIZATION and value is None:
            for nested in configs:
                nested.pop(name, None)
            continue
        *outer, last = name.split(".")
        nested = document
        for key in outer:
            nested = nested.setdefault(key, {})
        nested[last] = value
    return document


def config_bytes(config: JsonObject, changed: Mapping[str, object]) -> bytes:
    """Return the text of a config.json with some entries changed, as :func:`new_config` changes them."""
    return json.dumps(new_config(config, changed), indent=2, ensure_ascii=False).encode() + b"\n"
