"""The rows of predict_on_cuda.py: models, steps, cards and roads onto the card, and how a row is forecast and run."""

from __future__ import annotations

import importlib
import itertools
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from _common import ROOT
from accelerate.utils import convert_to_fp32
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from transformers import BitsAndBytesConfig, PreTrainedConfig

from safe_loading import MemoryForecast, Workload, predict_memory

sys.path.append(str(ROOT / "tests" / "simulated_cuda"))
sparse_checkpoint: Any = importlib.import_module("sparse_checkpoint").sparse_checkpoint  # of the folder above

CAPABILITIES = {"T4": (7, 5), "A100": (8, 0), "H100": (9, 0)}
STEPS = 3
DECODE_STEPS = 2
NEVER = 1 << 20  # a token that no row is given
IMAGE_TOKEN = 5


@dataclass(frozen=True)
class Row:
    """One step of one model on one card. `method` is how it is trained, or ``generate``."""

    model: str
    method: str
    card: str
    road: str  # to, device_map or made: how the weights come to the card
    attention: str = "sdpa"
    dtype: str = "bfloat16"
    optimizer: str = "adamw"
    checkpointing: bool = False
    batch: int = 2
    length: int = 128
    autocast: str | None = None

    def __str__(self) -> str:
        """Return the row in one line."""
        shown = [
            self.model,
            self.dtype,
            self.card,
            self.road,
            self.attention,
            f"{self.batch}x{self.length}",
            self.method,
        ]
        if self.method != "generate":
            shown += [self.optimizer, *(["checkpointing"] if self.checkpointing else [])]
        shown += [f"autocast to {self.autocast}"] if self.autocast else []
        return " ".join(shown)

    @property
    def workload(self) -> Workload:
        """What is forecast, adapters included."""
        if self.method == "generate":
            return Workload.generate(self.batch, self.length, decode_steps=DECODE_STEPS)
        return Workload.train(
            self.batch,
            self.length,
            gradient_checkpointing=self.checkpointing,
            optimizer=self.optimizer,
            adapter=self.adapter,
            autocast=self.autocast,
        )

    @property
    def adapter(self) -> LoraConfig | None:
        """The adapter's config; None where all weights are trained, or nothing."""
        if self.method not in ("lora", "dora", "nf4"):
            return None
        return LoraConfig(r=8, target_modules=MODELS[self.model].targets, use_dora=self.method == "dora")


@dataclass(frozen=True)
class Model:
    """An architecture: its family, its class, its config, and the layers that get an adapter."""

    family: str
    kind: str
    config: Callable[[], PreTrainedConfig]
    targets: Any = "all-linear"
    image: tuple[int, ...] | None = None  # the shape of the pixels of one row


def _small(kind: str, **sizes: Any) -> Callable[[], PreTrainedConfig]:
    return lambda: getattr(transformers, kind)(**sizes)


_WIDE = {
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "vocab_size": 4000,
}
_GROUPED = {**_WIDE, "num_key_value_heads": 2}
_LLAMA_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}
_ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]


def _llava() -> PreTrainedConfig:
    vision = transformers.CLIPVisionConfig(
        hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4, image_size=56, patch_size=14
    )
    text = _small("LlamaConfig", **_GROUPED)()
    return transformers.LlavaConfig(
        vision_config=vision, text_config=text, image_token_index=IMAGE_TOKEN, image_seq_length=16
    )


