"""A Trainer's checkpoints of which a killed save left half: what is missing, and the last whole one to resume from."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from faults.checkpoints import write_adapter, write_model

from safe_loading import check_checkpoint
from safe_loading._checkpoint.hub import resolve, small_files
from safe_loading._core.report import Finding

# in the order in which transformers writes them
STATES = ("optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json")


def write_one_file(folder: Path) -> Path:
    write_model(folder, {"model.safetensors": {"a": 4, "b": 2}})
    (folder / "model.safetensors.index.json").unlink()
    return folder


def write_shards(folder: Path) -> Path:
    return write_model(folder, {"model-1.safetensors": {"a": 4}, "model-2.safetensors": {"b": 2}})


def write_checkpoint(folder: Path, write: Callable[[Path], Path] = write_one_file) -> Path:
    write(folder)
    for name in STATES[:3]:
        torch.save({"state": torch.zeros(3)}, folder / name)
    (folder / STATES[3]).write_text('{"global_step": 3, "log_history": [{"loss": NaN}]}\n')
    return folder


def half(path: Path) -> Finding | None:
    return next(
        (each for each in check_checkpoint(path, headers=True).findings if each.code == "half-checkpoint"), None
    )


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for step in (900, 1000):
        write_checkpoint(tmp_path / "run" / f"checkpoint-{step}")
    return tmp_path / "run"


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-20])


def without(*names: str, torn: str | None = None) -> Callable[[Path], None]:
    def kill(folder: Path) -> None:
        for name in names:
            (folder / name).unlink()
        if torn is not None:
            cut(folder / torn)

    return kill


KILLED: dict[str, tuple[Callable[[Path], None], str]] = {
    "before the weights": (
        without("model.safetensors", *STATES),
        "'model.safetensors', 'optimizer.pt', 'scheduler.pt', 'rng_state.pth', 'trainer_state.json' are missing",
    ),
    "in the weights": (
        without(*STATES, torn="model.safetensors"),
        "'optimizer.pt', 'scheduler.pt', 'rng_state.pth', 'trainer_state.json' are missing, "
        "'model.safetensors' is damaged",
    ),
    "in the optimizer": (
        without(*STATES[1:], torn="optimizer.pt"),
        "'scheduler.pt', 'rng_state.pth', 'trainer_state.json' are missing, 'optimizer.pt' is damaged",
    ),
    "before the random numbers": (without(*STATES[2:]), "'rng_state.pth', 'trainer_state.json' are missing"),
    "before the state": (without(STATES[3]), "'trainer_state.json' is missing"),
    "in the state": (without(torn=STATES[3]), "'trainer_state.json' is damaged"),
}


@pytest.mark.parametrize("when", KILLED)
def test_a_save_that_was_killed_is_named_with_the_last_whole_one(run: Path, when: str) -> None:
    kill, said = KILLED[when]
    kill(run / "checkpoint-1000")
    finding = half(run / "checkpoint-1000")
    assert finding is not None
    assert f": {said}. As the latest of its run it is what resume_from_checkpoint=True takes." in finding.message
    whole = run / "checkpoint-900"
    assert f"resume_from_checkpoint={str(whole)!r}" in finding.fix
    assert half(whole) is None
    first, *halves = check_checkpoint(run).findings
    assert first.code == "not-a-folder"
    assert f"pass {str(whole)!r}, the latest whole one of them" in first.fix
    assert halves == [finding]


def test_of_a_run_without_a_whole_one_the_training_starts_anew(run: Path) -> None:
    for folder in run.iterdir():
        without("trainer_state.json")(folder)
    finding = half(run / "checkpoint-900")
    assert finding is not None
    assert "train from the start" in finding.fix
    assert "As the latest" not in finding.message
    shutil.rmtree(run)
    assert resolve(write_checkpoint(run / "checkpoint-1"), small_files).folder == run / "checkpoint-1"
    assert half(run / "checkpoint-1") is None  # as the fix says, once it is trained


def test_a_run_that_may_not_be_listed(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = Path.iterdir

    def iterdir(path: Path) -> Iterator[Path]:
        if path == run:
            raise PermissionError(13, "Permission denied", str(path))
        return listed(path)

    (run / "checkpoint-1000" / "rng_state.pth").unlink()
    monkeypatch.setattr(Path, "iterdir", iterdir)
    found = half(run / "checkpoint-1000")
    assert found is not None
    assert "'rng_state.pth' is missing" in found.message
    assert "As the latest" not in found.message


def only_the_model(folder: Path) -> None:
    without(*STATES[:3])(folder)


def of_ranks(folder: Path) -> None:
    for rank in (1, 0):
        shutil.copy(folder / "rng_state.pth", folder / f"rng_state_{rank}.pth")
    without("rng_state.pth")(folder)


def sharded(folder: Path) -> None:
    without("model.safetensors", "optimizer.pt")(folder)
    for name in ("optimizer_0", "pytorch_model_fsdp_0"):
        (folder / name).mkdir()
        (folder / name / ".metadata").touch()


def deepspeed(folder: Path) -> None:
    without("optimizer.pt", "scheduler.pt")(folder)
    (folder / "global_step1000").mkdir()


def of_accelerate(folder: Path) -> None:
    """What scripts of diffusers save under the same names of folders."""
    shutil.rmtree(folder)
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(torch.nn.Linear(2, 2))
    optimizer = accelerator.prepare(torch.optim.AdamW(model.parameters()))
    accelerator.prepare(torch.optim.lr_scheduler.ConstantLR(optimizer.optimizer))
    accelerator.save_state(str(folder))


def of_llama_factory(folder: Path) -> None:
    """Its second trainer keeps the weights and each state in folders of their own."""
    without(*(name for name in STATES if name != "scheduler.pt"), "model.safetensors", "config.json")(folder)
    write_adapter(folder / "model")
    for name in ("metadata.json", "CHECKPOINT_COMPLETE"):
        (folder / name).write_text("{}")


@pytest.mark.parametrize("change", [only_the_model, of_ranks, sharded, deepspeed, of_accelerate, of_llama_factory])
def test_what_other_trainings_save_is_whole(run: Path, change: Callable[[Path], None]) -> None:
    latest = run / "checkpoint-1000"
    change(latest)
    assert half(latest) is None
    assert f"pass {str(latest)!r}, the latest of them" in check_checkpoint(run).findings[0].fix


def test_the_parts_of_ranks_that_are_not_there_are_named(run: Path) -> None:
    latest = run / "checkpoint-1000"
    of_ranks(latest)
    sharded_too = run / "checkpoint-900"
    sharded(sharded_too)
    without("rng_state_0.pth")(latest)
    (sharded_too / "optimizer_0" / ".metadata").unlink()
    assert "'rng_state_0.pth' is missing" in str(half(latest))
    assert "'optimizer_0' is damaged" in str(half(sharded_too))


def test_of_weights_in_several_files_the_one_is_named(tmp_path: Path) -> None:
    whole = write_checkpoint(tmp_path / "checkpoint-1", write_shards)
    assert half(whole) is None
    without("model-2.safetensors")(whole)
    assert "'model-2.safetensors' is missing" in str(half(whole))


def test_adapters_and_weights_alone_are_told_apart(tmp_path: Path) -> None:
    whole = write_checkpoint(tmp_path / "checkpoint-1", write_adapter)
    assert half(whole) is None
    without("adapter_model.safetensors")(whole)
    assert "'adapter_model.safetensors' is missing" in str(half(whole))
    assert half(write_shards(tmp_path / "other" / "checkpoint-500")) is None  # of a hub, which no Trainer resumes
    assert half(write_shards(tmp_path / "model")) is None


def test_a_trainer_resumes_from_the_one_that_is_named(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    def trainer() -> Any:
        torch.manual_seed(0)
        sizes: Any = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "vocab_size": 11}
        model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, **sizes))
        arguments = TrainingArguments(
            output_dir=str(tmp_path / "run"), max_steps=3, save_steps=1, use_cpu=True, report_to=[], disable_tqdm=True
        )
        data: Any = [{"input_ids": torch.arange(8), "labels": torch.arange(8)}] * 8
        return Trainer(model, arguments, train_dataset=data)

    wanted = trainer()
    wanted.train()
    without(*STATES[1:], torn="optimizer.pt")(tmp_path / "run" / "checkpoint-3")
    with pytest.raises(FileNotFoundError, match=r"checkpoint-3.trainer_state\.json"):
        trainer().train(resume_from_checkpoint=True)
    finding = half(tmp_path / "run" / "checkpoint-3")
    assert finding is not None
    named = re.search("resume_from_checkpoint='(.+?)'", finding.fix)
    assert named is not None
    resumed = trainer()
    resumed.train(resume_from_checkpoint=named[1])
    for one, other in zip(wanted.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(one, other)
