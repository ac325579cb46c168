"""Checks of wrappers around the model that hide its attributes from trainers, which then silently act otherwise."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from peft import PeftModel
from transformers import PreTrainedModel

from safe_loading._core.engines import is_integrated
from safe_loading._core.report import Finding, counted, format_bytes
from safe_loading._model.embeddings_and_head import embeddings_and_head_of
from safe_loading._wrapping.wrap_order import HidingWrapper, accessed, inside_engines

from .audited_model import AuditedModel, size_of
from .kept_memory import is_average, is_teacher
from .trainer_code import names_in_saving


@dataclass(frozen=True)
class AttributeUse:
    """An attribute of the model that an engine reads, and the consequence when the model does not have it."""

    name: str
    read_by: str
    consequence: str
    costs_base: bool = False  # whether that costs another copy of the base, or its gathering
    in_step: bool = False  # whether a step then runs otherwise, or not at all


_PREPARATION = "peft.prepare_model_for_kbit_training"
ATTRIBUTE_USES = (
    AttributeUse("is_loaded_in_8bit", _PREPARATION, "checkpointing is not switched on", in_step=True),
    AttributeUse("is_loaded_in_4bit", _PREPARATION, "checkpointing is not switched on", in_step=True),
    AttributeUse(
        "gradient_checkpointing_enable",
        "Trainer(gradient_checkpointing=True)",
        "train() raises AttributeError",
        in_step=True,
    ),
    AttributeUse(
        "enable_input_require_grads", "peft and trl", "reentrant checkpointing gives no gradients", in_step=True
    ),
    AttributeUse(
        "hf_device_map",
        "Trainer and accelerate.prepare",
        "the model is moved to one device, or replicated",
        costs_base=True,
        in_step=True,
    ),
    AttributeUse("_no_split_modules", "FSDP's auto_wrap_policy", "the whole model becomes one unit", costs_base=True),
    AttributeUse(
        "peft_config",
        "trl's DPOTrainer and the Trainer's checkpoints",
        "a second base is loaded, and the base is saved",
        costs_base=True,
    ),
    AttributeUse(
        "save_pretrained",
        "Trainer._save",
        "it writes a state dict of the whole model, without a config",
        costs_base=True,
    ),
    AttributeUse("config", "Trainer and trl", "use_cache, the pad token and ties are guessed"),
    AttributeUse("get_input_embeddings", "peft and trl", "resized or tied embeddings are not noticed"),
    AttributeUse("generate", "trl's evaluation", "generation is skipped, or fails"),
)


_OF_THE_ADAPTER = frozenset({"peft_config", "save_pretrained"})  # a PeftModel around the wrapper has them itself


def check_wrappers(audited: AuditedModel, peaks: tuple[int, int] | None) -> Iterator[Finding]:
    """Yield one finding for each wrapper, with all attributes that it hides and their cost.

    `peaks` are those of the planned step, as the model is and in the right order with checkpointing; None where no step
    is planned or it cannot be traced, and then the bytes are those of the weights that are copied or saved needlessly.
    Where the wrapper hands on all that a step needs, it is a warning: a larger checkpoint takes no memory of the step.
    """
    for wrapper in audited.wrappers:
        hidden = [use for use in ATTRIBUTE_USES if hides(audited, wrapper, use.name)]
        uses = [use for use in hidden if _matters(audited, wrapper, use)]
        where = f"{wrapper.path} ({wrapper.classes[0]})" if wrapper.path else wrapper.classes[0]
        if not hidden:
            yield Finding("SL102", "error", where, _message(wrapper, uses, ""), _fix(wrapper))
            continue
        saved_by_user = wrapper.above is None and names_in_saving(audited) is not None
        if saved_by_user and not any(use.in_step or use.costs_base for use in uses):
            continue  # all that a step needs is handed on
        if not any(use.in_step for use in uses):
            yield Finding("SL101", "warning", where, _message(wrapper, uses, ""), _fix(wrapper))
            continue
        size = size_of(wrapper.inside.parameters()) if any(use.costs_base for use in uses) else 0
        cost = ""
        # where the switch can be reached, the wrapper keeps nobody from checkpointing
        if peaks is not None and any(use.name == "gradient_checkpointing_enable" for use in uses):
            size = max(0, peaks[0] - peaks[1])
            as_it_is, right = (format_bytes(peak) for peak in peaks)
            instead = f" The step takes {as_it_is}; without the wrapper and with checkpointing it takes {right}."
            cost = instead if size else ""
        yield Finding("SL101", "error", where, _message(wrapper, uses, cost), _fix(wrapper), size)


def hides(audited: AuditedModel, wrapper: HidingWrapper, name: str) -> bool:
    """Whether the model inside a wrapper has an attribute, or a flag that is True, and the wrapper has not."""
    if hasattr(wrapper.module, name):
        return False
    # what a further wrapper inside hides would be hidden by this one too
    inside = [other.inside for other in audited.wrappers[audited.wrappers.index(wrapper) :]]
    return any(getattr(model, name, None) not in (None, False) for model in inside)


def _matters(audited: AuditedModel, wrapper: HidingWrapper, use: AttributeUse) -> bool:
    """Whether it makes a difference here that a wrapper hides an attribute."""
    if wrapper.above is not None:
        return use.name not in _OF_THE_ADAPTER
    if use.name == "enable_input_require_grads":  # which is for embeddings without a gradient
        if is_integrated(wrapper.inside) and hasattr(wrapper.module, "gradient_checkpointing_enable"):
            return False  # that switch of transformers sets this one, too, where it put the adapter in
        embeddings = embeddings_and_head_of(wrapper.inside).embeddings
        return embeddings is None or not any(parameter.requires_grad for parameter in embeddings.parameters())
    if names_in_saving(audited) is None:
        return True
    if use.name == "_no_split_modules":
        return bool(getattr(audited.trainer, "is_fsdp_enabled", False))
    return use.name not in _OF_THE_ADAPTER


def _message(wrapper: HidingWrapper, uses: Iterable[AttributeUse], cost: str) -> str:
    inside = type(wrapper.inside).__name__
    consequences = "; ".join(f"{use.name} from {use.read_by} ({use.consequence})" for use in uses)
    expected = (PeftModel if isinstance(wrapper.inside, PeftModel) else PreTrainedModel).__name__
    saved = "a checkpoint of its state_dict() does" if wrapper.above is None else "an adapter that is saved so does"
    return (
        f"{wrapper.received_by} gets a {' around '.join(wrapper.classes)} with the {inside} inside it "
        f"({wrapper.inside_path!r}), and looks at the outermost module only.{cost}"
        + (f" It hides {consequences}." if consequences else "")
        + f" isinstance(model, {expected}) is False, by which trainers decide. Every key begins with "
        f"'{wrapper.inside_path}.': {saved} not fit the model without the wrapper."
    )


def _fix(wrapper: HidingWrapper) -> str:
    beside = _taught_by(wrapper)
    if wrapper.several and not beside:
        return (
            f"make one model of all: derive {wrapper.classes[0]} from PreTrainedModel, call super().__init__(config) "
            f"with the config of one of them, set supports_gradient_checkpointing = _supports_sdpa = True in it, and "
            f"call get_peft_model on the whole: peft and trainers then reach each."
        )
    start, lines = wrapper.right_order("Mixin")
    if beside:
        held = "".join(f", {name}=(wrapper{accessed(name)},)" for name in beside)
        lines[-1] = (
            f"    model = wrap_transparent(model, Mixin{held})  # in a tuple, which no checkpoint has: move it yourself"
        )
    return (
        f"put the wrapper's code into the __call__ of a class Mixin(Transparent), start from the {start}, and write:\n"
        + "\n".join(lines)
    )


def _taught_by(wrapper: HidingWrapper) -> list[str]:
    """Return the names of the frozen models beside the one inside; none where one of them is trained, too."""
    others = [
        (name, child)
        for name, child in wrapper.module.named_children()
        if isinstance(child, (PreTrainedModel, PeftModel)) and child is not wrapper.inside
    ]
    at_rest = [
        name
        for name, child in others
        if is_teacher(name) or is_average(name, child) or not any(p.requires_grad for p in child.parameters())
    ]
    return at_rest if len(at_rest) == len(others) else []


def check_prefix(audited: AuditedModel) -> Iterator[Finding]:
    """Yield a finding when an engine's wrapper puts a prefix before the keys; trainers take off that of the model."""
    yield from _check_compiled_parts(audited)
    path, inside = inside_engines(audited.model)
    # FSDP1 takes its own prefix out of the keys of a state dict, so that it never reaches a file
    if not path or audited.trainer is not None or type(audited.model).__name__ == "FullyShardedDataParallel":
        return
    prefix = f"{path}."
    first = next((name for name, _ in audited.model.named_parameters() if name.startswith(prefix)), prefix)
    message = f"every key of model.state_dict() begins with {prefix!r}, and does not fit the model without its wrapper."
    fix = f"save the {type(inside).__name__}: model.{path}.save_pretrained(...), or model.{path}.state_dict()."
    yield Finding("SL106", "info", first, message, fix)


def _check_compiled_parts(audited: AuditedModel) -> Iterator[Finding]:
    """Yield a finding for compiled modules inside the model, whose name no engine takes out of a checkpoint."""
    modules = dict(audited.outermost.named_modules())
    compiled = [path for path, module in modules.items() if type(module).__name__ == "OptimizedModule"]
    if compiled and audited.training:
        path = compiled[0]
        message = (
            f"{counted(len(compiled), 'module is', 'modules are')} compiled inside the model: the keys of a checkpoint "
            f"have '._orig_mod' in them, and fit only a model that was compiled so."
        )
        fix = (
            f"compile in place: model{accessed(path)}.compile(), which returns nothing, and not torch.compile(module)."
        )
        yield Finding("SL106", "warning", path, message, fix)