MODELS = {
    "llama": Model("dense", "LlamaForCausalLM", _small("LlamaConfig", **_WIDE)),
    "llama-30m": Model(
        "dense",
        "LlamaForCausalLM",
        _small(
            "LlamaConfig",
            **_WIDE | {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8, "vocab_size": 8000},
        ),
    ),
    "gpt2": Model("dense", "GPT2LMHeadModel", _small("GPT2Config", n_embd=192, n_layer=3, n_head=6, vocab_size=4000)),
    "qwen3": Model("grouped heads", "Qwen3ForCausalLM", _small("Qwen3Config", **_GROUPED, head_dim=64)),
    "mistral": Model("grouped heads", "MistralForCausalLM", _small("MistralConfig", **_GROUPED)),
    "gemma3": Model("grouped heads", "Gemma3ForCausalLM", _small("Gemma3TextConfig", **_GROUPED, head_dim=64)),
    "mixtral": Model(
        "MoE",
        "MixtralForCausalLM",
        _small("MixtralConfig", **_GROUPED, num_local_experts=4, num_experts_per_tok=2),
        _ATTENTION,
    ),
    "qwen3-moe": Model(
        "MoE",
        "Qwen3MoeForCausalLM",
        _small(
            "Qwen3MoeConfig", **_GROUPED, head_dim=32, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=128
        ),
        _ATTENTION,
    ),
    "mamba": Model(
        "state space",
        "MambaForCausalLM",
        _small("MambaConfig", hidden_size=128, num_hidden_layers=2, vocab_size=4000),
        ["in_proj", "x_proj"],
    ),
    "falcon-h1": Model(
        "state space",
        "FalconH1ForCausalLM",
        _small(
            "FalconH1Config",
            **_GROUPED | {"num_hidden_layers": 2},
            mamba_d_ssm=256,
            mamba_n_heads=8,
            mamba_d_head=32,
            mamba_d_state=32,
            mamba_chunk_size=64,
        ),
        _ATTENTION,
    ),
    "t5": Model(
        "encoder-decoder",
        "T5ForConditionalGeneration",
        _small(
            "T5Config", d_model=256, d_ff=512, d_kv=32, num_layers=2, num_heads=8, vocab_size=4000, dropout_rate=0.0
        ),
        ["q", "v"],
    ),
    "bart": Model(
        "encoder-decoder",
        "BartForConditionalGeneration",
        _small(
            "BartConfig",
            d_model=256,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=8,
            decoder_attention_heads=8,
            encoder_ffn_dim=512,
            decoder_ffn_dim=512,
            vocab_size=4000,
        ),
        ["q_proj", "v_proj"],
    ),
    "llava": Model("vision-language", "LlavaForConditionalGeneration", _llava, ["q_proj", "v_proj"], (3, 56, 56)),
    "bert": Model(
        "encoder",
        "BertForMaskedLM",
        _small("BertConfig", **_WIDE | {"num_hidden_layers": 2}),
        ["query", "value"],
    ),
    "llama-8b": Model("8B", "LlamaForCausalLM", _small("LlamaConfig", **_LLAMA_8B), _ATTENTION),
}
CAUSAL = [name for name, model in MODELS.items() if model.family in ("dense", "grouped heads", "MoE", "state space")]


def rows() -> list[Row]:
    """Return all rows, each once, in the dtypes and with the attention that cards and models have."""
    return list(dict.fromkeys(map(_suited, _rows())))


def _suited(row: Row) -> Row:
    if row.card == "T4" and row.dtype == "bfloat16":
        # in float16 Bart asks whether its activations are finite, which are not computed here
        row = replace(row, dtype="float32" if row.model == "bart" else "float16")
    return replace(row, attention="eager") if row.model == "mamba" else row


def _rows() -> Iterator[Row]:
    roads = itertools.cycle(("to", "device_map", "made"))
    cards = itertools.cycle(("H100", "A100", "T4"))
    optimizers = itertools.cycle(("adamw", "adamw_foreach", "sgd", "adamw", "adafactor"))
    # every architecture: trained whole and by LoRA on each card, with and without checkpointing
    for name in (name for name in MODELS if name != "llama-8b"):
        for method, card, checkpointing in itertools.product(("full", "lora"), CAPABILITIES, (False, True)):
            yield Row(name, method, card, next(roads), optimizer=next(optimizers), checkpointing=checkpointing)
    for name in CAUSAL:
        yield Row(name, "generate", next(cards), next(roads))
    for name, attention, dtype in itertools.product(("llama", "qwen3"), ("sdpa", "eager"), ("bfloat16", "float32")):
        for method in ("full", "lora", "generate"):
            yield Row(name, method, next(cards), next(roads), attention, dtype)
    for name, method in itertools.product(("llama", "qwen3", "gpt2"), ("dora", "nf4")):
        for card, checkpointing in itertools.product(("H100", "T4"), (False, True)):
            road = "device_map" if method == "nf4" else next(roads)
            yield Row(name, method, card, road, checkpointing=checkpointing)
    for road, method, card in itertools.product(("to", "device_map"), ("lora", "generate"), ("H100", "A100")):
        yield Row("llama-8b", method, card, road, checkpointing=True, batch=1, length=2048)
        yield Row("llama-30m", method, card, road, length=256)


def forecast(row: Row) -> MemoryForecast:
    """Forecast a row, without a card."""
    model = MODELS[row.model]
    return predict_memory(
        model.config(),
        row.workload,
        inputs=inputs_of(row, "meta"),
        capability=CAPABILITIES[row.card],
        dtype=getattr(torch, row.dtype),
        attn_implementation=row.attention,
        auto_class=getattr(transformers, model.kind),
        quantization_config=quantization(row),
        prepare_for_kbit="peft",  # as `load` does
        scan_kernels=False,  # none are installed there
        loaded_by="device_map" if row.road == "device_map" else "to",
    )


