"""The tensors that ``generate()`` keeps beside the model's cache while it writes: ids, positions, masks and scores."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from .inputs import StepInputs
from .ledger import Ledger
from .step_tensors import classify_inputs, field


class GeneratedSequences:
    """The rows that ``generate()`` of transformers writes, token by token, and the model's arguments for them.

    Greedy search or sampling, as in ``GenerationMixin.generate`` of transformers 5.23: each row has positions of its
    own, a mask that hides nothing is left out since 5.18, and the scores of the last tokens stay until the next ones
    are there. A decoder beside an encoder starts with one token, whatever the length of the text that the encoder
    reads.
    """

    def __init__(
        self, prompt: Mapping[str, torch.Tensor], inputs: StepInputs, ledger: Ledger, *, sampled: bool
    ) -> None:
        self._sampled = sampled
        self._inputs, self._ledger = inputs, ledger
        others = {**prompt}
        start = others.pop("decoder_input_ids", None)
        self._of_encoder: dict[str, torch.Tensor] = {}
        self._mask: torch.Tensor | None = None
        self._positions: torch.Tensor | None = None
        if start is not None:
            self._name = "decoder_input_ids"
            self._ids = inputs.tokens(start.shape[0], 1)
            self._of_encoder = {"attention_mask": others["attention_mask"]} if "attention_mask" in others else {}
        else:
            self._name = "input_ids"
            self._ids = others.pop("input_ids")
            mask = others.pop("attention_mask", None)
            given = others.pop("position_ids", None)
            self._positions = inputs.positions(self._ids, mask, others) if given is None else given
            self._mask = None if mask is None or inputs.drops_mask(mask) else mask
        # generate() itself holds what it starts with, and its loop what that becomes
        self._first = self._positions if start is None else self._ids
        self._of_prompt: dict[str, Any] = others  # such as images: only the prompt is read with them
        # the tasks of peft's Poly choose what its layers compute for every token
        self._of_rows = {name: others[name] for name in ("task_ids",) if name in others and not inputs.has_prompts}
        self._unfinished: torch.Tensor | None = None
        self._special_tokens = inputs.special_tokens()
        self._chosen: torch.Tensor | None = None
        self._scores: torch.Tensor | None = None
        self._probabilities: torch.Tensor | None = None
        if start is None:
            self._unfinished = inputs.tokens(self._ids.shape[0])
        classify_inputs([self._ids, self._positions, self._unfinished, self._special_tokens], ledger)

    def prompt(self) -> dict[str, Any]:
        """Return the arguments of the first forward pass."""
        self._of_prompt = self._inputs.with_encoded_images(self._of_prompt)  # held to the end
        return {**self._of_prompt, **self._masked(self._ids.clone(), self._positions)}

    def last_token(self) -> dict[str, torch.Tensor]:
        """Return the arguments of a forward pass over the last token of each row."""
        positions = None if self._positions is None else self._positions[..., -1:].clone()
        return {**self._of_encoder, **self._of_rows, **self._masked(self._ids[:, -1:].clone(), positions)}

    def _masked(self, ids: torch.Tensor, positions: torch.Tensor | None) -> dict[str, torch.Tensor]:
        named = {self._name: ids, "position_ids": positions, "attention_mask": self._mask}
        made = {name: tensor for name, tensor in named.items() if tensor is not None}
        classify_inputs(made, self._ledger)
        return made

    def append(self, output: object) -> None:
        """Choose the next token of each row from the model's output."""
        rows = self._ids.shape[0]
        if self._positions is not None:
            self._positions = torch.cat([self._positions, self._positions[..., -1:] + 1], dim=-1)
        if self._mask is not None:
            self._mask = torch.cat([self._mask, self._inputs.tokens(rows, 1)], dim=-1)
        logits = field(output, "logits")
        if isinstance(logits, torch.Tensor):
            self._scores = logits[:, -1].to(copy=True, dtype=torch.float32, device=self._ids.device)
            if self._sampled:
                self._probabilities = torch.softmax(self._scores, dim=-1)
                drawn = torch.empty_like(self._probabilities)  # torch.multinomial divides by as many random numbers
                del drawn
        if self._unfinished is None:
            self._unfinished = self._inputs.tokens(rows)
        # a row that is finished gets the padding's id, while the model's output is alive
        chosen = self._inputs.tokens(rows)
        if self._inputs.ends:
            chosen = chosen * self._unfinished + chosen * (1 - self._unfinished)
        self._chosen = chosen
        self._ids = torch.cat([self._ids, self._chosen[:, None]], dim=-1)
        classify_inputs([self._ids, self._positions, self._mask, self._chosen], self._ledger)
