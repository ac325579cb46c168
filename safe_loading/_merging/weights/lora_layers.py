"""From peft's LoRA layers to updates of their weights. What merging means is what the layer's forward computes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from peft.tuners.lora import layer as lora
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from safe_loading._model.quantized.decode import Fp8Matrix, fp8_matrix_of

from .update import Term, Update
from .variants import MERGE_BEFORE_QUANTIZING, CannotMerge, is_dora, is_known, refuse_impossible, refuse_own_forward


@dataclasses.dataclass(frozen=True, eq=False)
class MatrixPart:
    """A part of a weight that is a matrix: all of it, or one expert.

    Attributes:
        matrix: A view into the weight's own storage.
        update: What is added to it.
        fp8: The same matrix when it is fp8, with its scales.
    """

    matrix: torch.Tensor
    update: Update
    fp8: Fp8Matrix | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class MergeTarget:
    """One weight or bias that a layer's adapters change.

    Attributes:
        owner: The base module that holds it.
        attribute: Its name there.
        tensor: Its data.
        pieces: What is added to it.
    """

    owner: torch.nn.Module
    attribute: str
    tensor: torch.Tensor
    pieces: tuple[MatrixPart, ...]

    @property
    def written(self) -> tuple[str, ...]:
        """The names of the tensors of ``owner`` that merging writes: the weight, and the scales of an fp8 one."""
        scales = (piece.fp8.scales_name for piece in self.pieces if piece.fp8 is not None)
        return (self.attribute, *dict.fromkeys(name for name in scales if name))


def is_blocked(layer: torch.nn.Module, names: Sequence[str]) -> bool:
    """Return whether :func:`targets` knows this kind of layer with these adapters; otherwise it is peft's to merge."""
    if type(layer) not in _BUILDERS:
        return False
    return all(is_known(layer.lora_variant.get(name)) for name in names)  # type: ignore[union-attr,operator]  # a LoraLayer


def adapters_of(layer: Any) -> frozenset[str]:
    """Return the names of the adapters that a LoRA layer has."""
    return frozenset((*layer.lora_A.keys(), *layer.lora_embedding_A.keys()))


def targets(layer: Any, names: Sequence[str]) -> list[MergeTarget]:
    """Return what merging the adapters ``names``, in this order, into ``layer`` changes.

    Args:
        layer: One that :func:`is_blocked` said yes to. Layers nested in it as ``base_layer`` are not included.
        names: Adapters that the layer has.

    Raises:
        CannotMerge: The reason and the fix.
    """
    refuse_impossible(layer, names)
    found = _BUILDERS[type(layer)](layer, names)
    for target in found:
        for piece in target.pieces:
            _check_shapes(target, piece)
    return found


