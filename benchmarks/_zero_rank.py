"""One rank of zero_on_cuda.py: DeepSpeed's own engine runs each case for some steps and says what it allocated."""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import logging
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _zero_cases import CASES, SIZES, Case
from peft import get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from safe_loading._memory.trace.fused_lm_head import OUTPUTS
from safe_loading._memory.trace.liger_lm_head import liger_forward

STEPS = 3
# ZeRO-3 writes all its arguments into a text that it does not print, with the values of each parameter
torch.Tensor.__repr__ = object.__repr__  # type: ignore[assignment]
deepspeed: Any = importlib.import_module("deepspeed")  # not among the project's own requirements


def run(case: Case) -> tuple[int, int]:
    """Return the most bytes that were allocated in the steps of a case, and asked of the allocator.

    Setting the engine up is left out.
    """
    torch.manual_seed(0)
    dtype = getattr(torch, case.dtype)
    model: Any = LlamaForCausalLM(LlamaConfig(**SIZES))
    model = model.to(dtype).cuda().train()
    with_head(model, case)
    if case.adapter is not None:
        model = get_peft_model(model, case.adapter)
    if case.checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": case.reentrant})
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=not case.zero.get("offload_optimizer"))
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=_config(case))
    del model, optimizer, trained
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(STEPS):
        _step(engine, case)
    torch.cuda.synchronize()
    if engine.skipped_steps:
        raise RuntimeError("a step was skipped, so the optimizer has no state")
    peak = torch.cuda.max_memory_allocated(), torch.cuda.memory_stats()["requested_bytes.all.peak"]
    engine.destroy()
    del engine
    gc.collect()
    torch.cuda.empty_cache()
    return peak


def _step(engine: Any, case: Case) -> None:
    """Run a step, whose batches are there until it has ended, as the Trainer's."""
    fused = {"fused_lm_head": True} if case.fused_lm_head else {}
    batches = [_batch(case) for _ in range(case.accumulation)]
    for batch in batches:
        loss = engine(**batch, use_cache=False, **fused).loss
        engine.backward(loss)
        del loss
        engine.step()


def _batch(case: Case) -> dict[str, torch.Tensor]:
    ids = torch.full((case.batch, case.length), 5, device="cuda")
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}


def with_head(model: Any, case: Case) -> None:
    """Give a model the head of a case, whose kernels are left out: they allocate nothing, and are in no simulation."""
    if case.fused_lm_head == "liger":
        model.forward = liger_forward(model)
    elif case.fused_lm_head:
        utils: Any = importlib.import_module("trl.trainer.utils")
        kernels: Any = importlib.import_module("trl.kernels.chunked_logprob")
        utils._use_triton = lambda *_, **__: True
        kernels._forward_tile = kernels._backward_tile = kernels._addmm_fp32 = lambda *_, **__: None
        utils.add_fused_lm_head(model, outputs=OUTPUTS)
        # by which trl knows whether it has to gather the head
        integration = importlib.import_module("transformers.integrations.deepspeed")
        integration.set_hf_deepspeed_config(integration.HfDeepSpeedConfig(_config(case)))


def _config(case: Case) -> dict[str, Any]:
    zero = {"stage": case.stage, **case.zero}
    for part in ("offload_optimizer", "offload_param"):
        if zero.pop(part, False):
            zero[part] = {"device": "cpu"}
    return {
        "train_micro_batch_size_per_gpu": case.batch,
        "gradient_accumulation_steps": case.accumulation,
        "gradient_clipping": 1.0,
        "zero_optimization": zero,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": case.dtype == "bfloat16"},
        "fp16": {"enabled": case.dtype == "float16", "initial_scale_power": 0},
        "steps_per_print": 10**9,
    }


def main() -> None:
    """Run the cases of this number of ranks, and write what they took."""
    warnings.simplefilter("ignore")
    deepspeed.utils.logger.setLevel(logging.ERROR)
    torch.set_num_threads(1)
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    with contextlib.redirect_stdout(sys.stderr):
        deepspeed.init_distributed("nccl")
        wanted = sys.argv[2:]
        found = {name: run(case) for name, case in CASES.items() if name in wanted}
    Path(sys.argv[1], str(dist.get_rank())).write_text(json.dumps(found))
    dist.barrier()


if __name__ == "__main__":
    main()
