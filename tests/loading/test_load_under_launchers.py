"""load_peft_on_rank in scripts as people launch them: what trains then is what plain peft trains, bit for bit.

The launchers are the real ones. Lightning Fabric and DeepSpeed are not among the tests' dependencies: where they are
installed, their cases run.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from models import Made
from torchrun import environment_of_ranks

START = """
import json, os, sys
from pathlib import Path

import torch
import torch.distributed as dist
from peft import PeftModel
from safe_loading import load_peft_on_rank
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

base, adapter, folder = sys.argv[1:4]
ROADS = ("plain", "folder", "model")
rows = [[(7 * row + column) % 90 + 4 for column in range(12)] for row in range(24)]


def loaded(road):
    if road == "plain":
        return PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter, is_trainable=True)
    if road == "model":
        return load_peft_on_rank(AutoModelForCausalLM.from_pretrained(base), adapter, is_trainable=True)
    return load_peft_on_rank(base, adapter, is_trainable=True)


def keep(road, **found):
    path = Path(folder, f"{road}-{dist.get_rank() if dist.is_initialized() else 0}.json")
    path.write_text(json.dumps(found))


def adapter_of(model):
    return {name: p.detach().tolist() for name, p in model.named_parameters() if "lora_" in name}
"""
WITH_TRAINER = """
def run(road, **options):
    chosen = {"per_device_train_batch_size": 2, "max_steps": 3, "logging_steps": 1, "learning_rate": 1e-2}
    quiet = {"save_strategy": "no", "report_to": [], "disable_tqdm": True, "use_cpu": True, "seed": 3, "data_seed": 3}
    arguments = TrainingArguments(f"{folder}/{road}", **chosen, **quiet, **options)
    model = loaded(road)
    data = [{"input_ids": row, "labels": row} for row in rows]
    trainer = Trainer(model, arguments, train_dataset=data)
    trainer.train()
    logs = [[log["loss"], log["grad_norm"]] for log in trainer.state.log_history if "loss" in log]
    trainer.save_model(f"{folder}/{road}")
    return {"logs": logs, "ranks": dist.get_world_size() if dist.is_initialized() else 1, "model": model}
"""
MAIN = """
def main():
    for road in ROADS:
        found = run(road)
        keep(road, adapter=adapter_of(found.pop("model")), **found)
"""
SCRIPT = """
if __name__ == "__main__":
    main()
    if dist.is_initialized():  # torch may abort a rank at its exit that still has its group
        dist.barrier()
        dist.destroy_process_group()
"""
NOTEBOOK = """
if __name__ == "__main__":
    from accelerate import debug_launcher  # what notebook_launcher does, on the CPU

    debug_launcher(main, num_processes=2)
"""
FABRIC = """
from lightning_fabric import Fabric


def main():
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    for road in ROADS:
        train(fabric, road)


def train(fabric, road):
    fabric.seed_everything(3)
    model = loaded(road)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    wrapped, optimizer = fabric.setup(model, optimizer)
    logs = []
    for step in range(3):
        batch = torch.tensor(rows[2 * step + fabric.global_rank :: 6][:2])
        loss = wrapped(input_ids=batch, labels=batch).loss
        fabric.backward(loss)
        fabric.clip_gradients(wrapped, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        logs.append(loss.item())
    keep(road, logs=logs, ranks=fabric.world_size, adapter=adapter_of(model))


if __name__ == "__main__":
    main()
"""
DEEPSPEED = """
import deepspeed


def main(stage):
    deepspeed.init_distributed("gloo")
    for road in ROADS:
        config = {
            "zero_optimization": {"stage": stage},
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_clipping": "auto",
            "optimizer": {"type": "AdamW", "params": {"lr": "auto", "torch_adam": True}},
            "zero_force_ds_cpu_optimizer": False,
        }
        found = run(road, deepspeed=config)
        with deepspeed.zero.GatheredParameters(list(found["model"].parameters()), enabled=stage == 3):
            adapter = adapter_of(found.pop("model"))
        keep(road, adapter=adapter, **found)


if __name__ == "__main__":
    main(int(sys.argv[4]))
"""
ROADS = ("plain", "folder", "model")
SLOW = pytest.mark.slow


def needs(package: str) -> Any:
    return pytest.mark.skipif(find_spec(package) is None, reason=f"{package} is not installed")


def free_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def trains_alike(script: str, command: list[str], folder: Path, made: Made, ranks: int, *args: str) -> None:
    """Run the script, which trains what each road loads; all ranks find the same after each."""
    base = made.llama()
    program = folder / "train.py"
    program.write_text(START + script)
    whole = [sys.executable, *command, str(program), str(base), str(made.adapter(base)), str(folder), *args]
    environment = {**environment_of_ranks(), "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    done = subprocess.run(whole, env=environment, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    plain, *own = ([json.loads(p.read_text()) for p in sorted(folder.glob(f"{road}-*.json"))] for road in ROADS)
    assert [found["ranks"] for found in plain] == [ranks] * ranks
    assert len({str(step) for step in plain[0]["logs"]}) == 3  # it learns
    assert own == [plain, plain]


TORCHRUN = ["-m", "torch.distributed.run", "--standalone"]
ACCELERATE = ["-m", "accelerate.commands.launch", "--num_machines", "1", "--mixed_precision", "no", "--multi_gpu"]


def test_accelerate_launch(tmp_path: Path, made: Made) -> None:
    command = [*ACCELERATE, "--num_processes", "2", "--main_process_port", free_port()]
    trains_alike(WITH_TRAINER + MAIN + SCRIPT, command, tmp_path, made, 2)


@SLOW
def test_torchrun_with_three_ranks(tmp_path: Path, made: Made) -> None:
    trains_alike(WITH_TRAINER + MAIN + SCRIPT, [*TORCHRUN, "--nproc-per-node=3"], tmp_path, made, 3)


@SLOW
def test_a_launcher_of_notebooks(tmp_path: Path, made: Made) -> None:
    trains_alike(WITH_TRAINER + MAIN + NOTEBOOK, [], tmp_path, made, 2)


@SLOW
@needs("lightning_fabric")
def test_lightning_fabric(tmp_path: Path, made: Made) -> None:
    trains_alike(FABRIC, [], tmp_path, made, 2)


@SLOW
@needs("deepspeed")
@pytest.mark.parametrize("stage", ["1", "2", "3"])
def test_deepspeed(tmp_path: Path, made: Made, stage: str) -> None:
    trains_alike(WITH_TRAINER + DEEPSPEED, [*TORCHRUN, "--nproc-per-node=2"], tmp_path, made, 2, stage)
