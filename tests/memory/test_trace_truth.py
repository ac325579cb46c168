"""Traces compared with the real CPU allocator: the peaks of steps that are really run, equal to the byte."""

from __future__ import annotations

import gc
import warnings
from typing import Any

import peft
import pytest
import torch
import transformers
from allocator import peak_above_start
from allocator_truth import above_start, generation, tokens, training

from safe_loading import TraceError, Workload
from safe_loading._memory.trace.trace_step import trace_step

ROWS, COLUMNS = 2, 48
FEW_COLUMNS = 6  # for models whose Python code loops over the tokens
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 101,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPT: dict[str, Any] = {"n_embd": 64, "n_layer": 3, "n_head": 4, "vocab_size": 101, "n_positions": 256}
VISION: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 8,
}
MLA: dict[str, Any] = {
    **SIZES,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
}
EXPERTS: dict[str, Any] = {**SIZES, "num_local_experts": 4, "num_experts_per_tok": 2}
SSM: dict[str, Any] = {**SIZES, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_chunk_size": 16}
JAMBA: dict[str, Any] = {
    **SIZES,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "attn_layer_period": 3,
    "attn_layer_offset": 1,
    "expert_layer_offset": 1,
    "mamba_d_state": 8,
    "mamba_dt_rank": 4,
    "use_mamba_kernels": False,
}
LINEAR: dict[str, Any] = {
    **SIZES,
    "head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
BART: dict[str, Any] = {
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
    "vocab_size": 101,
}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "Llama": SIZES,
    "GPT2": GPT,
    "DeepseekV3": MLA,
    "Mixtral": EXPERTS,
    "Mistral": {**SIZES, "sliding_window": 16},
    "Qwen2": SIZES,
    "Qwen3": {**SIZES, "head_dim": 16},
    "Qwen3Moe": {**EXPERTS, "head_dim": 16, "num_experts": 4, "moe_intermediate_size": 32},
    "Qwen3Next": LINEAR,
    "Gemma2": {**SIZES, "head_dim": 16, "sliding_window": 16},
    "Gemma3Text": {**SIZES, "head_dim": 16, "sliding_window": 16},
    "GptOss": {**EXPERTS, "head_dim": 16, "sliding_window": 16},
    "Llama4Text": {**EXPERTS, "head_dim": 16, "intermediate_size_mlp": 128},
    "Olmo2": SIZES,
    "StableLm": SIZES,
    "Cohere": SIZES,
    "Phi3": SIZES,
    "GPTNeoX": SIZES,
    "Bloom": {"hidden_size": 64, "n_layer": 3, "n_head": 4, "vocab_size": 101},
    "Mamba": {"hidden_size": 64, "state_size": 8, "num_hidden_layers": 3, "vocab_size": 101},
    "Mamba2": {
        "hidden_size": 64,
        "state_size": 8,
        "num_hidden_layers": 3,
        "vocab_size": 101,
        "num_heads": 8,
        "head_dim": 16,
        "n_groups": 1,
        "chunk_size": 16,
    },
    "Rwkv": {"hidden_size": 64, "num_hidden_layers": 3, "vocab_size": 101, "context_length": 256},
    "Jamba": JAMBA,
    "Bamba": {**SSM, "attn_layer_indices": [1]},
    "FalconH1": {**SSM, "mamba_d_ssm": 128},
    "T5": {
        "decoder_start_token_id": 0,
        "d_model": 64,
        "d_kv": 16,
        "d_ff": 128,
        "num_layers": 2,
        "num_heads": 4,
        "vocab_size": 101,
    },
    "Bart": BART,
    "Bert": {**SIZES, "num_labels": 3},
    "ViT": {**VISION, "num_labels": 5},
    "Llava": {
        "vision_config": transformers.CLIPVisionConfig(**VISION),
        "text_config": transformers.LlamaConfig(**SIZES),
        "image_token_index": 99,
        "vision_feature_layer": -1,
    },
}
AUTO = {
    "T5": transformers.AutoModelForSeq2SeqLM,
    "Bart": transformers.AutoModelForSeq2SeqLM,
    "Bert": transformers.AutoModelForSequenceClassification,
    "ViT": transformers.AutoModelForImageClassification,
    "Llava": transformers.AutoModelForImageTextToText,
}
TOKEN_BY_TOKEN = {"Mamba", "Rwkv", "Jamba"}
EAGER_ONLY = {"Gemma2", "GptOss", "Bloom", "Mamba", "Mamba2", "Rwkv"}  # transformers has no other attention for them
CASES = [(n, a) for n in ARCHITECTURES for a in ("sdpa", "eager") if a == "eager" or n not in EAGER_ONLY]
SAMPLE = {  # the rest is slow
    ("Llama", "sdpa"),
    ("DeepseekV3", "eager"),
    ("Mixtral", "sdpa"),
    ("GptOss", "eager"),
    ("Mamba", "eager"),
    ("T5", "eager"),
    ("Llava", "eager"),
}


def model_of(name: str, attention: str) -> Any:
    config = getattr(transformers, f"{name}Config")(**ARCHITECTURES[name])
    make: Any = AUTO.get(name, transformers.AutoModelForCausalLM).from_config
    return make(config, dtype=torch.float32, attn_implementation=attention)


def picture_in_text() -> dict[str, torch.Tensor]:
    ids = torch.full((ROWS, COLUMNS), 5)
    ids[:, 1:17] = 99  # one token for each patch
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": torch.zeros(ROWS, 3, 32, 32)}


@pytest.mark.parametrize(
    ("name", "attention"),
    [pytest.param(*case, marks=[] if case in SAMPLE else [pytest.mark.slow]) for case in CASES],
)
def test_peaks_are_those_of_the_allocator(name: str, attention: str) -> None:
    model = model_of(name, attention)
    inputs = picture_in_text() if name == "Llava" else None
    columns = FEW_COLUMNS if name in TOKEN_BY_TOKEN else COLUMNS
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mine, real = {}, {}
        # of a short prompt the last token takes the most, of a long one the prompt itself
        for length, steps in ((columns, 1), (2, 8)) if inputs is None else ((columns, 1),):
            trace = trace_step(model, Workload.generate(ROWS, length, decode_steps=steps), inputs=inputs)
            mine[f"generate {length}"] = above_start(trace, "prefill", "decode")
            real[f"generate {length}"] = generation(model, ROWS, length, inputs, steps=steps)
        for on in (False, True):
            model.zero_grad(set_to_none=True)
            gc.collect()  # or what earlier tests left decides when the cycles of a token-by-token scan are collected
            step = trace_step(model, Workload.train(ROWS, columns, on, optimizer="none"), inputs=inputs)
            mine[f"train {on}"] = above_start(step, "forward", "backward")
            real[f"train {on}"] = training(model, ROWS, columns, inputs, checkpointing=on)["train"]
    if model.config.is_encoder_decoder:  # generate() makes the first ids of the decoder when the encoder has returned
        for phase in [phase for phase in real if phase.startswith("generate")]:
            assert 0 <= mine.pop(phase) - real.pop(phase) <= 3 * 8 * ROWS
    assert mine == real


@pytest.mark.parametrize("name", ["Llama", "Mixtral"])
def test_a_layer_that_is_computed_again_keeps_its_input_in_16_bits(name: str) -> None:
    """Its norm saves a float32 copy, so nothing else does; the scores of eager attention put the peak in the layer."""
    model = model_of(name, "eager").bfloat16()
    step = trace_step(model, Workload.train(ROWS, 4 * COLUMNS, gradient_checkpointing=True, optimizer="none"))
    real = training(model, ROWS, 4 * COLUMNS, checkpointing=True)["train"]
    assert above_start(step, "forward", "backward") == real


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("case", [("Llama", "sdpa"), ("Llama", "eager"), ("GPT2", "sdpa"), ("Gemma2", "eager")])
def test_peaks_of_generate_with_a_padded_row(case: tuple[str, str], *, padded: bool) -> None:
    """``generate()`` leaves out a mask that hides nothing; one that hides something reaches the model and grows."""
    model = model_of(*case)
    batch = tokens(model, 4, COLUMNS)
    batch["attention_mask"][0, : 5 * padded] = 0
    trace = trace_step(model, Workload.generate(4, COLUMNS, decode_steps=2), inputs=batch)
    assert above_start(trace, "prefill", "decode") == generation(model, 4, COLUMNS, batch, steps=2)


def test_bart_in_eager_attention_with_checkpointing_and_sgd() -> None:
    """A step that was once forecast 5.8 % too high."""
    model = model_of("Bart", "eager")
    trace = trace_step(model, Workload.train(3, 96, gradient_checkpointing=True, optimizer="sgd"))
    assert above_start(trace, *PHASES) == training(model, 3, 96, checkpointing=True)["train"]


def test_positions_of_a_prompt() -> None:
    """The positions of an adapter of prompts are peft's, and those that are given are taken as they are."""
    model = model_of("Llama", "sdpa")
    given = {"position_ids": torch.arange(COLUMNS).expand(1, COLUMNS)}
    own = above_start(trace_step(model, Workload.generate(4, COLUMNS)), "prefill")
    shared = above_start(trace_step(model, Workload.generate(4, COLUMNS), inputs=given), "prefill")
    assert shared < own
    prompts = peft.PromptTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trace_step(model, Workload.generate(4, COLUMNS, adapter=prompts))


def test_the_mask_of_a_prompt_in_training_hides_what_the_rows_do() -> None:
    """peft makes it of floating point numbers; read as one that hides nothing, attention would take less."""
    prompts = peft.PromptTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM")
    model = model_of("Llama", "sdpa")
    batch = {**tokens(model, 4, COLUMNS), "labels": torch.full((4, COLUMNS), 5)}
    batch["attention_mask"][0, :5] = 0
    trace = trace_step(model, Workload.train(4, COLUMNS, adapter=prompts, optimizer="none"), inputs=batch)
    adapted = peft.get_peft_model(model, prompts).train()

    def step() -> None:
        given = {name: tensor.clone() for name, tensor in batch.items()}
        loss = adapted(**given, use_cache=False).loss
        loss.backward()

    assert above_start(trace, *PHASES) == peak_above_start(step)


def test_a_loop_that_leaves_the_cache_on() -> None:
    model = model_of("Llama", "sdpa").train()
    works = [Workload.train(ROWS, COLUMNS, optimizer="none", use_cache=on) for on in (False, True)]
    without, filled = (trace_step(model, work) for work in works)
    assert len(without.allocations) < len(filled.allocations)

    def step() -> None:
        batch = {**tokens(model, ROWS, COLUMNS), "labels": torch.full((ROWS, COLUMNS), 5)}
        loss = model(**batch).loss
        loss.backward()

    assert above_start(filled, *PHASES) == peak_above_start(step)


PROJECTIONS = {"target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}
METHODS: dict[str, dict[str, Any]] = {
    "Lora": {**PROJECTIONS, "r": 4, "use_dora": True},
    "IA3": {"task_type": "CAUSAL_LM"},
    "BOFT": {**PROJECTIONS, "boft_block_size": 4},
    "OFT": {**PROJECTIONS, "oft_block_size": 8},
    "LoHa": {**PROJECTIONS, "r": 4},
    "LoKr": {**PROJECTIONS, "r": 4},
    "AdaLora": {**PROJECTIONS, "init_r": 4, "target_r": 2, "total_step": 10},
    "Vera": {**PROJECTIONS, "r": 4},
    "FourierFT": {**PROJECTIONS, "n_frequency": 16},
    "HRA": {**PROJECTIONS, "r": 4},
    "VBLoRA": {**PROJECTIONS, "r": 4, "num_vectors": 16, "vector_length": 16},
    "LNTuning": {"task_type": "CAUSAL_LM"},
    "PromptTuning": {"num_virtual_tokens": 4, "task_type": "CAUSAL_LM"},
    "PrefixTuning": {"num_virtual_tokens": 4, "task_type": "CAUSAL_LM"},
    "PromptEncoder": {"num_virtual_tokens": 4, "encoder_hidden_size": 32, "task_type": "CAUSAL_LM"},
    "Miss": {**PROJECTIONS, "r": 4},
    "RandLora": {**PROJECTIONS, "r": 4},
    "C3A": {**PROJECTIONS, "block_size": 8},
    "Road": {**PROJECTIONS, "group_size": 8},
    "WaveFT": {**PROJECTIONS, "n_frequency": 16},
    "TrainableTokens": {"token_indices": [1, 2], "task_type": "CAUSAL_LM"},
}


@pytest.mark.parametrize("method", METHODS)
def test_peaks_of_every_method_of_peft(method: str) -> None:
    """The adapter is attached from its config alone, and compared with the one that peft attaches for real."""
    config = getattr(peft, f"{method}Config")(**METHODS[method])
    model = model_of("Llama", "sdpa").to(torch.bfloat16)
    before = {name: id(module) for name, module in model.named_modules()}
    mine = above_start(trace_step(model, Workload.train(ROWS, COLUMNS, adapter=config, optimizer="none")), *PHASES)
    assert {name: id(module) for name, module in model.named_modules()} == before
    adapted = peft.get_peft_model(model, config).train()

    def step() -> None:
        batch = tokens(model, ROWS, COLUMNS)
        batch["labels"] = torch.full((ROWS, COLUMNS), 5)
        loss = adapted(**batch, use_cache=False).loss
        loss.backward()

    assert mine == peak_above_start(step)


@pytest.mark.parametrize("method", ["Shira", "Frod"])
def test_methods_with_sparse_tensors_are_refused_by_name(method: str) -> None:
    config = (
        getattr(peft, f"{method}Config")(r=4, **PROJECTIONS) if method == "Shira" else peft.FrodConfig(**PROJECTIONS)
    )
    name = {"Shira": "SHiRA", "Frod": "FRoD"}[method]
    with pytest.raises(TraceError, match=rf"{method}Config.*{name} computes with sparse tensors.*LoraConfig"):
        trace_step(model_of("Llama", "sdpa"), Workload.train(ROWS, COLUMNS, adapter=config))
    attached = peft.get_peft_model(model_of("Llama", "sdpa"), config)
    with pytest.raises(TraceError, match=rf"{name} computes with sparse tensors.*Measure a step on the GPU"):
        trace_step(attached, Workload.train(ROWS, COLUMNS))


PHASES = ("forward", "backward")
