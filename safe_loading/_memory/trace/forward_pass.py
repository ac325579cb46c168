"""The forward pass of a traced step and its loss: the model's own, or a trainer's of smoothed labels or of pairs."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.trainer_pt_utils import LabelSmoother

from safe_loading._core.workload import Workload
from safe_loading.errors import TraceError

from .inputs import StepInputs, engine_base
from .ledger import Ledger
from .reference_pass import Reference
from .step_tensors import as_returned, autocast, classify_inputs, field, tensors_of

Batch = dict[str, torch.Tensor]
NOTHING_TRAINED = (
    "Nothing is trained: no parameter that the loss depends on has requires_grad. Pass a peft config with "
    "inference_mode=False, or call requires_grad_() on what the step trains."
)


def batch_of(workload: Workload, inputs: StepInputs, ledger: Ledger) -> Batch:
    """Return a batch with its labels, on the device."""
    batch = inputs.batch(workload.batch_size, workload.sequence_length)
    if workload.labels:
        batch |= inputs.targets(workload.batch_size, workload.sequence_length)
    if workload.pair_loss:
        batch = _of_pairs(batch)
    classify_inputs(batch, ledger)
    return batch


def _of_pairs(batch: Batch) -> Batch:
    """Return a batch as the collator of ORPO and CPO has it; a prompt is taken to be as long as its row."""
    if set(batch) != {"input_ids", "attention_mask", "labels"}:
        raise TraceError(f"pair_loss= is of rows of text alone, and this model takes {', '.join(sorted(batch))}.")
    rows = len(batch["input_ids"])
    half = (rows + 1) // 2
    parts = {"chosen": slice(half), "rejected": slice(rows - half, None), "prompt": slice(half)}
    held = {f"{part}_{name}": batch[name][of].clone() for part, of in parts.items() for name in batch}
    del held["prompt_labels"]
    return held


def _loss_of_pairs(model: torch.nn.Module, workload: Workload, batch: Batch) -> torch.Tensor:
    """Return the loss of trl's ORPO or CPO, whose own code runs the model and reads its logits."""
    name = "orpo" if workload.pair_loss == "orpo" else "cpo"
    try:
        trainer: Any = getattr(importlib.import_module(f"trl.experimental.{name}"), f"{name.upper()}Trainer")
    except ImportError as error:
        raise TraceError(f"pair_loss={workload.pair_loss!r} is run by trl's own code: pip install trl.") from error
    base: Any = engine_base(model)
    if getattr(base, "is_quantized", False):
        raise TraceError("pair_loss= was not held against trl with a base in 4 or 8 bits, which its trainers cast.")
    own = SimpleNamespace(
        concatenated_inputs=trainer.concatenated_inputs,
        get_batch_logps=trainer.get_batch_logps,
        accelerator=SimpleNamespace(device=batch["chosen_input_ids"].device),
        aux_loss_enabled=getattr(base.config, "output_router_logits", False),
        is_encoder_decoder=False,
        padding_value=0,
        pad_token_id=0,
        loss_type="sigmoid",  # any other takes as much
        cpo_alpha=float(workload.pair_loss == "cpo"),
        beta=0.1,
        alpha=0.0,
        label_smoothing=0.0,
    )

    def run(ids: torch.Tensor, **options: Any) -> Any:
        return _run(model, workload, {"input_ids": ids, **options})

    chosen, rejected, *_, likelihood = trainer.concatenated_forward(own, run, batch)[:5]
    losses = (trainer.odds_ratio_loss if name == "orpo" else trainer.cpo_loss)(own, chosen, rejected)[0]
    loss: torch.Tensor = likelihood - losses.mean() if name == "orpo" else losses.mean() + own.cpo_alpha * likelihood
    return loss


def forward_pass(
    model: torch.nn.Module, workload: Workload, batch: Batch, inputs: StepInputs, reference: Reference | None
) -> torch.Tensor:
    """Return the loss of a micro-batch; the output of the model is dropped, as by the Trainer."""
    options: dict[str, Any] = {"use_cache": workload.use_cache} if "use_cache" in inputs.names else {}
    of_routers = router_options(model, workload)
    if workload.pair_loss:
        return _loss_of_pairs(model, workload, batch)
    if workload.label_smoothing:
        return _smoothed(model, workload, batch, options | of_routers)
    options |= {"fused_lm_head": True} if workload.fused_lm_head else {}
    output = _run(model, workload, {**batch, **options, **of_routers})
    if reference is not None:
        with autocast(workload):
            referred = reference({**batch, **options})
        as_returned(referred, workload)
        del referred
    return _loss_of(output)


def router_options(model: torch.nn.Module, workload: Workload) -> dict[str, bool]:
    """Return the argument by which a mixture computes the loss of its routers; none where the step has no such loss.

    trl asks for it in its trainers for SFT, DPO, KTO, GRPO and RLOO, and not of a reference.
    """
    coefficient, config = workload.router_aux_loss_coef, getattr(engine_base(model), "config", None)
    if coefficient == 0.0 or not isinstance(config, PreTrainedConfig):
        return {}
    text = config.get_text_config()
    coefficient = getattr(text, "router_aux_loss_coef", 0.0) if coefficient is None else coefficient
    return {"output_router_logits": True} if hasattr(text, "output_router_logits") and coefficient else {}


def _run(model: torch.nn.Module, workload: Workload, arguments: dict[str, Any]) -> Any:
    with autocast(workload):
        output = model(**arguments)
    return as_returned(output, workload)  # after autocast's end, which frees the weights that it has cast


def _smoothed(model: torch.nn.Module, workload: Workload, batch: Batch, options: dict[str, Any]) -> torch.Tensor:
    """Return the Trainer's loss of smoothed labels, for which the model is run without them.

    trl's ``SFTTrainer`` runs the model once more, without a graph, for its metrics.
    """
    labels = batch.get("labels")
    if labels is None:
        return _loss_of(_run(model, workload, {**batch, **options}))
    causal = type(engine_base(model)).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    smooth: Any = LabelSmoother(0.1)  # any other factor takes as much
    without = {name: tensor for name, tensor in batch.items() if name != "labels"}
    loss: torch.Tensor = smooth(_run(model, workload, {**without, **options}), labels, shift_labels=causal)
    if workload.fused_lm_head:
        with torch.no_grad():
            _run(model, workload, {**batch, **options, "fused_lm_head": True})
    return loss


def _loss_of(output: object) -> torch.Tensor:
    """Return the model's own loss, or the mean of its first differentiable output."""
    loss = field(output, "loss")
    if loss is None:
        tensors = [t for t in tensors_of(output) if t.requires_grad and t.is_floating_point()]
        if not tensors:
            raise TraceError(NOTHING_TRAINED)
        return torch.stack([t.float().mean() for t in tensors[:1]]).sum()
    if not isinstance(loss, torch.Tensor):
        raise TypeError(f"the loss is a {type(loss).__name__}, not a tensor")
    return loss
