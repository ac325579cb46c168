"""The stacked experts of a layer in parts: which dimension is split, and the bias that only the sum of the parts gets.

Each rank computes a part of every expert, between its projections up and down, and the parts are summed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from safe_loading._model.tensors import ModelTensor, walk_modules

from .tensor_split import pieces

EXPERTS = "moe_tp_experts"  # transformers' style that adds up what the ranks' parts of all experts give
LOCAL = "local_params"  # its style of a module that computes with its parts of own parameters, such as attention sinks
_DOWN, _DOWN_BIAS = "down_proj", "down_proj_bias"
_WHOLE = (None, "replicate")
_ADDED_TO = {"Llama4TextMoe": "shared_expert"}
_ALIGNED_BYTES = 16  # of each row in torch's grouped_mm
# transformers has a plan for whole experts of these alone
_PLANS = {
    "gpt_oss": {
        "embed_tokens": "embedding_rowwise",
        "layers.*.self_attn.q_proj": "colwise",
        "layers.*.self_attn.k_proj": "colwise",
        "layers.*.self_attn.v_proj": "colwise",
        "layers.*.self_attn.o_proj": "rowwise",
        "layers.*.self_attn.sinks": "colwise",
        "layers.*.self_attn": LOCAL,
        # gates and projections up alternate along the last dimension, so that a part of it holds pairs of them
        "layers.*.mlp.experts.gate_up_proj": "rowwise",
        "layers.*.mlp.experts.gate_up_proj_bias": "rowwise",
        "layers.*.mlp.experts.down_proj": "colwise",
        "layers.*.mlp.experts.down_proj_bias": "replicate",
        "layers.*.mlp.experts": EXPERTS,
    }
}


def plan_of(base: nn.Module) -> dict[str, str]:
    """Return the plan of a model's class, by the names in the model: transformers' own, or the one here."""
    own: dict[str, str] = dict(getattr(base, "tp_plan", None) or {})
    known = _PLANS.get(getattr(getattr(base, "config", None), "model_type", ""), {})
    if not known or any("layers." in name for name in own):
        return own  # else transformers says of the head alone how it is split, or of the embeddings too
    prefix = getattr(base, "base_model_prefix", "")
    inside = f"{prefix}." if hasattr(base, prefix) else ""
    return {**{f"{inside}{name}": style for name, style in known.items()}, **own}


@dataclasses.dataclass(frozen=True)
class BiasOfParts:
    """A style of experts whose bias each rank would add, if each did not add a part of it."""

    style: Any  # transformers'

    def install_forward(self, module: nn.Module, mesh: DeviceMesh) -> None:
        """Let the experts compute in parts, of which the bias is divided by their number."""
        self.style.install_forward(module, mesh)
        forward = module.forward

        def with_part_of_bias(*args: Any, **options: Any) -> Any:
            parameters: dict[str, Any] = module._parameters
            bias = parameters[_DOWN_BIAS]
            if isinstance(bias, DTensor):
                parameters[_DOWN_BIAS] = bias.to_local(grad_placements=[Partial()]) / mesh.size()
            try:
                return forward(*args, **options)
            finally:
                parameters[_DOWN_BIAS] = bias

        module.__dict__["forward"] = with_part_of_bias


@dataclasses.dataclass(frozen=True)
class OwnOutput:
    """A style of a module to whose output the module around it adds in place, which torch forbids for a part's sum."""

    def install_forward(self, module: nn.Module, mesh: DeviceMesh) -> None:
        """Let the module give a copy of its output."""
        forward = module.forward

        def with_own_output(*args: Any, **options: Any) -> Any:
            return forward(*args, **options).clone()

        module.__dict__["forward"] = with_own_output


def added_to_in_place(model: nn.Module) -> list[nn.Module]:
    """Return the modules of a model to whose outputs others add in place."""
    around = [(module, _ADDED_TO.get(type(module).__name__)) for _, module in walk_modules(model)]
    return [module.get_submodule(name) for module, name in around if name is not None]


def has_bias_of_parts(module: nn.Module) -> bool:
    """Whether experts have a bias after their last projection."""
    return module._parameters.get(_DOWN_BIAS) is not None


