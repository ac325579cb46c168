"""From peft's LoRA layers to updates of their weights. The layer's forward defines the merged weight."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from peft.tuners.lora import layer as lora
from peft.utils.other import TrainableTokensWrapper
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from safe_loading._core.engines import splits_vocabulary, swaps_features
from safe_loading._model.formats.fp8 import Fp8Matrix, fp8_matrix_of
from safe_loading._model.peft_layers import LoraModule, TunerModule, is_lora_layer, is_tuner_layer

from .update import Term, Update
from .variants import (
    MERGE_BEFORE_QUANTIZING,
    CannotMergeError,
    is_dora,
    is_known,
    pads_with_values,
    refuse_impossible,
    refuse_own_forward,
    why_other_product,
)

OVER_TOKENS = (
    "its LoRA lies around rows of the same weight that are trained as tokens (of the tied embedding), which peft loses "
    "when it merges. Write the trained rows into the embedding of the base, leave them out of the adapter "
    "(trainable_token_indices in adapter_config.json, trainable_tokens_delta in its file), and merge that"
)


@dataclasses.dataclass(frozen=True, eq=False)
class MatrixUpdate:
    """A matrix within a weight (all of it, or one expert), and its update."""

    matrix: torch.Tensor  # a view into the weight's own storage
    update: Update
    fp8: Fp8Matrix | None = None  # the same matrix with its scales when it is fp8


@dataclasses.dataclass(frozen=True, eq=False)
class MergeTarget:
    """One weight or bias that a layer's adapters change: ``owner.attribute``, whose data are ``tensor``."""

    owner: torch.nn.Module
    attribute: str
    tensor: torch.Tensor
    matrices: tuple[MatrixUpdate, ...]

    @property
    def written(self) -> tuple[str, ...]:
        """The names of the tensors of ``owner`` that merging writes: the weight, and the scales of an fp8 one."""
        scales = (matrix.fp8.scales_name for matrix in self.matrices if matrix.fp8 is not None)
        return (self.attribute, *dict.fromkeys(name for name in scales if name))

    def moved_to(self, tensor: torch.Tensor) -> MergeTarget:
        """Return the same for a copy of the tensor that has the same strides."""
        moved = []
        for part in self.matrices:
            view = part.matrix
            offset = tensor.storage_offset() + view.storage_offset() - self.tensor.storage_offset()
            matrix = tensor.as_strided(view.size(), view.stride(), offset)
            moved.append(dataclasses.replace(part, matrix=matrix))
        return dataclasses.replace(self, tensor=tensor, matrices=tuple(moved))


def is_blocked(layer: LoraModule, names: Sequence[str]) -> bool:
    """Return whether :func:`merge_targets` knows this kind of layer with these adapters; if not, peft merges it."""
    # Exact types: a subclass, as peft's quantized layers and a user's own, may compute something else.
    return _kind_of(layer) in _BUILDERS and all(is_known(layer.lora_variant.get(name)) for name in names)


def _kind_of(layer: LoraModule) -> type:
    """Return the class of a layer; of one that is a unit of FSDP2 the class that it had before."""
    kind = type(layer)
    return kind.__mro__[2] if issubclass(kind, FSDPModule) else kind  # FSDP<name>, FSDPModule, <name>


def merge_targets(layer: LoraModule, names: Sequence[str]) -> list[MergeTarget]:
    """Return the weights that merging the adapters ``names``, in this order, into a layer changes.

    :func:`is_blocked` must be true for it. Layers nested in it as ``base_layer`` are not included.
    """
    refuse_impossible(layer, names)
    if tokens_inside(layer) is not None:
        raise CannotMergeError(OVER_TOKENS)
    if (reason := why_other_product(layer.get_base_layer())) is not None:
        raise CannotMergeError(reason)
    targets = _BUILDERS[_kind_of(layer)](layer, names)
    for target in targets:
        for matrix in target.matrices:
            _check_shapes(target, matrix.update)
    return targets


