"""GRPO's step as trl runs it: the log-probabilities of samples, of the policy and of its reference, and then the loss.

The samples are there for several micro-batches, and are scored in as many parts, without a graph, before the first one
(``_generate_and_score_completions`` and ``_compute_loss`` of ``trl/trainer/grpo_trainer.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from safe_loading._core.workload import Workload

from .forward_pass import router_options
from .inputs import StepInputs
from .ledger import Ledger
from .reference_pass import Reference
from .step_tensors import autocast, classify_inputs

_EPSILON = 0.2
OUTPUTS = ("log_probs", "entropy")  # which GRPOTrainer asks the fused head for


class GrpoStep:
    """The parts of a step of GRPO, whose tensors live from its samples to its last micro-batch."""

    def __init__(
        self,
        model: torch.nn.Module,
        workload: Workload,
        inputs: StepInputs,
        ledger: Ledger,
        reference: Reference | None,
    ) -> None:
        self._model, self._workload, self._inputs, self._ledger = model, workload, inputs, ledger
        self._reference = reference
        self._held: list[torch.Tensor] = []
        self._scores: list[torch.Tensor] = []

    def score(self) -> None:
        """Run the passes without a graph over the samples, whose log-probabilities are kept."""
        rows = max(self._workload.generated_rows, self._workload.batch_size)
        parts = -(-rows // self._workload.batch_size)
        self._held = [self._tokens(rows, self._workload.sequence_length) for _ in range(2)]
        policy = (lambda batch: self._model(**batch)) if self._workload.old_log_probs else None
        for run in (policy, self._reference):
            if run is not None:
                self._scores.append(self._scored(run, parts))

    def _scored(self, run: Callable[[Mapping[str, Any]], Any], parts: int) -> torch.Tensor:
        """Return the log-probabilities of all rows, of whose parts, which are alike, the last one is run."""
        rows, length = self._workload.batch_size, self._workload.sequence_length
        with torch.no_grad(), autocast(self._workload):
            found = [torch.empty(rows, length - 1, device=self._held[0].device) for _ in range(parts - 1)]
            found.append(run(self._batch()).log_probs)
            return torch.cat([each[:, -self._workload.completion_length :] for each in found])

    def loss(self) -> torch.Tensor:
        """Return the loss of a micro-batch, with its graph."""
        workload = self._workload
        with torch.enable_grad(), autocast(workload):
            batch = self._batch()
            mask = batch["attention_mask"][:, -workload.completion_length :]
            output = self._model(**batch, **router_options(self._model, workload))
            now = torch.cat([output.log_probs[:, -workload.completion_length :]])
            entropy = torch.cat([output.entropy[:, -workload.completion_length :]])
            of_routers = output.aux_loss
            del output, batch
        own = [scores[: workload.batch_size] for scores in self._scores]
        old = own[0] if workload.old_log_probs else now.detach()
        advantages = torch.zeros(workload.batch_size, 1, device=now.device)
        ratio = torch.exp(now - old)
        clipped = torch.clamp(ratio, 1 - _EPSILON, 1 + _EPSILON)
        first, second = ratio * advantages, clipped * advantages
        each = -torch.min(first, second)
        if workload.reference is not None:
            each = each + 0.1 * (torch.exp(own[-1] - now) - (own[-1] - now) - 1)
        loss: torch.Tensor = (each * mask).sum() / (workload.batch_size * workload.completion_length)
        del entropy
        return loss if of_routers is None else loss + 0.001 * of_routers

    def _batch(self) -> dict[str, Any]:
        batch: dict[str, Any] = self._inputs.batch(self._workload.batch_size, self._workload.sequence_length)
        labels = self._tokens(*batch["input_ids"].shape)
        labels[:, : -self._workload.completion_length] = -100
        batch["labels"] = labels
        classify_inputs(batch, self._ledger)
        return {**batch, "fused_lm_head": True}

    def _tokens(self, *shape: int) -> torch.Tensor:
        tokens = self._inputs.tokens(*shape)
        classify_inputs({"tokens": tokens}, self._ledger)
        return tokens
