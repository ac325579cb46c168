"""Tensor parallelism by the plan of a model's class: checked before anything is touched, then applied over meta.

transformers' styles split the parameters and compute with the parts; ``fully_shard`` then shards each part. What the
plan leaves whole becomes a DTensor too, so that all parameters are on one mesh: ``clip_grad_norm_`` takes no two.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from safe_loading._core.engines import require_for
from safe_loading._core.names import canonical, method_name, nearest, with_stars
from safe_loading._model.formats.four_bit import is_four_bit
from safe_loading._model.formats.four_bit_on_meta import packed_from
from safe_loading._model.peft_layers import without_peft_levels
from safe_loading._model.tensors import ModelTensor, walk_modules
from safe_loading.errors import ArgumentError

from .added_after_wrap import is_adapter_layer
from .checkpoint_folder import base_of
from .fsdp2 import base_of_adapters
from .fsdp_units import ShardingUnit, can_run
from .packed_chunks import tell_checkpoints
from .setup import Setup, TensorRoles
from .split_at_prepare import leave_split_models
from .split_experts import (
    EXPERTS,
    LOCAL,
    BiasOfParts,
    OwnOutput,
    added_to_in_place,
    apart_problems,
    has_bias_of_parts,
    parts_problem,
    plan_of,
)
from .tensor_split import TensorSplit, pieces

# transformers' names of its styles
_OF_LINEAR = ("colwise", "rowwise", "colwise_gather_output", "colwise_rep", "rowwise_split_input", "rowwise_rep")
_OF_EMBEDDING = ("embedding_rowwise", "embedding_colwise")
# What goes in and comes out is whole, so that the module may be whole as well.
_WHOLE_OUTSIDE = ("colwise_gather_output", "colwise_rep", "rowwise_split_input", "rowwise_rep", *_OF_EMBEDDING)
_SUMMED = "replicated_with_grad_allreduce"  # computes with this rank's heads, of which its gradient is a sum
_WHOLE = (_SUMMED, "replicate")
_IDENTITY = "moe_identity_expert"  # an expert that gives what it gets, a part of it on each rank
# Multi-head latent attention: of what a whole projection gives, all heads turn a part, each rank its own heads.
_LATENT = "mla_kv_a_proj"
_OF_MODULES = (EXPERTS, LOCAL, _IDENTITY, _LATENT)
_AROUND_LATENT = (
    "q_a_proj",
    "q_a_layernorm",
    "kv_a_layernorm",
    "indexer",
)  # before split projections, which sum their gradients
# The factor of LoRA that is on the split side of its layer; the other one is whole.
_SPLIT_FACTOR = {"colwise": "lora_B", "rowwise": "lora_A"}
_MORE_THAN_LORA = ("modules_to_save", "trainable_token_indices", "target_parameters", "lora_bias")
_WITHOUT = (
    "Leave 'tp' out of the mesh, or tp_size= out of accelerate's ParallelismConfig, and FSDP shards the model over all "
    "ranks"
)

PlanKey = Callable[[str], str]  # from a name in the model to the name that a plan would have for it


@dataclasses.dataclass(frozen=True)
class WholeParameters:
    """A style, as transformers has them, of a module that computes with its whole parameters."""

    gradient: Placement  # Partial where the module computes with a part of what its parameters act on

    def install_forward(self, module: nn.Module, mesh: DeviceMesh) -> None:
        """Let the module compute with plain tensors."""
        _run_with_plain_tensors(module, [(module, self)])

    def plain(self, module: nn.Module) -> dict[str, DTensor]:
        """Return a module's parameters, whose places plain tensors have taken."""
        parameters: dict[str, Any] = module._parameters
        kept = {name: each for name, each in parameters.items() if isinstance(each, DTensor)}
        parameters.update({name: each.to_local(grad_placements=[self.gradient]) for name, each in kept.items()})
        return kept


@dataclasses.dataclass(frozen=True)
class LatentKeys(WholeParameters):
    """The style of a whole projection of which each rank's heads turn a part, so that its gradient is a sum."""

    config: Any  # transformers' style reads the size of that part in it

    def install_forward(self, module: nn.Module, mesh: DeviceMesh) -> None:
        """Let the module compute with plain tensors, and sum the gradients of the part that all heads share."""
        super().install_forward(module, mesh)
        module.__dict__["config"] = self.config
        _style(_LATENT).install_forward(module, mesh)


