"""How far predict_memory is from what fms-acceleration's maintainers measured of fine-tuning on A100s, row by row.

The rows are those of the project's ``scripts/benchmarks/refs/a100_80gb.csv`` and ``a100_80gb_granite.csv``:
``max_memory_allocated`` of a rank, one GPU and two (FSDP1 by accelerate), full fine-tuning, LoRA, NF4 and GPTQ. The
engines were torch 2.4, transformers 4.45 to 4.48, peft 0.12 and 0.13, trl 0.11 to 0.13 and accelerate 0.34 and 1.0.
These things differ in those of today, and are put in:

- the loss copies the logits in float32 without their last token (``.contiguous()``), where transformers 5 pads the
  labels; that of gpt_bigcode copies them in 16 bits;
- the gpt_bigcode of transformers 4.45 filled its cache under gradient checkpointing, too, with views that keep the
  queries of all layers until the output is dropped;
- the Granite of transformers 4.45 returned the logits in float32 alone, and kept the hidden states beside them;
- trl cast the norms of a base in 4 bits to float32 where FSDP did not shard it, so that the sums of layers, which
  checkpoints keep, are in float32 too;
- checkpoints are reentrant, which transformers 5 no longer is by default;
- a checkpoint lies around a unit of FSDP1, and not inside it. Units that are frozen then keep each layer's input and
  its gradient to the end of the backward pass, since FSDP1's hook on the input holds it.

Not forecast are rows of the project's own Triton kernels (``foak``), rows that ran out of memory, and those that
today's engines run otherwise: each is listed with its reason. Give the file:
``python benchmarks/fms_acceleration.py CSV``.
"""

from __future__ import annotations

import contextlib
import csv
import functools
import sys
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast
from unittest import mock

import torch
from _common import headline, options, table, with_published, write_json
from peft import LoraConfig
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.loss import loss_utils
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import CausalLMOutputWithCrossAttentions, CausalLMOutputWithPast
from transformers.models.gpt_bigcode.modeling_gpt_bigcode import GPTBigCodeAttention, GPTBigCodeForCausalLM
from transformers.models.granite.modeling_granite import GraniteForCausalLM, GraniteRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.mistral.modeling_mistral import MistralRMSNorm

from safe_loading import Spread, Workload, predict_memory
from safe_loading._model.formats import gptq
from safe_loading._model.formats.packed_linear import PackedLinear
from safe_loading.errors import SafeLoadingError

QUICK = 2
WITHIN = 2.0  # percent
AMPERE = (8, 0)
MISTRAL = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 32768,
}
LLAMA_70B = {
    "vocab_size": 32000,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
}
SANTACODER = {"vocab_size": 49280, "n_positions": 2048, "n_embd": 2048, "n_layer": 24, "n_head": 16, "n_inner": 8192}
POWERLM = {
    "vocab_size": 49152,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 40,
    "num_attention_heads": 36,
    "num_key_value_heads": 36,
    "attention_multiplier": 0.015625,
    "embedding_multiplier": 12.0,
    "logits_scaling": 9.0,
    "residual_multiplier": 0.22,
    "tie_word_embeddings": True,
}
MODELS: Mapping[str, tuple[str, str, dict[str, Any], int]] = {  # kind, class, sizes, tokens of a row
    "gpt_bigcode-santacoder": ("gpt_bigcode", "GPTBigCodeForCausalLM", SANTACODER, 2048),
    "Mistral-7B-v0.1": ("mistral", "MistralForCausalLM", {**MISTRAL, "sliding_window": 4096}, 4096),
    "Mixtral-8x7B-Instruct-v0.1": ("mixtral", "MixtralForCausalLM", MISTRAL, 4096),
    "Llama-2-70b-hf": ("llama", "LlamaForCausalLM", LLAMA_70B, 4096),
    "PowerLM-3b": ("granite", "GraniteForCausalLM", POWERLM, 4096),
    "Llama-2-70B": ("llama", "LlamaForCausalLM", LLAMA_70B, 4096),
}
NF4 = {
    "quant_method": "bitsandbytes",
    "load_in_4bit": True,
    "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_use_double_quant": True,
    "bnb_4bit_compute_dtype": "bfloat16",
    "bnb_4bit_quant_storage": "bfloat16",
}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": True}
GPTQ_70B = {**GPTQ, "group_size": -1}  # as its publisher made it, for less memory


@dataclass(frozen=True)
class Row:
    """A row of the file."""

    model: str  # without its owner
    method: str  # "full", "lora", "nf4" or "gptq"
    gpus: int
    rows: int  # of a micro-batch
    measured: int
    norms_cast: bool  # to float32, by trl
    why_not: str  # no forecast can be made

    @property
    def name(self) -> str:
        """The row in a table."""
        method = f"{self.method}{' by trl' * self.norms_cast}"
        return f"{self.model.partition('-v0')[0]} {method}, {self.gpus} GPU{'s' * (self.gpus > 1)}, {self.rows} rows"


def read(file: Path) -> list[Row]:
    """Return the rows of the file."""
    with file.open(newline="", encoding="utf-8") as lines:
        return [_row(cells) for cells in csv.DictReader(lines)]