def _factors(layer: Any, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    return whole(layer.lora_A[name].weight.data), whole(layer.lora_B[name].weight.data)


def _magnitude(layer: Any, name: str) -> torch.Tensor | None:
    if not is_dora(layer.lora_variant.get(name)):
        return None
    return whole(layer.lora_magnitude_vector[name].weight.data).reshape(-1)


def linear_terms(layer: Any, names: Sequence[str]) -> list[Term]:
    """Return what adapters add to the weight of a Linear, whatever that is stored as."""
    terms = []
    for name in names:
        a, b = _factors(layer, name)
        left, right = (a.T, b.T) if layer.fan_in_fan_out else (b, a)
        terms.append(Term(left, right, layer.scaling[name], _magnitude(layer, name), name))
    return terms


def _linear(layer: Any, names: Sequence[str]) -> list[MergeTarget]:
    base, terms, axis = layer.get_base_layer(), linear_terms(layer, names), 1 if layer.fan_in_fan_out else 0
    return [_whole(base, "weight", tensor_of(base, "weight"), terms, axis=axis), *_bias(layer, base, names)]


def _embedding(layer: Any, names: Sequence[str]) -> list[MergeTarget]:
    if layer.input_fns or layer.output_fns:
        raise CannotMerge("its vocabulary is split over ranks (tensor parallel). Merge before the model is sharded")
    base, terms = layer.get_base_layer(), []
    refuse_own_forward(base)
    for name in names:
        left, right = whole(layer.lora_embedding_A[name].data).T, whole(layer.lora_embedding_B[name].data).T
        terms.append(Term(left, right, layer.scaling[name], _magnitude(layer, name), name))
    return [_whole(base, "weight", tensor_of(base, "weight"), terms, axis=1)]


def _conv(layer: Any, names: Sequence[str]) -> list[MergeTarget]:
    base, terms = layer.get_base_layer(), []
    if base.groups > 1:
        raise CannotMerge(
            f"its convolution has groups={base.groups}, and lora_A mixes the channels of all groups, which the grouped "
            f"weight cannot hold. Leave it out of target_modules, or keep the adapter"
        )
    if any(size != 1 for size in base.kernel_size) and (
        any(step != 1 for step in base.dilation) or (base.padding_mode != "zeros" and base.padding not in (0, "valid"))
    ):
        raise CannotMerge(
            f"its convolution has dilation={base.dilation}, padding_mode={base.padding_mode!r}, and peft's lora_A has "
            f"neither, so no merged weight computes what the layer computes. Keep the adapter"
        )
    weight = tensor_of(base, "weight")
    # in the order in which the weight lies in memory, so that a channels_last one is a matrix of rows too
    order = [0, *sorted(range(1, weight.dim()), key=weight.stride, reverse=True)]
    matrix = weight.permute(order)
    if not matrix[0].is_contiguous():
        raise CannotMerge(f"its weight has strides {weight.stride()}. Call .contiguous() on it first")
    for name in names:
        a, b = _factors(layer, name)
        terms.append(
            Term(b.flatten(1), a.permute(order).flatten(1), layer.scaling[name], _magnitude(layer, name), name)
        )
    matrix = matrix.view(len(matrix), -1)
    update = Update((matrix.shape[0], matrix.shape[1]), tuple(terms))
    return [MergeTarget(base, "weight", weight, (MatrixPart(matrix, update),)), *_bias(layer, base, names)]


def _attention(layer: Any, names: Sequence[str]) -> list[MergeTarget]:
    base, out = layer.get_base_layer(), layer.get_base_layer().out_proj
    terms = [Term(b, a, layer.scaling[n], name=n) for n in names for a, b in [_factors(layer, n)]]
    found = [_whole(base, "in_proj_weight", tensor_of(base, "in_proj_weight"), terms, axis=0)]
    if set(out.active_adapters) != set(layer.active_adapters):
        raise CannotMerge("its out_proj has other active adapters than itself. Call model.set_adapter(...) again")
    terms = []
    for name in names:
        a, b = _factors(out, name)
        # out_proj has the fan_in_fan_out of the config, which a Conv1D elsewhere in the model sets for all of them.
        left, right = (a.T, b.T) if out.fan_in_fan_out else (b, a)
        # peft 0.21 adds out_proj's delta twice, in forward as in merge: MultiheadAttention.merge() adds it and then
        # calls out_proj.merge(). The adapter was trained with that (huggingface/peft#3774).
        terms.append(Term(left, right, 2 * out.scaling[name], name=name))
    inner = out.get_base_layer()
    return [*found, _whole(inner, "weight", tensor_of(inner, "weight"), terms, axis=0), *_bias(out, inner, names)]


def _parameter(layer: Any, names: Sequence[str]) -> list[MergeTarget]:
    base, attribute = layer.get_base_layer(), layer.parameter_name
    weight = tensor_of(base, attribute)
    if weight.dim() == 2:
        terms = [Term(b, a, layer.scaling[n], name=n) for n in names for a, b in [_factors(layer, n)]]
        return [_whole(base, attribute, weight, terms, axis=0)]
    pieces = []
    for expert in range(weight.shape[0]):
        terms = []
        for name in names:
            a, b = _factors(layer, name)
            a = a.reshape(layer.num_experts, -1, a.shape[-1])[expert]
            b = b.reshape(b.shape[0], -1, layer.num_experts)[:, :, expert]
            left, right = (b, a) if layer._did_swap_in_out_features else (a.T, b.T)
            terms.append(Term(left, right, layer.scaling[name], name=name))
        pieces.append(MatrixPart(weight[expert], Update((weight.shape[1], weight.shape[2]), tuple(terms))))
    return [MergeTarget(base, attribute, weight, tuple(pieces))]


def _bias(layer: Any, base: Any, names: Sequence[str]) -> list[MergeTarget]:
    """Return what lora_bias=True adds to the bias: scaling * the bias of lora_B."""
    having = [name for name in names if layer.lora_bias.get(name)]
    if not having:
        return []
    if getattr(base, "bias", None) is None:
        raise CannotMerge(
            f"adapter {having[0]!r} has lora_bias=True, and the {type(base).__name__} has no bias to add it to. Give "
            f"it one first: layer.bias = torch.nn.Parameter(torch.zeros(layer.weight.shape[0]))"
        )
    after = names[names.index(having[0]) + 1 :]
    if any(_magnitude(layer, name) is not None for name in after):
        raise CannotMerge(f"a DoRA adapter follows {having[0]!r}, which has lora_bias=True. Merge that one last")
    bias, (first,) = shard_of(tensor_of(base, "bias"))
    one = torch.ones((1, 1), dtype=torch.float64)
    terms = []
    for name in having:
        left = whole(layer.lora_B[name].bias.data)[first : first + len(bias)].unsqueeze(1)
        terms.append(Term(left, one, layer.scaling[name], name=name))
    return [MergeTarget(base, "bias", bias, (MatrixPart(bias.unsqueeze(1), Update((len(bias), 1), tuple(terms))),))]


def _whole(base: Any, attribute: str, weight: torch.Tensor, terms: list[Term], *, axis: int) -> MergeTarget:
    if weight.dim() != 2:
        raise CannotMerge(f"its {attribute} has the shape {list(weight.shape)}, not two dimensions (ZeRO-3? Gather it)")
    try:
        fp8 = fp8_matrix_of(base, attribute)
    except NotImplementedError as error:
        raise CannotMerge(f"{error}. {MERGE_BEFORE_QUANTIZING}") from error
    update = Update((weight.shape[0], weight.shape[1]), tuple(terms), axis)
    target = MergeTarget(base, attribute, weight, (MatrixPart(weight, update, fp8),))
    if not isinstance(weight, DTensor):
        return target
    _check_shapes(target, target.pieces[0])
    shard, offsets = shard_of(weight)
    if update.has_magnitude and shard.shape[1 - axis] < weight.shape[1 - axis]:
        raise CannotMerge(
            f"its {attribute} is split along dimension {1 - axis}, along which DoRA takes norms. Save the adapter, and "
            f"merge it with merge_lora_checkpoint"
        )
    rows, columns = (slice(at, at + size) for at, size in zip(offsets, shard.shape, strict=True))
    parts = tuple(
        dataclasses.replace(
            term,
            left=term.left[rows],
            right=term.right[:, columns],
            magnitude=None if term.magnitude is None else term.magnitude[(rows, columns)[axis]],
        )
        for term in terms
    )
    update = Update((shard.shape[0], shard.shape[1]), parts, axis)
    return MergeTarget(base, attribute, shard, (MatrixPart(shard, update),))


def tensor_of(module: Any, attribute: str) -> torch.Tensor:
    """Return the data of a parameter (MultiheadAttention's may be a plain tensor)."""
    return getattr(module, attribute).data  # type: ignore[no-any-return]  # a tensor


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return a small tensor of an adapter, gathered where it is spread over ranks (a collective)."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def shard_of(weight: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...]]:
    """Return the part of a weight that this rank holds, in its own storage, and where it begins in each dimension.

    Raises:
        CannotMerge: It is spread in another way than in one piece for each rank.
    """
    if not isinstance(weight, DTensor):
        return weight, (0,) * weight.dim()
    if any(type(placement) not in (Shard, Replicate) for placement in weight.placements):
        raise CannotMerge(
            f"its weight is a DTensor with the placements {weight.placements}, not Shard or Replicate. Save the "
            f"adapter, and merge it with merge_lora_checkpoint"
        )
    _, offsets = compute_local_shape_and_global_offset(weight.shape, weight.device_mesh, weight.placements)
    return weight.to_local(), tuple(offsets)


def _check_shapes(target: MergeTarget, piece: MatrixPart) -> None:
    rows, columns = piece.update.shape
    for term in piece.update.terms:
        rank = term.left.shape[1]
        if term.left.shape != (rows, rank) or term.right.shape != (rank, columns):
            raise CannotMerge(
                f"its {target.attribute} is {list(target.tensor.shape)}, and its adapter's delta "
                f"{term.left.shape[0]} x {term.right.shape[1]}. Load the adapter onto the base that it was trained on"
            )


_BUILDERS: dict[type, Callable[[Any, Sequence[str]], list[MergeTarget]]] = {
    lora.Linear: _linear,
    lora.Embedding: _embedding,
    lora.Conv1d: _conv,
    lora.Conv2d: _conv,
    lora.Conv3d: _conv,
    lora.MultiheadAttention: _attention,
    lora.ParamWrapper: _parameter,
}
