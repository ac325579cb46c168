"""What common mistakes cost: the peak of a training step with LoRA, done right and done wrong, as tables and pictures.

Both runs of a pair are forecast from the config alone, with the engines' own functions on a model on meta, and
`audit_model` looks at the wrong one. The estimates are older than the forecast, and of steps that are not known.
"""

from __future__ import annotations

import dataclasses
import json
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import transformers
from _common import GIB, headline, options, ratio, table, write_json
from _recorded import record, redraw
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from safe_loading import Workload, audit_model, meta_model, predict_memory
from safe_loading._core.bars import Mark, draw_bars
from safe_loading._core.cards import card_of
from safe_loading._memory.forecast.report import MemoryForecast, forecast_bar

LLAMA_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}
LLAMA_1B = {
    **LLAMA_8B,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "head_dim": 64,
    "tie_word_embeddings": True,
}
SHAPES: dict[str, dict[str, Any]] = {"Llama-3-8B": LLAMA_8B, "Llama-3.2-1B": LLAMA_1B}


class Distillation(nn.Module):
    """A student with an adapter and a teacher of the same shape.

    Args:
        student: What is trained.
        teacher: What it learns from.
        graph: Whether the teacher runs outside ``torch.no_grad()``.
    """

    def __init__(self, student: nn.Module, teacher: nn.Module, graph: bool) -> None:
        super().__init__()
        self.student = student
        self.teacher = teacher
        self.graph = graph

    def forward(self, input_ids: Any, attention_mask: Any = None, labels: Any = None, **kwargs: Any) -> Any:
        """Add the mean squared distance of the logits to the student's loss."""
        with torch.set_grad_enabled(self.graph):
            target = self.teacher(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).logits
        out = self.student(input_ids=input_ids, attention_mask=attention_mask, labels=labels, **kwargs)
        out.loss = out.loss + nn.functional.mse_loss(out.logits, target.detach())
        return out


@dataclasses.dataclass(frozen=True)
class Mistake:
    """A pair of runs.

    Attributes:
        estimate: The ratio that was estimated before there was a forecast.
        code: Of the finding that tells of it.
        right: Makes the model as it should be, of a config.
        wrong: The same with the mistake.
        optimizer: Of both runs.
    """

    estimate: str
    code: str
    right: Callable[[LlamaConfig], Any]
    wrong: Callable[[LlamaConfig], Any]
    optimizer: str = "adamw"