def _row(cells: Mapping[str, str]) -> Row:
    framework = cells["framework_config"]
    model = cells["model_name_or_path"].partition("/")[2].removesuffix("-GPTQ")
    method = "gptq" if "gptq" in framework else "nf4" if "bnb" in framework else cells["peft_method"] or "full"
    measured = int(cells["mem_peak_torch_mem_alloc_in_bytes"] or 0)
    reasons = {
        "foak: the project's own Triton kernels": "foak" in framework,
        "ran out of memory": not measured,
        "transformers 5 holds the experts of a layer in one tensor, which is not quantized": "Mixtral" in model
        and method not in ("full", "lora"),
    }
    why_not = next((reason for reason, holds in reasons.items() if holds), "")
    gpus, rows = int(cells["num_gpus"]), int(cells["per_device_train_batch_size"])
    return Row(model, method, gpus, rows, measured, framework == "baseline-peft-bnb" and gpus == 1, why_not)


def config_of(row: Row) -> PreTrainedConfig:
    """Return the config of a row's model, as far as memory depends on it."""
    kind, architecture, sizes, _ = MODELS[row.model]
    config: PreTrainedConfig = AutoConfig.for_model(kind, architectures=[architecture], **sizes)
    config._experts_implementation = "eager"  # one expert after the other, as transformers 4.45
    return config


def forecast(row: Row) -> int:
    """Return the bytes that are allocated at most on a rank."""
    half = "float16" if row.method == "gptq" else "bfloat16"
    quantization = {"gptq": GPTQ_70B if "70B" in row.model else GPTQ, "nf4": NF4}.get(row.method)
    layers = ["q_proj", "k_proj", "v_proj", "o_proj", "c_attn"]
    adapter = LoraConfig(r=16, lora_alpha=16, lora_dropout=0.1, target_modules=layers, task_type="CAUSAL_LM")
    step = Workload.train(
        row.rows,
        MODELS[row.model][3],
        gradient_checkpointing=True,
        optimizer="adamw_foreach",
        adapter=None if row.method == "full" else adapter,
        autocast=half if quantization else None,
    )
    # a Trainer in 16 bits has accelerate's mixed precision too
    mixed: dict[str, Any] = {"param_dtype": half, "reduce_dtype": half} if quantization else {}
    with publishers_engines(row):
        found = predict_memory(
            config_of(row),
            step,
            capability=AMPERE,
            dtype=getattr(torch, half),
            attn_implementation="flash_attention_2",
            quantization_config=quantization,
            prepare_for_kbit="none",
            spread=Spread.fsdp1(row.gpus, **mixed) if row.gpus > 1 else None,
        )
    return found.allocated_peak_bytes


@contextlib.contextmanager
def publishers_engines(row: Row) -> Iterator[None]:
    """Put in what differs in the engines of the run: the loss, and the checkpoints and where they lie."""
    loss = _loss_in_16_bits if "santacoder" in row.model else _loss_of_copies
    enable = PreTrainedModel.activation_checkpointing_enable

    def reentrant(model: Any, *_: Any, **__: Any) -> None:
        enable(model, {"use_reentrant": True})

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(loss_utils.LOSS_MAPPING, {"ForCausalLM": loss}))
        stack.enter_context(mock.patch.object(PreTrainedModel, "activation_checkpointing_enable", reentrant))
        if "PowerLM" in row.model:
            stack.enter_context(mock.patch.object(GraniteForCausalLM, "forward", _forward_of_4_45))
        if "santacoder" in row.model:
            presents = _Presents()
            stack.enter_context(mock.patch.object(GPTBigCodeAttention, "forward", presents.attend))
            stack.enter_context(mock.patch.object(GPTBigCodeForCausalLM, "forward", presents.forward))
        for norm in (GraniteRMSNorm, LlamaRMSNorm, MistralRMSNorm) if row.norms_cast else ():
            stack.enter_context(mock.patch.object(norm, "__init__", _norm_in_float32))
        if row.method == "gptq":
            stack.enter_context(mock.patch.object(gptq, "by_gptq_in_torch", _by_auto_gptq))
        if row.gpus > 1:
            stack.enter_context(mock.patch.object(FullyShardedDataParallel, "__call__", _checkpointed))
        yield


def _checkpointed(unit: FullyShardedDataParallel, *args: Any, **kwargs: Any) -> Any:
    """Call a unit, in a checkpoint around it if it is a layer, which would else make one inside."""
    layer = unit.module
    if not (isinstance(layer, GradientCheckpointingLayer) and unit.training):
        return torch.nn.Module.__call__(unit, *args, **kwargs)

    def call(*args: Any) -> Any:
        with mock.patch.object(layer, "gradient_checkpointing", False):
            return torch.nn.Module.__call__(unit, *args, **kwargs)

    return checkpoint(call, *args, use_reentrant=True)


