"""Where the values come from that no folder has: collected on rank 0, and agreed on by name."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Mapping, Sequence, Set

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from safe_loading._core.names import canonical
from safe_loading._core.report import Finding
from safe_loading._model.tensor_values import as_buffer
from safe_loading._model.tensors import ModelTensor
from safe_loading._ranks.exchange import Ranks
from safe_loading.errors import CheckpointError

from .checkpoint_folder import models_of_folder
from .new_values import initialized, initialized_adapters, loaded_adapters, remade_adapters
from .setup import Setup


@dataclasses.dataclass
class RootValues:
    """The values that the root, the first rank of the mesh, gives to the others."""

    names: frozenset[str] = frozenset()  # the tensors, on every rank the same
    # their values, on the root; empty elsewhere
    tensors: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    findings: list[Finding] = dataclasses.field(default_factory=list)  # what is worth knowing about them


# Gives values, and findings about them, given the names of the tensors that no earlier source has.
ValueSource = Callable[[Setup, Set[str]], RootValues]


def collect_root_values(setup: Setup, on_disk: Set[str], heads: Sequence[str]) -> RootValues:
    """Collect the values that rank 0 gives: those of every tensor that the folder does not have.

    ``heads`` are the tensors of another task's head in the folder, which the model does not have. Raises
    CheckpointError when a tensor has no values in any source.
    """
    # The order is the precedence: a tensor's values are those of the first source that has it.
    sources: tuple[ValueSource, ...] = (
        # before the folder as well: the caller names the adapters apart from the base
        _from_adapters,
        # what the caller passes as source= decides over what rank 0's model happens to have
        _from_state_dict,
        # real values decide over made ones: an adapter on rank 0 may be a trained one
        _from_rank_0,
        # before init_new, which is for modules that nobody else can initialize
        _from_peft_initialization,
        _from_class,
        _from_init_new,
    )
    root_values = RootValues()
    for source in sources:
        missing = {each.name for each in setup.tensors.all} - root_values.tensors.keys() - on_disk
        new = source(setup, missing)
        root_values.tensors = new.tensors | root_values.tensors
        root_values.findings += new.findings
    required = (*setup.tensors.parameters, *setup.tensors.saved_buffers)
    without_values = [each for each in required if each.name not in root_values.tensors and each.name not in on_disk]
    _refuse_missing(setup, without_values, len(required), heads)
    return root_values


def _from_adapters(setup: Setup, missing: Set[str]) -> RootValues:
    """The folders of ``adapters=``, with all that they have."""
    return RootValues(tensors=loaded_adapters(setup.model, setup.values.adapters))


def _from_state_dict(setup: Setup, missing: Set[str]) -> RootValues:
    """The state dict of ``source=``, which is matched as a whole."""
    source = setup.values.source
    return match_state_dict(setup.tensors.all, source) if isinstance(source, Mapping) else RootValues()


def _from_rank_0(setup: Setup, missing: Set[str]) -> RootValues:
    """The values of rank 0's own model: without a source all of them, and otherwise those that the source may lack."""
    tensors = setup.tensors
    # a parameter that a state dict lacks is an error
    allowed = tensors.buffers if isinstance(setup.values.source, Mapping) else tensors.all
    return RootValues(tensors={each.name: each.tensor for each in allowed if each.name in missing and not each.is_meta})


def _from_peft_initialization(setup: Setup, missing: Set[str]) -> RootValues:
    """The values that peft gave to new adapters, and lost when it moved them to meta."""
    if setup.tensors.left_alone:  # a second call: an adapter attached to a sharded base keeps its values
        return RootValues()
    parameters = [each for each in setup.tensors.parameters if each.name in missing]
    made = remade_adapters(setup.model, parameters)
    return RootValues(tensors=made, findings=initialized_adapters(made))


def _from_class(setup: Setup, missing: Set[str]) -> RootValues:
    """The values that a class of transformers computes for parameters that it never saves, as Marian its positions."""
    made: dict[str, torch.Tensor] = {}
    for path, module in setup.model.named_modules():
        unsaved = getattr(module, "_keys_to_ignore_on_save", None) or ()
        if not isinstance(module, PreTrainedModel) or not unsaved:
            continue
        names = missing & {f"{path}.{key}".lstrip(".") for key in unsaved}
        parameters = [each for each in setup.tensors.parameters if each.name in names]
        made |= initialized(setup.model, parameters, module._init_weights)
    return RootValues(tensors=made)


def _from_init_new(setup: Setup, missing: Set[str]) -> RootValues:
    """The values that ``init_new=`` writes into new parameters."""
    parameters = [each for each in setup.tensors.parameters if each.name in missing]
    if setup.values.init_new is None or not parameters:
        return RootValues()
    _refuse_unread(setup, missing)
    return RootValues(tensors=initialized(setup.model, parameters, setup.values.init_new))