def _run_with_plain_tensors(runs: nn.Module, computing: Sequence[tuple[nn.Module, WholeParameters]]) -> None:
    """Let modules have plain tensors while ``runs`` does its forward pass."""
    forward = runs.forward

    @functools.wraps(forward)  # trainers read the signature of the root's
    def with_plain_tensors(*args: Any, **options: Any) -> Any:
        kept = [(module._parameters, style.plain(module)) for module, style in computing]
        try:
            return forward(*args, **options)
        finally:
            for parameters, own in kept:
                untyped: dict[str, Any] = parameters  # torch's stubs know no parameter that is a DTensor
                untyped.update(own)

    runs.__dict__["forward"] = with_plain_tensors


def split_model(model: nn.Module, tensors: TensorRoles, mesh: DeviceMesh) -> TensorSplit:
    """Return how a model is split over the dimension ``mesh``, by the plan of its class; nothing is touched.

    Raises ArgumentError, with every problem, where the plan or the model's adapters cannot be followed.
    """
    require_for("Tensor parallelism", "transformers", "5.23")
    base, prefix = base_of(model)
    plan = plan_of(base)
    if not plan:
        raise ArgumentError(
            f"{type(base).__name__} has no plan for tensor parallelism (base_model_tp_plan of its config). {_WITHOUT}."
        )

    def key(name: str) -> str:
        return with_stars(without_peft_levels(name).removeprefix(prefix)) if name.startswith(prefix) else ""

    styles, parameters = _styles(model, plan, key), tensors.sharded
    # stacked experts have a style apart from their module
    apart = {each.name: plan[key(each.name)] for each in parameters if key(each.name) in plan}
    problems = apart_problems(parameters, styles, apart)
    problems += [
        f"{each.name} is kept whole: leave ignored_params= out"
        if each.tensor.ndim
        else f"{each.name} is a scalar, which no rank may train alone"
        for each in tensors.ignored
    ]
    problems += [*_adapter_problems(model), *_dropout_problems(base), *_unsaid(model, styles)]
    for path, module in walk_modules(model):
        problems += _module_problems(canonical(path), module, styles.get(module))
    placements: dict[str, Shard | _StridedShard] = {}
    undivided = [] if problems else _undivided(styles, mesh)
    for module in undivided:
        del styles[module]
    if not problems:
        placements, problems = _placements(parameters, styles, apart, mesh)
        problems += _head_problems(model, placements, mesh.size())
    if problems:
        alike = [*dict.fromkeys(map(with_stars, problems))]  # those of all layers are one
        raise ArgumentError(f"Tensor parallelism cannot split this {type(base).__name__}. {_WITHOUT}:", alike)
    computing = dict.fromkeys([*(module for parameter in parameters for module, _ in parameter.places), *styles])
    names = tuple(canonical(path) for path, module in walk_modules(model) if module in undivided)
    styled = [(each, _computing(each, styles.get(each), base)) for each in computing]
    styled += [(each, OwnOutput()) for each in added_to_in_place(model)]
    return TensorSplit(mesh.size(), placements, styled, names)


def _styles(model: nn.Module, plan: Mapping[str, str], key: PlanKey) -> dict[nn.Module, str]:
    """Return the name of the style of each module that has one."""
    styles: dict[nn.Module, str] = {}
    layers: dict[str, str] = {}  # the style of the layer that each adapter layer is around
    for path, module in walk_modules(model):
        name = canonical(path)
        layer, _, factor = name.rpartition(".")[0].rpartition(".")
        style = plan.get(key(name))
        if layer in layers:
            style = layers[layer] if _SPLIT_FACTOR.get(layers[layer]) == factor else None
        if style is not None and is_adapter_layer(module):
            layers[name] = style
        elif style is not None:
            styles[module] = style
    return styles


def _style(name: str) -> Any:
    """Return transformers' style of a name."""
    from transformers.distributed import tensor_parallel as engine  # not in every version

    untyped: Any = engine  # it exports none of its names
    return untyped.ALL_PARALLEL_STYLES[name]


def _computing(module: nn.Module, name: str | None, base: Any) -> Any:
    """Return how a module computes; one without a style, or that it leaves whole, with whole parameters."""
    if name == _LATENT:
        return LatentKeys(Replicate(), base.config.get_text_config())
    if name is None or name in _WHOLE:
        return WholeParameters(Partial() if name == _SUMMED else Replicate())
    return BiasOfParts(_style(name)) if name == EXPERTS and has_bias_of_parts(module) else _style(name)


