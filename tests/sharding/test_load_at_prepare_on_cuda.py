"""load_at_prepare under accelerate and Trainer on CUDA devices over NCCL: the plain script's run, to the last bit."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from cuda_runs import CudaRunner

pytestmark = pytest.mark.gpu

SCRIPT = """
    import pathlib, time, warnings
    warnings.simplefilter("ignore")
    import datasets
    from transformers import logging as transformers_logging
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    datasets.disable_progress_bars()
    import torch.distributed as dist
    from trainer_matrix import Case, outcome, save_base

    folder, (trainer, what, checkpoints, version) = pathlib.Path(sys.argv[1]), sys.argv[2:]
    rank = int(os.environ["RANK"])
    if rank == 0:
        save_base(folder / "base")
        (folder / "saved").touch()
    while not (folder / "saved").exists():
        time.sleep(0.1)
    found = outcome(Case(trainer, what, checkpoints, int(version)), folder / "base", folder)
    report(found=found, backend=dist.get_backend(), contexts=contexts())
    dist.destroy_process_group()
"""
CASES = [
    pytest.param("Trainer", "LoRA", "SHARDED", "2", id="Trainer"),
    pytest.param("accelerate", "full", "FULL", "2", id="accelerate", marks=pytest.mark.slow),
    pytest.param("accelerate", "LoRA", "none", "1", id="accelerate, FSDP1", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("trainer", "what", "checkpoints", "version"), CASES)
def test_a_script_with_one_line_more_trains_as_without(
    simulated_cuda: CudaRunner, tmp_path: Path, trainer: str, what: str, checkpoints: str, version: str
) -> None:
    """Losses, norms and weights of four steps, and again from the checkpoint of the second."""
    arguments = [tmp_path, trainer, what, checkpoints, version]
    found = simulated_cuda.run_ranks(SCRIPT, 2, args=arguments, env={"SIMCUDA_VALUES": "all"}, timeout=400)
    resumed = {} if checkpoints == "none" else {"resumed log": True, "resumed": []}
    for rank, facts in enumerate(found):
        assert facts["found"] == {"steps": 4, "log": True, "weights": [], "largest": 0.0, **resumed}
        assert (facts["backend"], facts["contexts"]) == ("nccl", [rank])