def _refuse_unread(setup: Setup, missing: Set[str]) -> None:
    """Refuse to begin a model anew that was made from the folder: it is unlike the one that the folder is read for."""
    unread = []
    for model, prefix in models_of_folder(setup.model, setup.values.folder):
        names = {each.name for each in setup.tensors.parameters if each.name.startswith(prefix)}
        if names and names <= missing:
            unread.append(f"{prefix.removesuffix('.')} ({type(model).__name__})")
    if unread:
        raise CheckpointError(
            f"{setup.values.folder} is read for models of one kind. Others were made from it too, and init_new= would "
            f"begin them anew. Give them their values on rank 0, with from_pretrained in place of meta_model. Those "
            f"that are to begin anew are told by an empty name_or_path of the model:",
            unread,
        )


def match_state_dict(tensors: Sequence[ModelTensor], state: Mapping[str, torch.Tensor]) -> RootValues:
    """Match a state dict with a model, strictly."""
    # all the names of a tied parameter: a state dict has it under each of them
    by_name = {name: tensor for tensor in tensors for name in tensor.names}
    matched = RootValues()
    problems = []
    for key, value in state.items():
        tensor = by_name.get(canonical(key))
        if tensor is None:
            problems.append(f"{key}: the model has no such tensor")
        elif problem := _misfit(tensor, value, matched.tensors.get(tensor.name)):
            problems.append(f"{key}: {problem}")
        elif tensor.name not in matched.tensors:
            matched.tensors[tensor.name] = value
            if value.dtype != tensor.tensor.dtype:
                matched.findings.append(_dtype_finding(tensor, value.dtype))
    if problems:
        raise CheckpointError("The state dict does not fit the model:", problems)
    return matched


def _misfit(tensor: ModelTensor, value: object, first: torch.Tensor | None) -> str | None:
    """Return why a tensor cannot have a value; ``first`` is its value under another of its names."""
    if not isinstance(value, torch.Tensor):
        return f"the state dict has a {type(value).__name__}, which is no tensor"
    if isinstance(value, DTensor):
        return "the state dict has a DTensor, a part of the values: pass its full_tensor()"
    if value.is_meta:
        return "the state dict has it on meta, without values"
    if value.shape != tensor.tensor.shape:
        return f"the state dict has {list(value.shape)}, the model {list(tensor.tensor.shape)}"
    if first is None or first is value or torch.equal(first, value.to(first)):
        return None
    return f"{', '.join(tensor.names)} are one parameter of the model, and two values in the state dict"


def _dtype_finding(tensor: ModelTensor, dtype: torch.dtype) -> Finding:
    return Finding(
        "dtype-cast",
        "info",
        tensor.name,
        f"the state dict has {dtype}, the model {tensor.tensor.dtype}; the model's dtype was kept.",
        "none needed; build the model in the dtype of the checkpoint to avoid the rounding.",
        tensor.nbytes,
    )


def _refuse_missing(setup: Setup, missing: Sequence[ModelTensor], required: int, heads: Sequence[str]) -> None:
    """Refuse a model of which something would stay without values."""
    folder, init_new = setup.values.folder, setup.values.init_new
    if init_new is None and heads and not missing:
        raise CheckpointError(
            f"The folder {folder} holds a head that the model does not have. Build the model with it, or pass "
            f"init_new=fn(module) where the model has a new one of its own, or none:",
            heads,
        )
    if missing:
        fix = "init_new= left them out" if init_new else "pass init_new=fn(module) if they are new"
        where = f"the folder {folder}" if folder is not None else "the source"
        raise CheckpointError(
            f"{len(missing)} of {required} tensors have no values: neither {where} has them nor rank 0; {fix}:",
            [*map(_missing_line, missing), *heads],
        )


def _missing_line(tensor: ModelTensor) -> str:
    line = tensor.line()
    return line if isinstance(tensor.tensor, nn.Parameter) else f"{line}, a buffer: set it on rank 0"


def agree_on_names(ranks: Ranks, root: int, root_values: RootValues, setup: Setup) -> RootValues:
    """Tell every rank which tensors the root gives; one exchange of a bit per tensor.

    Buffers that no source has are given only where a rank has others.
    """
    tensors, sourced = setup.tensors.all, setup.values.source is not None
    bits = "".join("1" if each.name in root_values.tensors else "0" for each in tensors) if ranks.rank == root else ""
    unsaved = {each.name: each for each in setup.tensors.buffers if sourced and not each.persistent}
    digest = hashlib.sha256()
    for each in unsaved.values():
        strided = each.tensor.layout is torch.strided and not each.is_meta
        digest.update(as_buffer(each.tensor.cpu()) if strided else str(each.tensor.layout).encode())
    payload = [bits, digest.hexdigest()]
    answers = ranks.exchange("learn what rank 0 gives", payload, timeout=setup.how.timeout)
    bits_of_root, digest_of_root = answers[ranks.index(root)]
    alike = all(own == digest_of_root for _, own in answers)
    given = [each.name for each, bit in zip(tensors, bits_of_root, strict=True) if bit == "1"]
    return dataclasses.replace(root_values, names=frozenset(each for each in given if not alike or each not in unsaved))