class _DequantizedTwice(torch.autograd.Function):
    """A product with a weight that AutoGPTQ's Triton kernel writes anew for the backward pass."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, inside: int, outside: int) -> torch.Tensor:
        ctx.shape = inside, outside
        return torch.matmul(rows, rows.new_empty(ctx.shape))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return torch.matmul(gradients[0], gradients[0].new_empty(ctx.shape).T), None, None


def _by_auto_gptq(rows: torch.Tensor, layer: PackedLinear) -> torch.Tensor:
    product: torch.Tensor = _DequantizedTwice.apply(rows, layer.in_features, layer.out_features)  # type: ignore[no-untyped-call]  # of torch
    return product


def _norm_in_float32(self: Any, hidden_size: int, eps: float = 1e-6) -> None:
    torch.nn.Module.__init__(self)
    self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=torch.float32))
    self.variance_epsilon = eps


@functools.wraps(GraniteForCausalLM.forward)
def _forward_of_4_45(
    self: Any, input_ids: torch.Tensor, labels: torch.Tensor, num_items_in_batch: object = None, **kwargs: Any
) -> CausalLMOutputWithPast:
    """Run the model as transformers 4.45 did: it kept the logits in float32 alone, and the hidden states beside."""
    hidden = self.model(input_ids=input_ids, **kwargs).last_hidden_state
    logits = self.lm_head(hidden)
    logits = logits / self.config.logits_scaling
    logits = logits.float()
    return CausalLMOutputWithPast(loss=_loss_in_16_bits(logits, labels, self.config.vocab_size), logits=logits)


class _Presents:
    """The cache of GPTBigCode in transformers 4.45, which it fills under gradient checkpointing, too.

    It has views of what ``c_attn`` returned for queries, keys and values, so that all of that stays until the Trainer
    drops the output.
    """

    def __init__(self) -> None:
        self._kept: list[torch.Tensor] | None = None  # only in the forward pass, and not where a checkpoint repeats it
        attend, forward = GPTBigCodeAttention.forward, GPTBigCodeForCausalLM.forward
        cache = cast("Any", self)

        @functools.wraps(attend)
        def attend_and_keep(attention: Any, hidden: torch.Tensor, layer_past: object = None, **kwargs: Any) -> Any:
            return attend(attention, hidden, layer_past=cache, **kwargs)

        @functools.wraps(forward)
        def forward_and_keep(model: Any, *args: Any, **kwargs: Any) -> CausalLMOutputWithCrossAttentions:
            kept = self._kept = []
            out: Any = forward(model, *args, **kwargs)
            self._kept = None
            presents = cast("Any", tuple(kept))
            return CausalLMOutputWithCrossAttentions(loss=out.loss, logits=out.logits, past_key_values=presents)

        self.attend, self.forward = attend_and_keep, forward_and_keep

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keep the keys and values of a layer."""
        if self._kept is not None:
            self._kept += [keys, values]
        return keys, values


def _loss_of_copies(logits: torch.Tensor, labels: torch.Tensor, vocab_size: int, *_: Any, **__: Any) -> torch.Tensor:
    return _loss_in_16_bits(logits.float(), labels, vocab_size)


def _loss_in_16_bits(logits: torch.Tensor, labels: torch.Tensor, vocab_size: int, *_: Any, **__: Any) -> torch.Tensor:
    shifted = logits[..., :-1, :].contiguous()
    return torch.nn.functional.cross_entropy(shifted.view(-1, vocab_size), labels[..., 1:].contiguous().view(-1))


def main() -> None:
    """Compare and print."""
    where = "a file of fms-acceleration: scripts/benchmarks/refs/a100_80gb.csv of its repository, or ..._granite.csv"
    args = with_published(options(__doc__, f"the first {QUICK} rows"), "CSV", where)
    warnings.simplefilter("ignore")
    print(headline())
    found, left_out = dict[Row, int](), dict[str, int]()
    rows = read(args.published)
    for row in [row for row in rows if not row.why_not][: QUICK if args.quick else None]:
        try:
            found[row] = forecast(row)
            print(f"{row.name}: {_off(row, found[row]):+.3f} %", file=sys.stderr, flush=True)
        except SafeLoadingError as error:
            reason = " ".join(str(error).split())[:160]
            left_out[f"{row.name}: {reason}"] = 1
    for row in rows:
        if row.why_not:
            left_out[row.why_not] = left_out.get(row.why_not, 0) + 1
    print(_report(found))
    for reason, count in left_out.items():
        print(f"no forecast of {count}: {reason}")
    write_json(
        args.json, {"rows": [{"row": row.name, "measured": row.measured, "ours": n} for row, n in found.items()]}
    )


def _off(row: Row, forecast: int) -> float:
    return 100 * (forecast / row.measured - 1)


def _report(found: Mapping[Row, int]) -> str:
    ordered = sorted(found, key=lambda row: _off(row, found[row]))
    cells = [(row.name, row.measured, found[row], f"{_off(row, found[row]):+.3f}") for row in ordered]
    near = sum(abs(_off(row, found[row])) <= WITHIN for row in found)
    return table(
        "Allocated at most, from the lowest forecast to the highest",
        ("row", "measured bytes", "forecast", "%"),
        cells,
        [f"{near} of {len(found)} within {WITHIN:g} %; lowest {cells[0][-1]} %, highest {cells[-1][-1]} %"],
    )


if __name__ == "__main__":
    main()
