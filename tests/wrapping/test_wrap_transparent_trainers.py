"""Wrapped models in the trainers: the memory, the loss and the checkpoints of the bare PeftModel."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import SIZES, tokenizer
from torch import nn
from transformers import LlamaConfig, LlamaModel, Trainer, TrainerCallback, TrainingArguments
from wrapped_models import Count, llama, peft_llama

from safe_loading import Transparent, WrapError, audit_model, unwrap_transparent, wrap_transparent

STEPS = 2
ROWS = [list(range(3, 3 + length)) for length in (5, 9, 14, 3, 11, 7, 12, 4, 6, 13, 8, 10, 5, 9, 3, 14)]


def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    longest = max(len(row["input_ids"]) for row in rows)
    ids = torch.tensor([row["input_ids"] + [0] * (longest - len(row["input_ids"])) for row in rows])
    mask = torch.tensor([[1] * len(row["input_ids"]) + [0] * (longest - len(row["input_ids"])) for row in rows])
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


class Watch(TrainerCallback):
    """Counts the layers that checkpoint when training begins."""

    layers = 0

    def on_step_begin(self, args: Any, state: Any, control: Any, model: nn.Module, **kwargs: Any) -> None:
        self.layers = sum(
            bool(getattr(module, "gradient_checkpointing", False)) and module.training
            for module in model.modules()
            if type(module).__name__.endswith("DecoderLayer")
        )


def options(folder: Path) -> dict[str, Any]:
    return {
        "output_dir": str(folder),
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 4,
        "gradient_checkpointing": True,
        "max_steps": STEPS,
        "logging_steps": 1,
        "save_steps": STEPS,
        "report_to": [],
        "use_cpu": True,
        "seed": 0,
        "disable_tqdm": True,
        "learning_rate": 1e-2,
    }


def trained(make: Callable[[Any, Path, Watch], Trainer], model: Any, folder: Path) -> dict[str, Any]:
    """Train, and return all that may not depend on a wrapper."""
    watch, saved = Watch(), [0]
    trainer = make(model, folder, watch)

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved[0] += tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        trainer.train()
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    weights = next(path for path in files if path.name == "adapter_model.safetensors")
    keys = ("loss", "grad_norm")
    return {
        "log": [{key: entry[key] for key in keys} for entry in trainer.state.log_history if "loss" in entry],
        "layers": watch.layers,
        "saved": saved[0],
        "files": [str(path.relative_to(folder)) for path in files],
        "weights": weights.read_bytes(),
        "reference": getattr(trainer, "ref_model", None),
        "fused": "forward" in vars(trainer.model.get_base_model()),
        "bytes": sum({p.untyped_storage().data_ptr(): p.nbytes for p in trainer.model.parameters()}.values()),
    }


def plain_trainer(model: Any, folder: Path, watch: Watch) -> Trainer:
    rows: Any = [{"input_ids": row} for row in ROWS]
    return Trainer(
        model, TrainingArguments(**options(folder)), train_dataset=rows, data_collator=collate, callbacks=[watch]
    )


def table(columns: dict[str, list[Any]]) -> Any:
    datasets = pytest.importorskip("datasets", reason="datasets is not installed: it comes with trl")
    from datasets.table import InMemoryTable

    # with a fingerprint: to compute one, datasets 5.2 pickles the table, which pyarrow 26 forbids
    return datasets.Dataset(InMemoryTable.from_pydict(columns), fingerprint="rows")


def sft_trainer(model: Any, folder: Path, watch: Watch) -> Trainer:
    trl = pytest.importorskip("trl", reason="trl is not installed: pip install trl")
    config = trl.SFTConfig(**options(folder), bf16=False, max_length=64)
    rows = table({"input_ids": ROWS})
    return trl.SFTTrainer(model, config, train_dataset=rows, processing_class=tokenizer(), callbacks=[watch])


def dpo_trainer(model: Any, folder: Path, watch: Watch) -> Trainer:
    trl = pytest.importorskip("trl", reason="trl is not installed: pip install trl")
    config = trl.DPOConfig(**options(folder), bf16=False, max_length=64)
    words = [" ".join(f"w{number}" for number in row) for row in ROWS]
    rows = table({"prompt": words, "chosen": words[::-1], "rejected": words[1:] + words[:1]})
    return trl.DPOTrainer(model, args=config, train_dataset=rows, processing_class=tokenizer(), callbacks=[watch])


class Loss(Transparent):
    """Doubles the loss, which changes no digit of the gradients."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        out = super().__call__(*args, **kwargs)
        out.loss = 2 * out.loss
        return out