def run(row: Row) -> dict[str, int]:
    """Run a row on the first card, and return what torch's allocator counted."""
    step = step_of(load(row), row)
    for _ in range(STEPS):
        step()
    return {"allocated": torch.cuda.max_memory_allocated(0), "reserved": torch.cuda.max_memory_reserved(0)}


def quantization(row: Row) -> Any:
    """Return the config of bitsandbytes for a row in NF4; None for any other."""
    make: Any = BitsAndBytesConfig
    if row.method != "nf4":
        return None
    return make(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)


def load(row: Row, device_map: dict[str, Any] | None = None) -> Any:
    """Return a row's model with its adapter, on the first card by the row's road, or where a device map says."""
    model = _on_card(row, device_map)
    if row.method == "nf4":
        prepare: Any = prepare_model_for_kbit_training
        model = prepare(model, use_gradient_checkpointing=False)
    return model if row.adapter is None else get_peft_model(model, row.adapter)


def _on_card(row: Row, device_map: dict[str, Any] | None) -> Any:
    model, dtype = MODELS[row.model], getattr(torch, row.dtype)
    kind, config = getattr(transformers, model.kind), model.config()
    config._attn_implementation = row.attention
    if row.road == "made" and device_map is None:
        with torch.device("cuda", 0):
            return kind._from_config(config, dtype=dtype)
    folder = Path(tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
    try:
        sparse_checkpoint(config, folder, dtype, kind=kind)
        options: dict[str, Any] = {"dtype": dtype, "attn_implementation": row.attention}
        if row.method == "nf4":
            options["quantization_config"] = quantization(row)
        if row.road == "device_map" or device_map is not None:
            return kind.from_pretrained(folder, device_map=device_map or {"": 0}, **options)
        return kind.from_pretrained(folder, **options).to("cuda:0")
    finally:
        shutil.rmtree(folder)


def inputs_of(row: Row, device: str) -> dict[str, torch.Tensor] | None:
    """Return the inputs that are not tokens alone."""
    shape = MODELS[row.model].image
    if shape is None:
        return None
    images = {"pixel_values": torch.zeros((row.batch, *shape), device=device)}
    ids = torch.ones((row.batch, row.length), dtype=torch.long)
    ids[:, :16] = IMAGE_TOKEN
    return {"input_ids": ids.to("cuda:0") if device != "meta" else ids, **images}


def step_of(model: Any, row: Row) -> Callable[[], None]:
    """Return a function that runs a row's step once."""
    from safe_loading._memory.trace.inputs import forward_arguments

    names = forward_arguments(model)
    encoder_decoder = getattr(model.config, "is_encoder_decoder", False)
    if row.method == "generate":
        model.eval()
        return lambda: _generate(model, row, names)
    model.train()
    if row.checkpointing:
        model.gradient_checkpointing_enable()
        if row.adapter is not None:
            model.enable_input_require_grads()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = _optimizer(row.optimizer, trained)

    def tokens(value: int) -> torch.Tensor:
        return torch.full((row.batch, row.length), value, device="cuda:0")

    dtype = getattr(torch, row.autocast or "bfloat16")
    autocast = torch.autocast("cuda", dtype=dtype, enabled=row.autocast is not None)

    def step() -> None:
        batch = inputs_of(row, "cuda:0") or {}
        if "input_ids" in names and "input_ids" not in batch:
            batch["input_ids"] = tokens(1)
        if "attention_mask" in names:
            batch["attention_mask"] = tokens(1)
        if encoder_decoder:
            batch["decoder_input_ids"] = tokens(1)
        batch["labels"] = tokens(1)
        options = {"use_cache": False} if "use_cache" in names else {}
        with autocast:
            output: Any = model(**batch, **options)
        if row.autocast:
            output = convert_to_fp32(output)
        loss = output.loss
        del output
        loss.backward()
        del loss
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def _optimizer(name: str, trained: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    if name == "sgd":
        return torch.optim.SGD(trained)
    if name == "adafactor":
        make: Any = transformers.Adafactor
        # the weights here are zeros, whose scale a step would take for the least one, a number and no tensor
        made: torch.optim.Optimizer = make(trained, eps=(1e-30, -1.0))
        return made
    return torch.optim.AdamW(trained, fused=True) if name == "adamw" else torch.optim.AdamW(trained, foreach=True)


def _generate(model: Any, row: Row, names: Any) -> None:
    batch = {name: torch.full((row.batch, row.length), 1, device="cuda:0") for name in ("input_ids", "attention_mask")}
    batch = {name: tensor for name, tensor in batch.items() if name in names}
    # an end that no row comes to, since a minimum of tokens would bring a processor of scores
    end = {} if model.generation_config.eos_token_id is None else {"eos_token_id": NEVER}
    model.generate(**batch, max_new_tokens=DECODE_STEPS + 1, do_sample=False, **end)