def tokens_inside(layer: TunerModule) -> TunerModule | None:
    """Return the layer of trained tokens that a LoRA layer is put around; None where it is around the base's own.

    peft does so with the head of a tied embedding whose tokens are trained.
    """
    inner: object = getattr(layer, "base_layer", None)
    while is_lora_layer(inner):
        inner = inner.base_layer
    tokens: object = inner.token_adapter if isinstance(inner, TrainableTokensWrapper) else None
    return tokens if is_tuner_layer(tokens) else None


def linear_terms(layer: LoraModule, names: Sequence[str], *, transposed: bool) -> list[Term]:
    """Return the terms that adapters add to the weight of a linear layer, in any storage format."""
    terms = []
    for name in names:
        a, b = _factors(layer, name)
        left, right = (a.T, b.T) if transposed else (b, a)
        terms.append(Term(left, right, layer.scaling[name], _magnitude(layer, name), name))
    return terms


def data_of(module: torch.nn.Module, attribute: str = "weight") -> torch.Tensor:
    """Return the data of a parameter (in a MultiheadAttention, between merge and unmerge, of a plain tensor)."""
    tensor: torch.Tensor = getattr(module, attribute)
    return tensor.data


def gathered(tensor: torch.Tensor) -> torch.Tensor:
    """Return a small tensor of an adapter, gathered if it is spread over ranks (a collective)."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local_shard(weight: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...]]:
    """Return this rank's shard of a weight, in its own storage, and where it begins in each dimension."""
    if not isinstance(weight, DTensor):
        return weight, (0,) * weight.dim()
    if any(type(placement) not in (Shard, Replicate) for placement in weight.placements):
        raise CannotMergeError(
            f"its weight is a DTensor with the placements {weight.placements}, not Shard or Replicate. Merge before "
            f"the model is sharded",
            or_on_disk=True,
        )
    _, offsets = compute_local_shape_and_global_offset(weight.shape, weight.device_mesh, weight.placements)
    return weight.to_local(), tuple(offsets)


