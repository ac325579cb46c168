"""The loss of models that write down sounds (CTC), whose table of paths is as wide as the longest text.

Fake tensors have no lengths of texts, but a trace knows those of the labels.
"""

from __future__ import annotations

import torch

from .known_values import KnownValues
from .operation import OperationCall

aten = torch.ops.aten
_FORWARD = frozenset({aten._ctc_loss.default, aten._ctc_loss.Tensor})
_BACKWARD = frozenset({aten._ctc_loss_backward.default, aten._ctc_loss_backward.Tensor})
_LENGTHS, _TABLE = 3, 6  # the places of the lengths of the texts, and of the table in the backward pass


def outputs_of_ctc_loss(call: OperationCall, values: KnownValues) -> object:
    """Return the loss of each row and the table of its paths, or the gradient of the scores.

    None for another operation, and for lengths that are unknown.
    """
    if call.func in _BACKWARD:
        return torch.empty_like(call.args[1])  # torch would compute it for real, and forget its device
    if call.func not in _FORWARD:
        return None
    scores, lengths = call.args[0], call.args[_LENGTHS]
    known = values.numbers(lengths) if isinstance(lengths, torch.Tensor) else lengths
    if known is None:
        return None
    frames, rows, _ = scores.shape
    # a blank before each token of the text, and one at its end
    return scores.new_empty(rows), scores.new_empty(rows, frames, 2 * max(known, default=0) + 1)


def scratch_of_ctc_loss(call: OperationCall) -> tuple[int, ...]:
    """Return the bytes of the second table, from the end of the text, which the backward pass fills on any device."""
    return (call.args[_TABLE].nbytes,) if call.func in _BACKWARD else ()