class LogProbs(Transparent):
    """Doubles what trl's fused head returns for each token."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        out = super().__call__(*args, **kwargs)
        out.log_probs = 2 * out.log_probs
        return out


def three_arguments(model: Any) -> Any:
    """Replace the forward of the object by one that passes three arguments on, and not `num_items_in_batch`."""
    original = model.get_base_model().forward

    def forward(self: Any, input_ids: Any = None, attention_mask: Any = None, labels: Any = None, **_: Any) -> Any:
        return original(input_ids=input_ids, attention_mask=attention_mask, labels=labels)

    model.get_base_model().forward = types.MethodType(forward, model.get_base_model())
    return model


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, Any]]:
    """What each trainer does with the bare model, trained once."""

    @functools.cache
    def train(make: Callable[..., Trainer]) -> dict[str, Any]:
        return trained(make, peft_llama(llama()), tmp_path_factory.mktemp("bare"))

    return train


@pytest.mark.parametrize("make", [plain_trainer, sft_trainer, dpo_trainer])
def test_a_trainer_sees_no_difference(make: Callable[..., Trainer], bare: Any, tmp_path: Path) -> None:
    model = peft_llama(llama())
    assert trained(make, wrap_transparent(model, Count), tmp_path) == bare(make)
    assert len(bare(make)["log"]) == STEPS
    assert bare(make)["layers"] == 3
    assert bare(make)["saved"] > 0
    assert bare(make)["reference"] is None  # the reference is the model with its adapter disabled
    assert bare(make)["fused"] is (make is not plain_trainer)  # trl multiplies with the weight of the head itself
    assert model.calls >= STEPS * 4
    assert not isinstance(peft_llama(), Count)


@pytest.mark.parametrize(("make", "mixin"), [(plain_trainer, Loss), (sft_trainer, LogProbs)])
def test_the_loss_of_the_code_is_what_is_trained(
    make: Callable[..., Trainer], mixin: type[Transparent], bare: Any, tmp_path: Path
) -> None:
    twice = trained(make, wrap_transparent(peft_llama(llama()), mixin), tmp_path)
    for key in ("loss", "grad_norm"):
        assert twice["log"][0][key] == pytest.approx(2 * bare(make)["log"][0][key], rel=1e-6)


def test_a_forward_that_drops_an_argument_trains_another_loss(bare: Any, tmp_path: Path) -> None:
    """What the equality above would find: the trainer divides by the tokens of four batches, the forward by its own."""
    other = trained(plain_trainer, three_arguments(peft_llama(llama())), tmp_path)
    assert other["log"][0]["loss"] != pytest.approx(bare(plain_trainer)["log"][0]["loss"], rel=0.01)
    assert other["weights"] != bare(plain_trainer)["weights"]


@pytest.mark.parametrize(
    ("make", "mixin", "told"),
    [
        (plain_trainer, Loss, False),
        (sft_trainer, Loss, True),
        (sft_trainer, LogProbs, False),
        (dpo_trainer, Loss, True),
        (dpo_trainer, Count, False),
    ],
)
def test_a_trainer_that_makes_its_own_loss_is_told_of(
    make: Callable[..., Trainer], mixin: type[Transparent], told: bool, tmp_path: Path
) -> None:
    trainer = make(wrap_transparent(peft_llama(llama()), mixin), tmp_path, Watch())
    found = [finding for finding in audit_model(trainer.model, trainer=trainer).findings if finding.code == "SL125"]
    assert bool(found) is told
    if make is sft_trainer:
        batch = trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))
        losses = []
        for wrapped in (True, False):
            losses.append(float(trainer.compute_loss(trainer.model, dict(batch))))
            if wrapped:
                unwrap_transparent(trainer.model)
        assert (losses[0] == losses[1]) is told


class Tokens(nn.Module):
    """As sentence-transformers 6 calls a model: by its forward, with the entries of one dict."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, features: dict[str, torch.Tensor], **kwargs: Any) -> dict[str, torch.Tensor]:
        method = getattr(self.model, "forward")  # noqa: B009  # by the name of a config, as there
        return {**features, "embeddings": method(**features, **kwargs, return_dict=True).last_hidden_state}


class Pipeline(nn.Sequential):
    """As its SentenceTransformer."""

    def forward(self, input: dict[str, torch.Tensor], **kwargs: Any) -> dict[str, torch.Tensor]:  # type: ignore[override]  # noqa: A002
        for part in self:
            input = part(input, **kwargs)  # noqa: A001
        return input


class Halved(Transparent):
    """Code around a pipeline that makes embeddings."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        found = super().__call__(*args, **kwargs)
        return {**found, "embeddings": found["embeddings"] / 2}


def test_code_that_a_library_of_embeddings_goes_past_is_refused_and_goes_around_its_whole_model() -> None:
    made: Any = types.new_class("SentenceTransformer", (Pipeline,))
    made.__module__ = "sentence_transformers.sentence_transformer.model"
    pipeline = made(Tokens(LlamaModel(LlamaConfig(**SIZES)))).eval()
    with pytest.raises(WrapError, match="calls the forward of LlamaModel, which bypasses __call__"):
        wrap_transparent(pipeline[0].model, Halved, within=pipeline)
    features = {"input_ids": torch.ones(1, 4, dtype=torch.long)}
    before = pipeline(features)["embeddings"]
    assert all(proof.runs for proof in wrap_transparent(pipeline, Halved).wrap_report.proofs)
    assert torch.equal(pipeline(features)["embeddings"], before / 2)
