"""Random numbers drawn after from_pretrained in load_at_prepare: those of a plain run, so that adapters start alike.

Some classes draw first values for parameters that the folder has, and throw them away.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rank_server import RankServer
from tiny_models import causal_lm_classes, image_text_classes

SCRIPT = """
import contextlib, os, pathlib, random, shutil, sys, warnings
import numpy as np, torch, torch.distributed as dist, transformers
warnings.simplefilter("ignore")
from transformers import logging as transformers_logging
transformers_logging.set_verbosity_error()
transformers_logging.disable_progress_bar()
from safe_loading import load_at_prepare
from tiny_models import saved
dist.init_process_group("gloo")
folder, whole = pathlib.Path(sys.argv[1]), len(sys.argv) == 3 or dist.get_rank() == 0
if len(sys.argv) > 3:  # cpu_ram_efficient_loading: rank 0 alone loads in a plain run
    os.environ.update(ACCELERATE_USE_FSDP="true", FSDP_CPU_RAM_EFFICIENT_LOADING="true")

def loaded(name, lean):
    torch.manual_seed(0), random.seed(0), np.random.seed(0)
    with load_at_prepare() if lean else contextlib.nullcontext():
        model = getattr(transformers, name).from_pretrained(folder / name, attn_implementation="eager")
    return model, [torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())]

for name in sys.argv[2].split(","):
    if dist.get_rank() == 0:
        saved(name, folder / name)
    dist.barrier()
    (plain, drawn), (lean, of_lean) = loaded(name, False), loaded(name, True)
    values = dict(lean.named_parameters())
    report(**{name: {
        "draws": drawn == of_lean,
        "parameters": [each for each, p in plain.named_parameters() if whole and not torch.equal(p, values[each] + 0)],
    }})
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder / name)
dist.destroy_process_group()
"""
EVERY = sorted({*causal_lm_classes(), *image_text_classes()})
# The first draws on the device of a parameter, the second without one, the third in a function of a module; the first
# values of the fourth are computed from others, and the last draws nothing.
SAMPLE = ["Qwen3_5ForCausalLM", "Zamba2ForCausalLM", "MambaForCausalLM", "KimiLinearForCausalLM", "LlamaForCausalLM"]


def check(rank_server: RankServer, folder: Path, names: list[str], *options: str) -> None:
    args = [folder, ",".join(names), *options]
    found: list[dict[str, Any]] = rank_server.run(SCRIPT, 2, args=args, timeout=600).found
    for facts in found:
        assert facts == {name: {"draws": True, "parameters": []} for name in names}


def test_an_adapter_after_it_starts_from_the_draws_of_a_plain_run(rank_server: RankServer, tmp_path: Path) -> None:
    check(rank_server, tmp_path, [name for name in SAMPLE if name in EVERY])


def test_so_it_does_where_one_rank_alone_loads(rank_server: RankServer, tmp_path: Path) -> None:
    check(rank_server, tmp_path, [name for name in SAMPLE if name in EVERY], "one rank loads")


@pytest.mark.slow
def test_so_it_does_with_every_class(rank_server: RankServer, tmp_path: Path) -> None:
    check(rank_server, tmp_path, EVERY)
