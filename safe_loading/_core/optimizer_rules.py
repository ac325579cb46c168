"""The state that optimizers keep for each parameter, by their names and the Trainer's. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class OptimizerRule:
    """The state that one optimizer keeps for each trainable parameter."""

    moments: int  # tensors of the parameter's shape
    itemsize: int | None = None  # bytes of an element of a moment; None for the parameter's own dtype
    source: str | None = None  # where the class is defined, as module:name; None when its step is not run
    options: tuple[tuple[str, object], ...] = ()  # keyword arguments that the class is made with
    block: int = 0  # elements that share one float32 statistic, for moments that are quantized in blocks
    factored: bool = False  # whether a matrix keeps one row and one column in place of a moment
    paged: bool = False  # whether large moments are in pages that the driver moves to the host
    doubled: bool = False  # whether the first moment is two averages in one tensor
    table: int = 0  # bytes of the table of values beside the codes of each moment
    codes_a_byte: int = 1  # where there is a table

    def state_parts(self, shape: Sequence[int], itemsize: int, *, of_embedding: bool) -> list[int]:
        """Return the bytes of each tensor of state of one trainable parameter, as they are made; counters are left out.

        The Trainer keeps the moments of embeddings in 32 bits where others have 8.
        """
        count, width = math.prod(shape), itemsize if self.itemsize is None else self.itemsize
        in_pages = self.paged and count >= 100_000  # the engine's get_state_buffer
        averages = [2 if self.doubled and place == 0 else 1 for place in range(self.moments)]
        if self.table:  # of an embedding as of any other, but only whole blocks (_new_buffer of its engine)
            whole = count >= 4096 and count % self.block == 0
            kept = [count // self.codes_a_byte, count // self.block * 4, self.table] if whole else [count * itemsize]
            return kept * self.moments
        if self.block and (of_embedding or count < 4096):  # min_8bit_size of the 8-bit optimizers
            return [] if in_pages else [count * 4 * each for each in averages]
        if self.block:  # one byte an element, and a float32 absmax for each block, which is in no page
            moments = [] if in_pages else [count * width * each for each in averages]
            return moments + [math.ceil(count / self.block) * 4 * each for each in averages]
        if in_pages:
            return []
        if self.factored and len(shape) >= 2 and count:  # a row and a column for each matrix
            return [count // shape[-1] * width, count // shape[-2] * width]
        return [count * width * each for each in averages] or [count * width] * int(self.factored)


_FUSED = (("fused", True),)
# FakeTensorMode has no shape rule for torch's fused SGD; the loop over single tensors takes the same memory
_ONE_BY_ONE = (("foreach", False),)
# of SGD and RMSprop, whose loop over all tensors then copies their gradients; AdamW decays the parameters in place
_DECAYED = (("foreach", True), ("weight_decay", 0.1))
OPTIMIZERS: Mapping[str, OptimizerRule] = MappingProxyType(
    {
        # fused as transformers' Trainer has it by default ("adamw_torch_fused")
        "adamw": OptimizerRule(2, source="torch.optim:AdamW", options=_FUSED),
        "adam": OptimizerRule(2, source="torch.optim:Adam", options=_FUSED),
        # torch's own default on an accelerator; its step takes one more copy of the parameters for a while
        "adamw_foreach": OptimizerRule(2, source="torch.optim:AdamW", options=(("foreach", True),)),
        "adamw_8bit": OptimizerRule(2, itemsize=1, block=256),  # block-wise
        # as the Trainer makes them; the buffers of their compiled step are not counted
        "adamw_torch_8bit": OptimizerRule(2, block=256, table=256 * 4),
        "adamw_torch_4bit": OptimizerRule(2, block=256, table=16 * 4, codes_a_byte=2),
        "lion": OptimizerRule(1),
        "lion_8bit": OptimizerRule(1, itemsize=1, block=256),
        "lion_32bit": OptimizerRule(1, itemsize=4),  # as the Trainer's
        "paged_adamw_8bit": OptimizerRule(2, itemsize=1, block=256, paged=True),
        "paged_adamw_32bit": OptimizerRule(2, itemsize=4, paged=True),
        "paged_lion_8bit": OptimizerRule(1, itemsize=1, block=256, paged=True),
        "paged_lion_32bit": OptimizerRule(1, itemsize=4, paged=True),
        "ademamix": OptimizerRule(2, itemsize=4, doubled=True),
        "ademamix_8bit": OptimizerRule(2, itemsize=1, block=256, doubled=True),
        "paged_ademamix_8bit": OptimizerRule(2, itemsize=1, block=256, paged=True, doubled=True),
        "paged_ademamix_32bit": OptimizerRule(2, itemsize=4, paged=True, doubled=True),
        "rmsprop_bnb": OptimizerRule(1, itemsize=4),
        "rmsprop_bnb_8bit": OptimizerRule(1, itemsize=1, block=256),
        "sgd": OptimizerRule(0, source="torch.optim:SGD", options=_ONE_BY_ONE),
        "sgd_momentum": OptimizerRule(1, source="torch.optim:SGD", options=(("momentum", 0.9), *_ONE_BY_ONE)),
        "sgd_decayed": OptimizerRule(0, source="torch.optim:SGD", options=_DECAYED),
        "sgd_momentum_decayed": OptimizerRule(1, source="torch.optim:SGD", options=(("momentum", 0.9), *_DECAYED)),
        "adagrad": OptimizerRule(1, source="torch.optim:Adagrad"),
        "rmsprop": OptimizerRule(1, source="torch.optim:RMSprop"),
        "rmsprop_decayed": OptimizerRule(1, source="torch.optim:RMSprop", options=_DECAYED),
        # of the package schedulefree: a copy of the parameters in place of the first moment
        "schedule_free_adamw": OptimizerRule(2, source="schedulefree:AdamWScheduleFree"),
        "schedule_free_radam": OptimizerRule(2, source="schedulefree:RAdamScheduleFree"),
        "schedule_free_sgd": OptimizerRule(1, source="schedulefree:SGDScheduleFree"),
        # transformers' class, which computes and keeps in float32
        "adafactor": OptimizerRule(0, itemsize=4, source="transformers.optimization:Adafactor", factored=True),
        "none": OptimizerRule(0),
    }
)
ALIASES = {  # the Trainer's names (transformers.training_args.OptimizerNames)
    "adamw_torch": "adamw_foreach",
    "adamw_torch_fused": "adamw",
    "adamw_bnb_8bit": "adamw_8bit",
    "paged_adamw": "paged_adamw_32bit",
    "rmsprop_bnb_32bit": "rmsprop_bnb",
}
