"""The model of the output: what its config says otherwise than the base's, and whether it finds every tensor."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from safe_loading._checkpoint.header import TensorInfo
from safe_loading._checkpoint.strict_json import read_json_object
from safe_loading._core.report import Finding
from safe_loading._loading import base_model as bases
from safe_loading._model.layout.layout import CheckpointLayout, read_layout

from .changes import NAMES, Changes
from .edits import names_of
from .sources import MergeSources


def settle(
    changes: Changes,
    model: Any,
    layout: CheckpointLayout,
    sources: MergeSources,
    options: Mapping[str, Any],
    resized: Mapping[str, int],
    ties: Mapping[str, tuple[str, ...]],
) -> None:
    """Bring config and tensors of the output in line, and add to the problems what its class would not find.

    Args:
        changes: What changes; its config, dropped tensors, findings and problems are added to.
        model: The model on meta, as the adapters want it.
        layout: Where its parameters lie in the base.
        sources: What is merged.
        options: The options that made the model.
        resized: The weights of which the adapters' vocabulary has other rows than the base's, and how many.
        ties: All names of each parameter of the base, by each of them.
    """
    if resized:
        text = model.config.get_text_config()
        name = next((n for n, value in vars(model.config).items() if value is text), None)
        changes.config[f"{name}.vocab_size" if name else "vocab_size"] = max(resized.values())
        changes.problems += _not_resized(changes, resized, layout)
    new_head = any(source is None for source in changes.added.values())
    if new_head:
        changes.config["architectures"] = [type(model).__name__]
        if options.get("num_labels") is not None:
            labels = range(int(options["num_labels"]))
            changes.config["id2label"] = {str(number): f"LABEL_{number}" for number in labels}
            changes.config["label2id"] = {f"LABEL_{number}": number for number in labels}
        changes.dropped |= _no_longer_known(sources, layout)
    if changes.dropped:
        changes.findings.append(_left_behind(changes, sources, type(model).__name__))
    if changes.config and not changes.problems:
        changes.problems += _unfound(changes, model, sources, layout, ties)


def _not_resized(changes: Changes, resized: Mapping[str, int], layout: CheckpointLayout) -> list[str]:
    """Return the weights whose new rows nobody has."""
    return [
        f"{name}: the adapter's vocabulary has {rows} rows and the base's {layout.of[name].shape[0]}, and the adapter "
        f"does not hold this weight, whose new rows were made when it was trained. Save the adapter with this module "
        f"in modules_to_save; or save the base with the new vocabulary, and merge into that"
        for name, rows in resized.items()
        if layout.of[name].pieces[0].tensor not in changes.values
    ]


def _no_longer_known(sources: MergeSources, layout: CheckpointLayout) -> set[str]:
    """Return the tensors that the base's own class knows and the output's does not (the head for another task)."""
    import transformers

    for name in read_json_object(sources.base.folder / "config.json").get("architectures") or ():
        own = bases.skeleton(getattr(transformers, str(name), None), sources.base.folder, "auto", sources.base_kwargs)
        if own is not None:
            known = set(sources.checkpoint.tensors) - set(read_layout(own, sources.checkpoint.tensors).unknown)
            return known & set(layout.unknown)
    return set()


def _left_behind(changes: Changes, sources: MergeSources, architecture: str) -> Finding:
    names = sorted(changes.dropped)
    return Finding(
        "tensors-left-behind",
        "info",
        ", ".join(names[:4]),
        f"{len(names)} tensor(s) of the base are no part of a {architecture}, which the adapter makes of it.",
        "none.",
        sum(sources.checkpoint.tensors[name].nbytes for name in names),
    )


def _unfound(
    changes: Changes, model: Any, sources: MergeSources, layout: CheckpointLayout, ties: Mapping[str, tuple[str, ...]]
) -> list[str]:
    """Build the output's model on meta from its config, and return what it would not find in the output's tensors.

    What the base ties beside the weights that were taken apart (the biases of a BERT's head) is tied no more, either:
    each such name gets a tensor of its own.
    """
    try:
        # read from a file, as it will be: transformers writes infinity as an object, which from_dict() leaves as it is
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_bytes(
                config_bytes(sources.base.folder / "config.json", changes.config)
            )
            config = type(model.config).from_pretrained(folder)
        with torch.device("meta"):
            built = type(model)(config)
    except Exception as error:  # a class may refuse anything about its config
        return [f"config.json of the output would make no {type(model).__name__}: {error}"]
    tensors = {n: info for n, info in sources.checkpoint.tensors.items() if n not in changes.dropped}
    for name, source in changes.added.items():
        if source is not None:
            tensors[name] = tensors[source]
    for name, value in changes.values.items():
        tensors[name] = TensorInfo(name, NAMES[value.dtype], tuple(value.shape), 0, value.nbytes)
    found = read_layout(built, tensors)
    tied = names_of(built)
    state = built.state_dict()
    by_name = {**dict(built.named_parameters(remove_duplicate=False)), **dict(built.named_buffers())}
    problems = [f"{name}: {why}" for name, why in found.opaque.items() if name in state and "the checkpoint" in why]
    for name in state:
        aliases = tied.get(id(by_name.get(name)), (name,))
        if any(alias in found.of or alias in found.opaque for alias in aliases):
            continue
        held = _held_whole(ties.get(name, ()), layout)
        if held is None:
            problems.append(f"{name}: neither the base nor the adapter has it, so it would start at random")
            continue
        changes.added[name] = held
        if held in changes.merges:
            changes.merges[name] = changes.merges[held]
        if held in changes.values:
            changes.values[name] = changes.values[held]
    return problems


def _held_whole(names: Iterable[str], layout: CheckpointLayout) -> str | None:
    """Return the tensor on disk that holds all of a parameter under one of its names."""
    for whole in (layout.of[name] for name in names if name in layout.of):
        if len(whole.pieces) == 1 and whole.pieces[0].size == whole.shape:
            return whole.pieces[0].tensor
    return None


def new_config(path: Path, changed: Mapping[str, object]) -> dict[str, Any]:
    """Return the content of a config with some entries changed; a dotted name is one of a part, None takes one out.

    ``dtype`` and ``tie_word_embeddings`` are changed in each part that says them too.
    """
    document = read_json_object(path)
    parts = [document, *(part for part in document.values() if isinstance(part, dict))]
    for name, value in changed.items():
        if name == "dtype":
            for part in parts:
                for key in ("dtype", "torch_dtype"):
                    if key in part:
                        part[key] = value
            if "torch_dtype" not in document:
                document["dtype"] = value
            continue
        if name == "tie_word_embeddings":
            for part in parts:
                if name in part:
                    part[name] = value
        if value is None:
            document.pop(name, None)
            continue
        where: dict[str, Any] = document
        *outer, last = name.split(".")
        for key in outer:
            where = where.setdefault(key, {})
        where[last] = value
    return document


def config_bytes(path: Path, changed: Mapping[str, object]) -> bytes:
    """Return the bytes of the output's config.json: the base's own when nothing changes."""
    if not changed:
        return path.read_bytes()
    return json.dumps(new_config(path, changed), indent=2, ensure_ascii=False).encode() + b"\n"