def _adapted(base: Any) -> Any:
    adapter = LoraConfig(r=16, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"], task_type="CAUSAL_LM")
    model = get_peft_model(base, adapter).train()
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable()
    return model


def _base(config: LlamaConfig, dtype: torch.dtype = torch.bfloat16) -> Any:
    return meta_model(config, dtype=dtype, auto_class=LlamaForCausalLM)


def _right(config: LlamaConfig) -> Any:
    return _adapted(_base(config))


def _prepared(config: LlamaConfig) -> Any:
    prepared = prepare_model_for_kbit_training(_base(config), use_gradient_checkpointing=False)  # type: ignore[no-untyped-call]  # peft leaves it untyped
    return _adapted(prepared)


def _distilled(config: LlamaConfig, *, graph: bool) -> Any:
    return Distillation(_right(config), _base(config).requires_grad_(graph), graph).train()


MISTAKES = {
    "checkpointing on, and eval()": Mistake("1.99x", "SL120", _right, lambda config: _right(config).eval()),
    "prepare_model_for_kbit_training of bf16": Mistake("1.37x", "SL108", _right, _prepared),
    "base in float32": Mistake("1.37x", "SL108", _right, lambda config: _adapted(_base(config, torch.float32))),
    **{
        f"nothing frozen, {optimizer}": Mistake(
            "1.47x-2.34x", "SL109", _right, lambda config: _right(config).requires_grad_(True), optimizer
        )
        for optimizer in ("sgd", "adamw_8bit", "adamw")
    },
    "teacher without no_grad": Mistake(
        "2.04x",
        "SL114",
        lambda config: _distilled(config, graph=False),
        lambda config: _distilled(config, graph=True),
    ),
}


DRAWN = {  # the bars of the audit's picture: each with what makes the model, and the step's optimizer
    "right": _right,
    "in eval()": MISTAKES["checkpointing on, and eval()"].wrong,
    "in float32": MISTAKES["base in float32"].wrong,
    "not frozen": MISTAKES["nothing frozen, adamw"].wrong,
}
MARKS = {"audit": ("rtx-4090", "a100-40gb", "l40"), "wrapping": ("h100",)}


def _forecast(model: Any, workload: Workload) -> MemoryForecast:
    vars(model)["train"] = lambda mode=True: model  # a forecast puts a model into train mode, and one pair is about it
    return predict_memory(model, workload)


def _peak(model: Any, workload: Workload) -> int:
    return _forecast(model, workload).allocated_peak_bytes


def steps(config: LlamaConfig) -> dict[str, dict[str, Any]]:
    """Return what the pictures are drawn from: forecasts of mistakes, and of a base in 8 bits with code around it."""
    workload = Workload.train(4, 1024)
    audit = {label: _forecast(make(config), workload) for label, make in DRAWN.items()}
    adapter = LoraConfig(r=16, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"], task_type="CAUSAL_LM")
    wrapping = {
        label: predict_memory(
            config,
            Workload.train(4, 1024, gradient_checkpointing=checkpointing, adapter=adapter),
            quantization_config={"load_in_8bit": True},
        )
        for label, checkpointing in (("transparent", True), ("nn.Module", False))
    }
    return {
        picture: {label: _facts(forecast) for label, forecast in found.items()}
        for picture, found in (("audit", audit), ("wrapping", wrapping))
    }


def _facts(forecast: MemoryForecast) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads(forecast.to_json())
    return {name: value for name, value in facts.items() if name not in ("modules", "total_bytes", "notes")}


def _forecast_of(facts: Mapping[str, Any]) -> MemoryForecast:
    return MemoryForecast(**{**facts, "workload": Workload.from_facts(facts["workload"])}, modules=(), notes=())


def pictures(facts: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Return the file names and the SVGs that a run's facts make."""
    titles = {
        "audit": "A training step of Llama-3-8B with LoRA, right and with mistakes",
        "wrapping": "Llama-3-8B in 8 bits, your code around it by wrap_transparent and by an nn.Module",
    }
    found = {}
    for picture, title in titles.items():
        bars = [forecast_bar(_forecast_of(each), label) for label, each in facts[picture].items()]
        found[f"{picture}.svg"] = draw_bars(bars, _marks(MARKS[picture]), title) + "\n"
    return found


def _marks(names: Sequence[str]) -> list[Mark]:
    return [Mark(card.name, card.memory) for card in map(card_of, names)]


def compare(config: LlamaConfig, names: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Yield the peaks of each pair, and the bytes of the finding."""
    for name in names:
        mistake = MISTAKES[name]
        workload = Workload.train(4, 1024, optimizer=mistake.optimizer)
        right, wrong = (_peak(make(config), workload) for make in (mistake.right, mistake.wrong))
        report = audit_model(mistake.wrong(config), workload, forecast=False)
        found = sum(finding.bytes for finding in report.findings if finding.code == mistake.code)
        yield {"mistake": name, "right": right, "wrong": wrong, "code": mistake.code, "found": found}


def main() -> None:
    """Forecast every pair and print the tables."""
    parser = options(__doc__, "two layers of each shape, and no picture is written")
    parser.add_argument("--redraw", action="store_true", help="draw what the last whole run forecast")
    arguments = parser.parse_args()
    if arguments.redraw:
        redraw("mistakes", pictures)
        return
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]  # untyped in transformers
    print(headline())
    found = {}
    for shape, sizes in SHAPES.items():
        layers = {"num_hidden_layers": 2} if arguments.quick else {}
        found[shape] = list(compare(LlamaConfig(**{**sizes, **layers}), MISTAKES))
        rows = [
            (
                row["mistake"],
                *(f"{row[key] / GIB:.1f}" for key in ("right", "wrong")),
                ratio(row["wrong"], row["right"]),
                MISTAKES[row["mistake"]].estimate,
                row["code"],
                f"{row['found'] / GIB:.1f}",
            )
            for row in found[shape]
        ]
        header = ("mistake", "right GiB", "wrong GiB", "ratio", "estimate", "found as", "its GiB")
        cut = ", two layers" if arguments.quick else ""
        print(table(f"{shape}{cut}, bf16, LoRA r=16 on q, k, v, o; 4 x 1024, checkpointing", header, rows))
    if not arguments.quick:
        drawn = {"headline": headline(), **steps(LlamaConfig(**SHAPES["Llama-3-8B"]))}
        record("mistakes", drawn, pictures)
    write_json(arguments.json, found)


if __name__ == "__main__":
    main()
