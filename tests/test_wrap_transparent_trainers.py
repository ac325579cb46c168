"""Wrapped models in the trainers: the memory, the loss and the checkpoints of the bare PeftModel."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedTokenizerFast, Trainer, TrainerCallback, TrainingArguments
from wrapping import Count, llama, peft_llama

from safe_loading import wrap_transparent

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
        "bytes": sum({p.untyped_storage().data_ptr(): p.nbytes for p in trainer.model.parameters()}.values()),
    }


def plain_trainer(model: Any, folder: Path, watch: Watch) -> Trainer:
    rows: Any = [{"input_ids": row} for row in ROWS]
    return Trainer(
        model, TrainingArguments(**options(folder)), train_dataset=rows, data_collator=collate, callbacks=[watch]
    )


def tokenizer() -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    words = {"<pad>": 0, "<s>": 1, "</s>": 2, **{f"w{number}": number for number in range(3, 101)}}
    inner = Tokenizer(WordLevel(words, unk_token="<pad>"))
    inner.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


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


@pytest.mark.parametrize("make", [plain_trainer, sft_trainer, dpo_trainer])
def test_a_trainer_sees_no_difference(make: Callable[..., Trainer], tmp_path: Path) -> None:
    bare = trained(make, peft_llama(llama()), tmp_path / "bare")
    model = peft_llama(llama())
    wrapped = trained(make, wrap_transparent(model, Count), tmp_path / "wrapped")
    assert wrapped == bare
    assert len(bare["log"]) == STEPS
    assert bare["layers"] == 3
    assert bare["saved"] > 0
    assert bare["reference"] is None  # the reference is the model with its adapter disabled
    assert model.calls >= STEPS * 4
    assert not isinstance(peft_llama(), Count)