def _adapter_problems(model: nn.Module) -> list[str]:
    """Return the adapters of which no engine says how their parts compute."""
    problems = []
    configs: Mapping[str, Any] = getattr(model, "peft_config", {})
    for name, config in configs.items():
        kind = method_name(config.peft_type)
        more = "".join(f" with {option}" for option in _MORE_THAN_LORA if getattr(config, option, None))
        if kind != "LORA" or more:
            problems.append(f"the adapter {name} is {kind}{more}: attach LoRA alone")
    variants = (
        f"{canonical(path)} has a variant of LoRA ({type(variant).__name__}): attach LoRA alone"
        for path, module in walk_modules(model)
        for variant in (getattr(module, "lora_variant", None) or {}).values()
    )
    return [*problems, *variants]


def _dropout_problems(base: nn.Module) -> list[str]:
    """Return the dropouts and the noise of a config that fall on values that all ranks share, other ones on each."""
    config: Any = getattr(base, "config", None)
    texts = {id(each): each for each in (config, getattr(config, "text_config", None)) if each is not None}
    drawn = {"drop": "drops at other places", "jitter": "draws other noise"}
    found = {
        name: (value, does)
        for each in texts.values()
        for name, value in each.to_dict().items()
        for part, does in drawn.items()
        if part in name
    }
    # the heads of attention are split, and each of them draws for itself
    return [
        f"{name}={value} of the config {does} on each rank: set it to 0"
        for name, (value, does) in found.items()
        if "att" not in name and "classifier" not in name and isinstance(value, float) and value > 0
    ]


def _unsaid(model: nn.Module, styles: Mapping[nn.Module, str]) -> list[str]:
    """Return the modules among split layers of which the plan does not say whether they get a part or the whole.

    With a part, their gradients would have to be summed over the ranks.
    """
    names = {canonical(path): module for path, module in walk_modules(model)}
    split = {without_peft_levels(name) for name, module in names.items() if styles.get(module) in _SPLIT_FACTOR}
    among = {name.rpartition(".")[0] for name in split if ".lora_" not in name}
    latent = {without_peft_levels(name) for name, module in names.items() if styles.get(module) == _LATENT}
    in_adapters = {name for name, module in names.items() if is_adapter_layer(module)}
    known = {f"{name.rpartition('.')[0]}.{each}" for name in latent for each in _AROUND_LATENT}
    return [
        f"{without_peft_levels(name)} is among split layers, and the plan does not say what it gets"
        for name, module in names.items()
        if module not in styles and any(each is not None for each in module._parameters.values())
        if nearest(without_peft_levels(name), among) is not None and nearest(without_peft_levels(name), known) is None
        if nearest(name, in_adapters) is None or name.endswith(".base_layer")
    ]


def _module_problems(name: str, module: nn.Module, style: str | None) -> list[str]:
    """Return why a module cannot compute in parts."""
    if isinstance(module, nn.Dropout) and module.p > 0:
        return [f"{name} drops with p={module.p}, at other places on each rank: set it to 0"]
    if (getattr(module, "activation_sparsity", None) or 0) > 0:  # of Gemma3n, whose plan splits it nevertheless
        return [f"{name} keeps the largest activations of the whole layer, of which each rank would have a part"]
    if style == _LATENT and name.endswith(".base_layer"):
        return [f"{without_peft_levels(name)} has an adapter, of whose output each rank's heads turn a part"]
    if style is not None and style not in (*_OF_LINEAR, *_OF_EMBEDDING, *_WHOLE, *_OF_MODULES):
        return [f"{name} has the style {style}, which is not followed here"]
    own = [each for each in module._parameters.values() if each is not None]
    problems = []
    if style in _OF_LINEAR and not isinstance(module, nn.Linear):
        problems.append(f"{name} is a {type(module).__name__}, and {style} splits a Linear")
    if style in _OF_EMBEDDING and not isinstance(module, nn.Embedding):
        problems.append(f"{name} is a {type(module).__name__}, and {style} splits an Embedding")
    if any(is_four_bit(each) or packed_from(each) is not None for each in own):
        problems.append(f"{name} has packed weights, whose codes cannot be split")
    if own and not can_run(module):
        problems.append(f"{name} is a {type(module).__name__}, whose tensors are read from outside")
    return problems


def _placements(
    parameters: Sequence[ModelTensor], styles: Mapping[nn.Module, str], apart: Mapping[str, str], mesh: DeviceMesh
) -> tuple[dict[str, Shard | _StridedShard], list[str]]:
    """Return how each parameter is split that is, and the problems of those that cannot be."""
    placements: dict[str, Shard | _StridedShard] = {}
    problems = []
    for parameter in parameters:
        shape, style = parameter.tensor.shape, apart.get(parameter.name)
        found = {
            _placement(style or styles.get(module), attribute, shape, mesh) for module, attribute in parameter.places
        }
        placement = next(iter(found))
        if len(found) > 1:
            problems.append(f"{' and '.join(parameter.names)} are tied, and would be split in different ways")
        elif placement is not None and shape[placement.dim] % (pieces(placement) * mesh.size()):
            size = shape[placement.dim] // pieces(placement)
            problems.append(f"{parameter.name} {list(shape)} has {size} to split over {mesh.size()} ranks")
        elif placement is not None and style is not None and (said := parts_problem(parameter, placement, mesh.size())):
            problems.append(said)
        elif placement is not None:
            placements[parameter.name] = placement
    return placements, problems


