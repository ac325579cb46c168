"""``wrap_transparent``, ``unwrap_transparent``: user code around a model that stays the same to every trainer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from torch import nn

from safe_loading._core.log import logger
from safe_loading._core.report import Finding
from safe_loading.errors import ArgumentError, WrapError

from .heads import missing_heads
from .mixin_names import REPORT, STATE, check_mixin, check_names
from .proof import prove, refuse_unreached
from .report import CallProof, WrapReport
from .transparent import Transparent, mixins_of, unwrapped_class, wrapped_class
from .wrap_order import check_order

Model = TypeVar("Model", bound=nn.Module)


def wrap_transparent(
    model: Model,
    mixin: type[Transparent],
    *,
    prove_calls: bool = True,
    within: nn.Module | None = None,
    example: Mapping[str, Any] | None = None,
    **state: Any,
) -> Model:
    """Put user code around a model, which stays the same object with the same keys, signature and type.

    The model gets a class of the same name in which ``mixin`` stands before its own, so ``model(...)`` runs the
    ``__call__`` of the mixin. Everything that trainers, peft, accelerate and FSDP look at is the model's own. Of a
    PeftModel, ``generate`` runs the code at every step too. Called again with another mixin, the later one is called
    first. The report is the attribute ``wrap_report`` of the model.

    Args:
        model: A PeftModel, a PreTrainedModel, or a module inside one.
        mixin: A class derived from ``Transparent``, with the code in its ``__call__``.
        prove_calls: Whether to prove that the code is reached in train mode, in eval mode and by ``generate``. The
            proof runs none of the user's code, reads no weight and draws no random number.
        within: The module that will be called, when ``model`` is a part of it.
        example: The keyword arguments of one call for the proof; None makes up four tokens. Only a model that does
            something before it reaches ``model`` needs them.
        **state: Attributes that the model gets; copies and pickles keep them.

    Returns:
        The model.

    Raises:
        WrapError: The code would not run in one of the modes, the model lies in a plain wrapper, or names clash. The
            model is unchanged.
        ArgumentError: ``mixin`` is no mixin, or ``within`` does not hold the model.
    """
    check_mixin(mixin)
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"{type(model).__name__} is no model: pass a PeftModel or another torch.nn.Module.")
    if within is not None and not any(module is model for module in within.modules()):
        raise ArgumentError(f"within={type(within).__name__} does not hold the {type(model).__name__} to be wrapped.")
    check_order(model, mixin.__name__)
    problems = [*check_names(model, mixin, state), *missing_heads(model)]
    if problems:
        raise WrapError(f"{mixin.__name__} cannot go around {type(model).__name__}; nothing was changed:", problems)
    cls = _made(mixin, model)
    proofs = prove(model, within, example) if prove_calls else ()
    refuse_unreached(mixin, proofs)
    names = (REPORT, STATE)
    before = {name: vars(model)[name] for name in names if name in vars(model)}
    model.__class__ = cls  # type: ignore[assignment]  # a subclass of it
    vars(model).update(state)
    vars(model)[STATE] = (*before.get(STATE, ()), (tuple(state), before.get(REPORT)))
    mixins = tuple(each.__name__ for each in reversed(mixins_of(cls)))
    report = WrapReport(cls.__name__, mixins, proofs, tuple(_findings(mixin, proofs)))
    vars(model)[REPORT] = report
    logger.info("%s", report)
    return model


def unwrap_transparent(model: Model) -> Model:
    """Take off the mixin that was put around a model last, and the state that came with it.

    What was put around the model since, as by ``fully_shard``, stays. Attached heads stay.

    Args:
        model: A model that ``wrap_transparent`` returned.

    Returns:
        The model, the same object; after the last mixin it has its own class again.

    Raises:
        ArgumentError: The model is not wrapped.
    """
    if not mixins_of(type(model)):
        raise ArgumentError(f"This {type(model).__name__} is not wrapped: there is nothing to take off.")
    model.__class__ = unwrapped_class(type(model))
    own = vars(model)
    *earlier, (names, report) = own.pop(STATE)
    del own[REPORT]
    for name in names:
        own.pop(name, None)
    if earlier:
        own[STATE], own[REPORT] = tuple(earlier), report
    return model


def _made(mixin: type[Transparent], model: nn.Module) -> type[nn.Module]:
    """Return the class, or say why there cannot be one."""
    cls = type(model)
    try:
        made = wrapped_class(mixin, cls)
        model.__class__ = made  # the only way to ask whether the two have the same layout in memory
    except TypeError as error:
        raise WrapError(f"{mixin.__name__} cannot go around {cls.__name__}: {error}.") from error
    model.__class__ = cls
    return made


def _findings(mixin: type, proofs: tuple[CallProof, ...]) -> list[Finding]:
    findings = [
        Finding(
            "wrap-not-proven",
            "warning",
            f"{mixin.__name__} in {proof.mode} mode",
            f"it is not known whether the code runs: {proof.how}.",
            "pass example={...} with the arguments of a real call, or count the calls of your code in a first step.",
        )
        for proof in proofs
        if proof.runs is None
    ]
    if "<locals>" in mixin.__qualname__:
        findings.append(
            Finding(
                "mixin-not-importable",
                "info",
                mixin.__qualname__,
                "the class is made in a function, so pickle cannot find it.",
                "move it to the top of a module, if the model is to be pickled.",
            )
        )
    return findings