def apart_problems(
    parameters: Sequence[ModelTensor], styles: Mapping[nn.Module, str], apart: Mapping[str, str]
) -> list[str]:
    """Return the parameters with a style apart from their module that cannot be split so, and those without one."""
    problems = []
    for each in parameters:
        style, owners = apart.get(each.name), {styles.get(module) for module, _ in each.places}
        if owners == {EXPERTS}:
            problems += _experts_problem(each, style)
        elif owners == {LOCAL} and style in _WHOLE:
            problems.append(f"{each.name} is whole in a module that computes with parts")
        elif style is not None and not (owners == {LOCAL} and style == "colwise" and each.tensor.ndim == 1):
            problems.append(f"{each.name} has the style {style} of its own, which is not followed here")
    return problems


def _experts_problem(parameter: ModelTensor, style: str | None) -> list[str]:
    """Return why a parameter of experts is not split rightly by its style."""
    module, attribute = parameter.places[0]
    if getattr(module, "has_post_expert_norm", False):
        return [f"{parameter.name} is of experts with a norm after each, of which no rank has a whole output"]
    if style in _WHOLE:
        is_summed = attribute == _DOWN_BIAS and parameter.tensor.ndim == 2
        return [] if is_summed else [f"{parameter.name} is whole among split experts, and each rank would add it"]
    if style == _right_style(module, attribute, parameter.tensor.ndim):
        return []
    if _holds_gates(module, attribute) and style in ("colwise", "rowwise"):
        return [
            f"{parameter.name} holds all gates before all projections up, and the style {style} of the plan would give "
            f"a rank the ones without the others"
        ]
    return [f"{parameter.name} has the style {style} of its own, which is not followed here"]


def _right_style(module: nn.Module, attribute: str, dims: int) -> str | None:
    """Return the style that splits a parameter of experts between the projections up and down; None if unknown."""
    kind = {2: attribute.removesuffix("_bias"), 3: attribute}.get(dims)
    is_bias, turned = dims == 2, _is_turned(module)
    if kind is None or is_bias != attribute.endswith("_bias"):
        return None
    if kind == _DOWN:
        return None if is_bias else "colwise" if turned else "rowwise"
    if kind not in ("gate_up_proj", "up_proj"):
        return None
    # a bias is split along its last dimension, as is a turned projection
    along = "rowwise" if turned or is_bias else "colwise"
    return f"packed_{along}" if _holds_gates(module, kind) else along


def _holds_gates(module: nn.Module, attribute: str) -> bool:
    """Whether a projection holds those of the gates first, and then those up."""
    return attribute.startswith("gate_up") and getattr(module, "is_concatenated", True)


def _is_turned(module: nn.Module) -> bool:
    """Whether the experts' projections have their inputs before their outputs."""
    up, down = module._parameters.get("gate_up_proj"), module._parameters.get(_DOWN)
    if up is None or down is None:
        return bool(getattr(module, "is_transposed", False))
    return up.shape[1] == down.shape[2] and up.shape[2] == 2 * down.shape[1]


def parts_problem(parameter: ModelTensor, placement: Shard | _StridedShard, parts: int) -> str | None:
    """Return why the parts of a parameter of experts could not be computed with."""
    module, attribute = parameter.places[0]
    size = parameter.tensor.shape[placement.dim] // pieces(placement)
    shape = list(parameter.tensor.shape)
    if attribute.startswith("gate_up") and not getattr(module, "is_concatenated", True) and size // 2 % parts:
        return f"{parameter.name} {shape} has {size // 2} pairs to split over {parts} ranks"
    if parameter.tensor.ndim != 3:
        return None
    if getattr(getattr(module, "config", None), "_experts_implementation", None) != "grouped_mm":
        return None
    # torch's product of all experts at once takes the whole of a stack, and no part of it
    row = size * parameter.tensor.itemsize
    if not row % _ALIGNED_BYTES and row // parts % _ALIGNED_BYTES:
        return f"{parameter.name} {shape} has parts whose rows torch does not align in grouped_mm"
    return None