def _undivided(styles: Mapping[nn.Module, str], mesh: DeviceMesh) -> list[nn.Module]:
    """Return the modules that may be whole, and whose size does not divide, as that of an odd vocabulary."""
    found = dict.fromkeys(
        module
        for module, style in styles.items()
        if style in _WHOLE_OUTSIDE
        for attribute, each in module._parameters.items()
        if each is not None and (placement := _placement(style, attribute, each.shape, mesh)) is not None
        if each.shape[placement.dim] % mesh.size()
    )
    return [*found]


def _placement(
    name: str | None, attribute: str, shape: Sequence[int], mesh: DeviceMesh
) -> Shard | _StridedShard | None:
    """Return how a style splits a parameter of this name in its module; None where it does not."""
    if name is None or name in _WHOLE:
        return None
    holder = nn.Module()  # transformers' style is asked
    holder.register_parameter(attribute, nn.Parameter(torch.empty(tuple(shape), device="meta"), requires_grad=False))
    _style(name).shard_param(holder, attribute, mesh)
    placed: object = holder._parameters[attribute]  # torch's stubs know no parameter that is a DTensor
    placement = placed.placements[0] if isinstance(placed, DTensor) else None
    if isinstance(placement, _StridedShard):
        return _StridedShard(placement.dim % len(shape), split_factor=placement.split_factor)
    return Shard(placement.dim % len(shape)) if isinstance(placement, Shard) else None


def _head_problems(model: nn.Module, placements: Mapping[str, Shard | _StridedShard], parts: int) -> list[str]:
    """Return the projections whose parts would end inside a head of attention."""
    problems = []
    modules = {without_peft_levels(canonical(path)): module for path, module in walk_modules(model)}
    for name, placement in placements.items():
        projection = without_peft_levels(name).rpartition(".")[0]
        size = getattr(modules.get(projection.rpartition(".")[0]), "head_dim", None)
        width = getattr(modules.get(projection), "out_features", None)
        if placement.dim == 0 and size and width and not width % size and (width // size) % parts:
            problems.append(f"{projection} has {width // size} heads to split over {parts} ranks")
    return problems


def units_in_parts(
    units: Sequence[ShardingUnit], split: TensorSplit, parameters: Sequence[ModelTensor]
) -> tuple[ShardingUnit, ...]:
    """Return the units with the size that they have on a rank, which gathers its part of each layer."""
    sizes = {each.name: each.nbytes // (split.parts if each.name in split.placements else 1) for each in parameters}
    return tuple(dataclasses.replace(unit, bytes=sum(sizes[name] for name in unit.parameters)) for unit in units)


def compute_in_parts(setup: Setup, mesh: DeviceMesh) -> None:
    """Split the parameters of a model on meta over ``mesh``, and let its modules compute with the parts."""
    for parameter in setup.tensors.sharded:
        placement = setup.split.placements.get(parameter.name, Replicate())
        empty = torch.empty(parameter.tensor.shape, dtype=parameter.tensor.dtype, device="meta")
        part = distribute_tensor(empty, mesh, [placement], src_data_rank=None)
        parameter.put(nn.Parameter(part, requires_grad=parameter.tensor.requires_grad))
    if any(pieces(placement) > 1 for placement in setup.split.placements.values()):
        tell_checkpoints()
    leave_split_models()
    for module, style in setup.split.styles:
        style.install_forward(module, mesh)
    _let_units_run_plain(setup)


def _let_units_run_plain(setup: Setup) -> None:
    """Let a module around others read their whole parameters, as far as FSDP gathers them: in its own unit."""
    modules = dict(setup.model.named_modules())
    whole = {module: style for module, style in setup.split.styles if isinstance(style, WholeParameters)}
    of_module: dict[str, list[tuple[nn.Module, WholeParameters]]] = {}
    units = [name for unit in setup.units for name in unit.modules]
    for path, module in walk_modules(setup.model):
        if module in whole and (unit := nearest(path, units)) is not None:
            of_module.setdefault(unit, []).append((module, whole[module]))
    for name, computing in of_module.items():
        inside = base_of_adapters(setup.model) if not name else None
        _run_with_plain_tensors(modules[name] if inside is None else inside, computing)
