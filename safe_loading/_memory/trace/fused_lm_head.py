"""trl's fused LM head in a traced step: trl's own code, without its kernels, which allocate nothing.

Its trainers for SFT, DPO, KTO and GRPO compute the loss so since trl 1.16 (``add_fused_lm_head`` in
``trl/trainer/utils.py``): only tokens with a label are projected, in tiles of the vocabulary, and again backward.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from types import ModuleType

import torch

from safe_loading._core.thread_patches import answer_yes, do_nothing, patched
from safe_loading._core.workload import Workload
from safe_loading.errors import ArgumentError

from .grpo_step import OUTPUTS as GRPO_OUTPUTS
from .inputs import engine_base
from .liger_lm_head import liger_forward

OUTPUTS = ("log_probs", "entropy", "is_top1")  # which SFTTrainer asks for
LABELS_NOTE = (
    "Every token is taken to have a label. The head is computed for those alone that have one, so steps with prompts "
    "take less: pass inputs= with labels of -100 there."
)


@contextlib.contextmanager
def with_fused_lm_head(model: torch.nn.Module, workload: Workload) -> Iterator[None]:
    """Inside, the model takes ``fused_lm_head=True``, if the workload asks for it.

    The caller's snapshot gives it its own forward back.
    """
    if not workload.fused_lm_head:
        yield
        return
    base = engine_base(model)
    if workload.fused_lm_head == "liger":
        base.forward = liger_forward(base)
        yield
        return
    utils, _ = _trl()
    with fused_stand_ins():
        utils.add_fused_lm_head(base, outputs=GRPO_OUTPUTS if workload.completion_length else OUTPUTS)
        yield


@contextlib.contextmanager
def fused_stand_ins() -> Iterator[None]:
    """Inside, trl's head computes as on a GPU: for tokens with a label alone, and in kernels that allocate nothing."""
    utils, kernels = _trl()
    with contextlib.ExitStack() as stack:
        stack.enter_context(patched(utils, "_use_triton", answer_yes))
        for name in ("_forward_tile", "_backward_tile", "_addmm_fp32"):
            stack.enter_context(patched(kernels, name, do_nothing))
        yield


def _trl() -> tuple[ModuleType, ModuleType]:
    """Return trl's modules of the head and of its kernels."""
    try:
        kernels = importlib.import_module("trl.kernels.chunked_logprob")
    except ImportError as error:
        raise ArgumentError("fused_lm_head=True runs trl's own code: pip install 'trl>=1.16'.") from error
    return importlib.import_module("trl.trainer.utils"), kernels
