"""``wrap_transparent``, ``unwrap_transparent``: user code around a model, which every trainer sees unchanged."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from torch import nn

from safe_loading._core.log import logger
from safe_loading._core.report import Finding
from safe_loading._model.torch_state import undone_when_raised
from safe_loading.errors import ArgumentError, WrapError

from .heads import missing_heads
from .mixin_names import REPORT, STATE, check_mixin, check_names, defined_names
from .proof import prove, refuse_unreached
from .report import CallProof, WrapReport
from .transparent import Transparent, mixins_of, unwrapped_class, wrapped_class
from .wrap_order import check_order

Model = TypeVar("Model", bound=nn.Module)


@undone_when_raised
def wrap_transparent(
    model: Model,
    mixin: type[Transparent],
    *,
    prove_calls: bool = True,
    within: nn.Module | None = None,
    example: Mapping[str, object] | None = None,
    **state: object,
) -> Model:
    """Put user code around a model, which stays the same object with the same keys, signature and type.

    The model gets a class of the same name that derives from ``mixin`` and the model's own class, so ``model(...)``
    runs the ``__call__`` of the mixin. Everything that trainers, peft, accelerate and FSDP look at is the model's own.
    ``generate`` of a PeftModel runs the code at every step too. Wrapped again in another mixin, the model calls the
    later one first. The report is the attribute ``wrap_report`` of the model.

    Args:
        model: A PeftModel, a PreTrainedModel, or a module inside one.
        mixin: A class derived from ``Transparent``, with the code in its ``__call__``.
        prove_calls: Whether to prove that the code is reached in train mode, in eval mode and by ``generate``. The
            proof runs none of the user's code, reads no weight and draws no random number.
        within: The module that will be called, if ``model`` is a part of it.
        example: The keyword arguments of one call for the proof; None makes up four tokens. They are needed only if
            something runs on them before ``model`` is reached.
        **state: Attributes that the model gets; copies and pickles keep them.

    Returns:
        The model.

    Raises:
        WrapError: The code would not run in one of the modes, the model is in a plain wrapper, or names clash. The
            model is unchanged.
        ArgumentError: ``mixin`` is not a mixin, or ``within`` does not contain the model.
    """
    check_mixin(mixin)
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"{type(model).__name__} is not a model: pass a PeftModel or another torch.nn.Module.")
    if within is not None and not any(module is model for module in within.modules()):
        raise ArgumentError(f"within={type(within).__name__} does not contain the {type(model).__name__} to wrap.")
    check_order(model, mixin.__name__)
    problems = [*check_names(model, mixin, state), *missing_heads(model)]
    if problems:
        raise WrapError(f"{mixin.__name__} cannot go around {type(model).__name__}; nothing was changed:", problems)
    cls = _wrapped_class_of(mixin, model)
    proofs = prove(model, within, example) if prove_calls else ()
    refuse_unreached(mixin, proofs)
    # Everything that can be refused has been. From here on the model changes, and nothing raises.
    previous = {name: vars(model)[name] for name in (REPORT, STATE) if name in vars(model)}
    model.__class__ = cls  # type: ignore[assignment]  # a subclass of the model's class
    vars(model).update(state)
    vars(model)[STATE] = (*previous.get(STATE, ()), (tuple(state), previous.get(REPORT)))
    mixins = tuple(outer.__name__ for outer in reversed(mixins_of(cls)))
    report = WrapReport(cls.__name__, mixins, proofs, tuple(_findings(mixin, proofs)))
    vars(model)[REPORT] = report
    logger.info("%s", report)
    return model


def unwrap_transparent(model: Model) -> Model:
    """Remove the outermost mixin of a model, and the state that came with it.

    What was applied to the model since, such as ``fully_shard``, stays. Attached heads stay.

    Args:
        model: A model that ``wrap_transparent`` returned.

    Returns:
        The model, the same object; without its last mixin it has its original class again.

    Raises:
        ArgumentError: The model is not wrapped.
    """
    if not mixins_of(type(model)):
        raise ArgumentError(f"This {type(model).__name__} is not wrapped: there is nothing to remove.")
    written = defined_names(mixins_of(type(model))[-1])
    model.__class__ = unwrapped_class(type(model))
    own = vars(model)
    *earlier, (names, report) = own.pop(STATE)
    del own[REPORT]
    for name in written.union(names):
        own.pop(name, None)
    if earlier:
        own[STATE], own[REPORT] = tuple(earlier), report
    return model


def _wrapped_class_of(mixin: type[Transparent], model: nn.Module) -> type[nn.Module]:
    """Return the class that the model gets, or raise if there cannot be one."""
    cls = type(model)
    try:
        wrapped = wrapped_class(mixin, cls)
        model.__class__ = wrapped  # assigning is the only way to find out whether the two have the same memory layout
    except TypeError as error:
        raise WrapError(f"{mixin.__name__} cannot go around {cls.__name__}: {error}.") from error
    model.__class__ = cls
    return wrapped


def _findings(mixin: type, proofs: tuple[CallProof, ...]) -> list[Finding]:
    findings = []
    fix = "pass example={...} with the arguments of a real call, or count the calls of your code in a first step."
    for proof in proofs:
        if proof.runs is None:
            where, message = f"{mixin.__name__} in {proof.mode} mode", "it is not known whether the code runs"
            findings.append(Finding("wrap-not-proven", "warning", where, f"{message}: {proof.how}.", fix))
    if "<locals>" in mixin.__qualname__:
        message = "the class is defined in a function, so pickle cannot find it."
        fix = "define it at the top of a module if the model is to be pickled."
        findings.append(Finding("mixin-not-importable", "info", mixin.__qualname__, message, fix))
    return findings