def _factors(layer: LoraModule, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    return gathered(data_of(layer.lora_A[name])), gathered(data_of(layer.lora_B[name]))


def _magnitude(layer: LoraModule, name: str) -> torch.Tensor | None:
    if not is_dora(layer.lora_variant.get(name)):
        return None
    return gathered(data_of(layer.lora_magnitude_vector[name])).reshape(-1)


def _linear(layer: LoraModule, names: Sequence[str]) -> list[MergeTarget]:
    base, transposed = layer.get_base_layer(), bool(layer.fan_in_fan_out)
    terms = linear_terms(layer, names, transposed=transposed)
    # DoRA has one magnitude for each output; those are the columns of a weight that is stored transposed.
    return [_matrix_target(base, "weight", terms, axis=1 if transposed else 0), *_bias(layer, base, names)]


def _embedding(layer: LoraModule, names: Sequence[str]) -> list[MergeTarget]:
    if splits_vocabulary(layer):
        raise CannotMergeError(
            "its vocabulary is split over ranks (tensor parallel). Merge before the model is sharded"
        )
    base, terms = layer.get_base_layer(), []
    refuse_own_forward(base)
    # The weight has a row for each token, so lora_A, which takes tokens to ranks, is on the left here.
    for name in names:
        left, right = gathered(layer.lora_embedding_A[name].data).T, gathered(layer.lora_embedding_B[name].data).T
        terms.append(Term(left, right, layer.scaling[name], _magnitude(layer, name), name))
    return [_matrix_target(base, "weight", terms, axis=1)]


def _conv(layer: LoraModule, names: Sequence[str]) -> list[MergeTarget]:
    base: Any = layer.get_base_layer()  # a _ConvNd, whose attributes differ from class to class in torch's stubs
    _check_conv(base)
    weight = data_of(base)
    # in the order in which the weight lies in memory, so that a channels_last one is a matrix of rows too
    order = [0, *sorted(range(1, weight.dim()), key=weight.stride, reverse=True)]
    matrix = weight.permute(order)
    if not matrix[0].is_contiguous():
        raise CannotMergeError(f"its weight has strides {weight.stride()}. Call .contiguous() on it first")
    terms = []
    for name in names:
        a, b = _factors(layer, name)
        left, right = b.flatten(1), a.permute(order).flatten(1)
        terms.append(Term(left, right, layer.scaling[name], _magnitude(layer, name), name))
    matrix = matrix.view(len(matrix), -1)
    update = Update((matrix.shape[0], matrix.shape[1]), tuple(terms))
    return [MergeTarget(base, "weight", weight, (MatrixUpdate(matrix, update),)), *_bias(layer, base, names)]


def _check_conv(base: Any) -> None:
    if base.groups > 1:
        raise CannotMergeError(
            f"its convolution has groups={base.groups}, and lora_A mixes the channels of all groups, which the grouped "
            f"weight cannot hold. Leave it out of target_modules, or keep the adapter"
        )
    pairs = zip(base.kernel_size, base.dilation, strict=True)
    lacks = [f"dilation={base.dilation}"] if any(size > 1 and step > 1 for size, step in pairs) else []
    lacks += [f"padding_mode={base.padding_mode!r}"] if pads_with_values(base) else []
    if lacks:
        raise CannotMergeError(
            f"its convolution has {' and '.join(lacks)}, which peft's lora_A has not, so no merged weight computes "
            f"what the layer computes. Keep the adapter"
        )


def _attention(layer: LoraModule, names: Sequence[str]) -> list[MergeTarget]:
    base: Any = layer.get_base_layer()  # a MultiheadAttention, whose out_proj is a LoRA layer too
    out: LoraModule = base.out_proj
    terms = linear_terms(layer, names, transposed=False)
    targets = [_matrix_target(base, "in_proj_weight", terms, axis=0)]
    if set(out.active_adapters) != set(layer.active_adapters):
        raise CannotMergeError("its out_proj has other active adapters than itself. Call model.set_adapter(...) again")
    # out_proj has the fan_in_fan_out of the config, which a Conv1D elsewhere in the model sets for all of them.
    terms = linear_terms(out, names, transposed=bool(out.fan_in_fan_out))
    # peft 0.21 adds out_proj's delta twice, in forward as in merge: MultiheadAttention.merge() adds it and then calls
    # out_proj.merge(). The adapter was trained with that (huggingface/peft#3774).
    terms = [dataclasses.replace(term, scaling=2 * term.scaling) for term in terms]
    inner = out.get_base_layer()
    return [*targets, _matrix_target(inner, "weight", terms, axis=0), *_bias(out, inner, names)]


def _parameter(layer: LoraModule, names: Sequence[str]) -> list[MergeTarget]:
    wrapper: Any = layer  # a ParamWrapper
    base, attribute = layer.get_base_layer(), wrapper.parameter_name
    weight = data_of(base, attribute)
    if weight.dim() == 2:
        return [_matrix_target(base, attribute, linear_terms(layer, names, transposed=False), axis=0)]
    experts = []
    for expert in range(weight.shape[0]):
        terms = []
        for name in names:
            a, b = _factors(layer, name)
            # peft lays the ranks of the experts one after another in lora_A, and interleaves them in lora_B
            a = a.reshape(wrapper.num_experts, -1, a.shape[-1])[expert]
            b = b.reshape(b.shape[0], -1, wrapper.num_experts)[:, :, expert]
            # with one expert peft takes no account of the order of its features
            left, right = (b, a) if swaps_features(wrapper) or wrapper.num_experts == 1 else (a.T, b.T)
            terms.append(Term(left, right, layer.scaling[name], name=name))
        experts.append(MatrixUpdate(weight[expert], Update((weight.shape[1], weight.shape[2]), tuple(terms))))
    return [MergeTarget(base, attribute, weight, tuple(experts))]


def without_bias(name: str, base: torch.nn.Module) -> CannotMergeError:
    """Return the refusal of an adapter whose trained bias has no place in the layer, with the road to one."""
    return CannotMergeError(
        f"adapter {name!r} has lora_bias=True, and the {type(base).__name__} has no bias to add it to. Keep the "
        f"adapter, or give it one of zeros first: layer.bias = torch.nn.Parameter(torch.zeros(layer.weight.shape[0])); "
        f"in a class of transformers by its config, so that a checkpoint keeps it, for Llama's attention "
        f"from_pretrained(base, attention_bias=True).save_pretrained(new_base)"
    )


def _bias(layer: LoraModule, base: torch.nn.Module, names: Sequence[str]) -> list[MergeTarget]:
    """Return the merge of lora_bias=True into the bias, which adds scaling * the bias of lora_B."""
    with_bias = [name for name in names if layer.lora_bias.get(name)]
    if not with_bias:
        return []
    if getattr(base, "bias", None) is None:
        raise without_bias(with_bias[0], base)
    # A DoRA adapter scales what the adapters before it added to the output, the bias of lora_B included.
    after = names[names.index(with_bias[0]) + 1 :]
    if any(_magnitude(layer, name) is not None for name in after):
        raise CannotMergeError(
            f"a DoRA adapter follows {with_bias[0]!r}, which has lora_bias=True. Merge that one last"
        )
    # FSDP2 shards a bias along its only dimension, as it does the rows of the weight.
    bias, (first,) = local_shard(data_of(base, "bias"))
    one = torch.ones((1, 1), dtype=torch.float64)
    terms = []
    for name in with_bias:
        left = gathered(data_of(layer.lora_B[name], "bias"))[first : first + len(bias)].unsqueeze(1)
        terms.append(Term(left, one, layer.scaling[name], name=name))
    column = MatrixUpdate(bias.unsqueeze(1), Update((len(bias), 1), tuple(terms)))
    return [MergeTarget(base, "bias", bias, (column,))]


def _matrix_target(base: torch.nn.Module, attribute: str, terms: list[Term], *, axis: int) -> MergeTarget:
    """Return a weight that is one matrix, as the shard of this rank if it is spread over ranks."""
    weight = data_of(base, attribute)
    if weight.dim() != 2:
        raise CannotMergeError(
            f"its {attribute} has the shape {list(weight.shape)}, not two dimensions. Merge what ZeRO-3 has spread in "
            f"`with deepspeed.zero.GatheredParameters(list(model.parameters()), modifier_rank=0):`, on every rank"
        )
    try:
        fp8 = fp8_matrix_of(base, attribute)
    except NotImplementedError as error:
        raise CannotMergeError(f"{error}. {MERGE_BEFORE_QUANTIZING}") from error
    update = Update((weight.shape[0], weight.shape[1]), tuple(terms), axis)
    target = MergeTarget(base, attribute, weight, (MatrixUpdate(weight, update, fp8),))
    if not isinstance(weight, DTensor):
        return target
    _check_shapes(target, update)  # of the whole, as slices of factors of any shape would fit the shard
    shard, offsets = local_shard(weight)
    if update.has_magnitude and shard.shape[1 - axis] < weight.shape[1 - axis]:
        raise CannotMergeError(
            f"its {attribute} is split along dimension {1 - axis}, along which DoRA takes norms. Merge before the "
            f"model is sharded",
            or_on_disk=True,
        )
    rows, columns = (slice(at, at + size) for at, size in zip(offsets, shard.shape, strict=True))
    local_terms = []
    for term in terms:
        magnitude = None if term.magnitude is None else term.magnitude[(rows, columns)[axis]]
        local_terms.append(Term(term.left[rows], term.right[:, columns], term.scaling, magnitude, term.name))
    update = Update((shard.shape[0], shard.shape[1]), tuple(local_terms), axis)
    return MergeTarget(base, attribute, shard, (MatrixUpdate(shard, update),))


def _check_shapes(target: MergeTarget, update: Update) -> None:
    rows, columns = update.shape
    for term in update.terms:
        rank = term.left.shape[1]
        if term.left.shape != (rows, rank) or term.right.shape != (rank, columns):
            raise CannotMergeError(
                f"its {target.attribute} is {list(target.tensor.shape)}, and its adapter's delta "
                f"{term.left.shape[0]} x {term.right.shape[1]}. Load the adapter onto the base that it was trained on"
            )


_BUILDERS: dict[type, Callable[[LoraModule, Sequence[str]], list[MergeTarget]]] = {
    lora.Linear: _linear,
    lora.Embedding: _embedding,
    lora.Conv1d: _conv,
    lora.Conv2d: _conv,
    lora.Conv3d: _conv,
    lora.MultiheadAttention: _attention,
    lora.ParamWrapper: _parameter,
}
