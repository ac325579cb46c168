"""Every class that transformers registers for causal language models and image-text models, in a tiny size.

A config's own defaults are shrunk by the names of its fields, which transformers keeps alike across models; what that
does not reach stands in ``SPECIAL``. Sizes are uneven on purpose: 251 words, layers of a few kinds each.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import PreTrainedConfig
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from safe_loading._core.engines import is_older

VOCAB = 251
HIDDEN, HEADS, HEAD = 64, 4, 16
LAYERS = 2


def _all(names: str, value: Any) -> dict[str, Any]:
    return dict.fromkeys(names.split(), value)


SIZES: dict[str, Any] = {
    **_all(
        "hidden_size d_model n_embd embed_dim width word_embed_proj_dim out_hidden_size projection_dim mm_hidden_size "
        "projector_hidden_size text_hidden_size encoder_hidden_size output_dim model_dim lru_width n_embed "
        "attention_hidden_size backbone_hidden_size projector_dim proj_size qformer_hidden_size embedding_size "
        "cross_attention_hidden_size hidden_dim embed_size",
        HIDDEN,
    ),
    **_all(
        "intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim mlp_dim d_ff n_inner ffn_hidden_size "
        "projector_ffn_dim mlp_hidden_size block_ff_dim dense_intermediate_size intermediate_dim",
        96,
    ),
    **_all("num_hidden_layers n_layer num_layers n_layers depth encoder_layers decoder_layers resampler_depth", LAYERS),
    **_all(
        "num_attention_heads n_head num_heads n_heads encoder_attention_heads decoder_attention_heads attention_heads "
        "num_encoder_attention_heads swa_num_attention_heads resampler_n_heads n_attn_heads",
        HEADS,
    ),
    **_all("num_key_value_heads swa_num_key_value_heads num_kv_heads n_head_kv", 2),
    **_all("head_dim qk_head_dim v_head_dim d_head attention_head_dim swa_head_dim swa_v_head_dim d_kv", HEAD),
    **_all("num_experts n_routed_experts num_local_experts moe_num_experts num_routed_experts", 4),
    **_all("num_experts_per_tok moe_topk moe_k top_k_experts experts_per_token num_experts_per_token", 2),
    **_all("moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size shared_intermediate_size", 32),
    **_all("n_group topk_group", 1),
    **_all("q_lora_rank kv_lora_rank index_head_dim", 16),
    **_all("qk_rope_head_dim qk_nope_head_dim", 8),
    **_all(
        "max_position_embeddings n_positions n_ctx max_source_positions max_target_positions max_seq_len "
        "max_sequence_length",
        64,
    ),
    **_all("linear_key_head_dim linear_value_head_dim linear_head_dim", 8),
    **_all("linear_num_key_heads linear_num_heads index_n_heads", 2),
    **_all("vocab_size vocab_size_per_layer_input ngram_vocab_size unpadded_vocab_size", VOCAB),
    "linear_num_value_heads": 4,
    "hidden_size_per_layer_input": 16,
    "num_position_embeddings": 64,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 0,
    "num_kv_shared_layers": 0,
    "num_query_tokens": 4,
    "image_size": 32,
    "patch_size": 8,
    "sliding_window": 16,
}
# What the names do not say, by model type; a value is set as it is, wherever in the config its key stands.
SPECIAL: dict[str, dict[str, Any]] = {
    "bamba": {"mamba_n_heads": 8, "mamba_d_head": 16, "attn_layer_indices": [1]},
    "deepseek_v3": {"head_dim": 8},
    "axk1": {"head_dim": 8},
    "youtu": {"head_dim": 8},
    "longcat_flash": {"head_dim": 8},
    "gptj": {"rotary_dim": 8},
    "codegen": {"rotary_dim": 8},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "granitemoehybrid": {
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "zamba2": {"mamba_headdim": 16},
    "xlstm": {"embedding_dim": 64},
    "blip-2": {"image_token_index": 250},
    "instructblip": {"image_token_index": 250},
    "instructblipvideo": {"video_token_index": 250},
    "xmod": {"default_language": "en_XX"},
    "bailing_hybrid": {"num_expert_group": 1, "n_group": 1},
    "jamba": {"attn_layer_offset": 1, "attn_layer_period": 2},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "hrm_text": {"num_layers_per_stack": None},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "falcon_h1": {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_ssm": 128, "mamba_d_state": 16},
    "marian": {"decoder_vocab_size": VOCAB},
    "cpmant": {"dim_ff": 96, "dim_head": 16},
    "xlm": {"emb_dim": 64, "n_words": VOCAB},
    "cohere2_vision": {"alignment_intermediate_size": 96},
    "roc_bert": {
        "shape_vocab_size": 50,
        "shape_embed_dim": 16,
        "pronunciation_vocab_size": 50,
        "pronunciation_embed_dim": 16,
    },
    "blt": {"encoder_hash_byte_group_vocab": 50},
    "llama4": {
        "vision_output_dim": 64,
        "projector_input_dim": 64,
        "projector_output_dim": 64,
        "intermediate_size": 256,  # of the vision model: four patches in one
    },
    "gemma3": {"mm_tokens_per_image": 4},
    "t5gemma2": {"mm_tokens_per_image": 4},
    "kimi_k25": {"head_dim": 8, "projection_hidden_size": HIDDEN},
    "mllama": {"intermediate_layers_indices": [0, 1], "vision_output_dim": 3 * HIDDEN, "num_global_layers": 1},
    **_all("kosmos-2 kosmos-2.5", {"latent_query_num": 4}),
    "gemma4": {
        "vision_config": {
            **_all("hidden_size intermediate_size", HIDDEN),
            **_all("num_hidden_layers num_attention_heads num_key_value_heads", 2),
            **_all("head_dim patch_size", 8),
        }
    },
    "muse_glimmer": {"out_hidden_size": 4 * HIDDEN},
    "vipllava": {"vision_feature_layer": [-2, -1]},
    **_all("llava_next llava_next_video llava_onevision", {"image_grid_pinpoints": [[32, 64], [64, 32]]}),
    "reformer": {"is_decoder": True, "axial_pos_embds_dim": [16, 48], "axial_pos_shape": [4, 4]},
    "big_bird": {"attention_type": "original_full"},
    "ministral": {"head_dim": HEAD},
    "dory": {
        **_all("n_input_layers n_recurrent_layers n_output_layers", 1),
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "hunyuan_v1_dense": {"head_dim": HEAD},
    "hunyuan_v1_moe": {"head_dim": HEAD},
    "nemotron": {"num_key_value_heads": 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "gemma3n_text": {"intermediate_size": [96] * 4},
}
# Their rotary frequencies are cut into sections, which a config names only when it is asked.
SECTIONS: dict[str, list[int]] = {
    **_all("glm46v glm4v glm_ocr paddleocr_vl qwen2_vl qwen2_5_vl qwen2_5_omni_thinker", [2, 3, 3]),
    "glm4v_moe": [1, 1, 2],
}
# Classes that this module makes no tiny config of, and why.
NOT_TINY: dict[str, str] = {
    **_all(
        "AriaForConditionalGeneration ChameleonForConditionalGeneration CohereCompassForCausalLM "
        "CohereCompassForConditionalGeneration DbrxForCausalLM DeepseekOcr2ForConditionalGeneration "
        "DiffusionGemmaForBlockDiffusion Dots3NoteForCausalLM Dots3NoteForConditionalGeneration "
        "Emu3ForConditionalGeneration Ernie4_5_VLMoeForConditionalGeneration Gemma4AssistantForCausalLM "
        "Gemma4UnifiedAssistantForCausalLM Granite4VisionForConditionalGeneration "
        "HunYuanVLForConditionalGeneration Molmo2ForConditionalGeneration Qwen4ExpForCausalLM "
        "Qwen4ExpForConditionalGeneration ZambaForCausalLM",
        "its config's defaults describe no model that can be built",
    ),
    **_all(
        "FastVlmForConditionalGeneration Gemma3nForConditionalGeneration PerceptionLMForConditionalGeneration "
        "InklingForConditionalGeneration",
        "it needs timm or scipy",
    ),
    **_all(
        "DeepseekVLHybridForConditionalGeneration Florence2ForConditionalGeneration JanusForConditionalGeneration "
        "MuseSparkForConditionalGeneration NemotronH_Omni_Reasoning_V3 PPFormulaNetForConditionalGeneration "
        "Phi4MultimodalForCausalLM Qwen3OmniMoeThinkerForConditionalGeneration "
        "UnlimitedOcrForConditionalGeneration",
        "its convolutions have a fixed size",
    ),
}


def tiny_config(model: str | type) -> PreTrainedConfig:
    """Return the config of a model type ("llama") or of a class (its name, or itself), shrunk."""
    kind = config_class(model)
    config = kind()
    special = SPECIAL.get(config.model_type, {})
    facts = _shrunk(config.to_dict(), special)
    tiny = kind.from_dict(facts)
    if config.model_type in SECTIONS:
        text = tiny.get_text_config()
        text.rope_parameters = {
            **text.rope_parameters,
            "mrope_section": [1, 1, 2] if config.model_type == "glm4v_moe" else [2, 3, 3],
        }
    if hasattr(config, "tie_word_embeddings"):
        tiny.tie_word_embeddings = config.tie_word_embeddings
    return tiny


def config_class(model: str | type) -> type[PreTrainedConfig]:
    """Return the class of the configs of a model type, or of a class of models."""
    if isinstance(model, str) and model in CONFIG_MAPPING:
        return CONFIG_MAPPING[model]
    kind: Any = getattr(transformers, model) if isinstance(model, str) else model
    for mapping in (modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING, modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING):
        for config in mapping:
            held = mapping[config]
            if kind is held or (isinstance(held, tuple) and kind in held):
                # a class of text models may stand under the config of the whole, and is made from a part of it
                return config if kind.config_class is None else kind.config_class
    return kind.config_class


def _shrunk(facts: Mapping[str, Any], special: Mapping[str, Any]) -> dict[str, Any]:
    """Shrink a config as a dict, and the configs inside it."""
    layers = next((facts[name] for name in LAYER_COUNTS if isinstance(facts.get(name), int)), 0)
    lists = {
        name: value for name, value in facts.items() if isinstance(value, (list, tuple)) and len(value) == layers > 0
    }
    kept = _kinds_of_layers([*lists.values()], layers)
    result: dict[str, Any] = {}
    for name, value in facts.items():
        if name in special:
            result[name] = special[name]
        elif name in lists:
            result[name] = [value[layer] for layer in kept]
        elif name in LAYER_COUNTS and isinstance(value, int):
            result[name] = len(kept) if lists and value == layers else min(value, LAYERS)
        elif name == "per_layer_config" and isinstance(value, dict):
            result[name] = {kept.index(int(layer)): part for layer, part in value.items() if int(layer) in kept}
        elif name == "rope_parameters":
            result[name] = _rope(value)
        elif isinstance(value, dict) and name not in ("id2label", "label2id"):
            result[name] = _shrunk(value, special)
        elif isinstance(value, bool) or value is None:
            result[name] = value
        elif name.endswith(("_token_id", "_token_index")):
            result[name] = _token(name, value)
        elif name in SIZES and isinstance(value, int):
            result[name] = min(value, SIZES[name])
        else:
            result[name] = value
    if result.get("num_key_value_heads") and facts.get("num_key_value_heads") == facts.get("num_attention_heads"):
        result["num_key_value_heads"] = result["num_attention_heads"]
    return result


LAYER_COUNTS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "depth", "encoder_layers", "decoder_layers")


def _kinds_of_layers(lists: Sequence[Sequence[Any]], layers: int) -> list[int]:
    """Return the first layer of each kind that the lists tell apart (four at the most), two at least."""
    first: dict[str, int] = {}
    for layer in range(layers):
        first.setdefault(repr([values[layer] for values in lists]), layer)
    kept = [*first.values()][:4] if lists else []
    kept += [layer for layer in range(layers) if layer not in kept][: max(0, LAYERS - len(kept))]
    return sorted(kept)


def _rope(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    if any(isinstance(inner, dict) for inner in value.values()):
        return {name: _rope(inner) for name, inner in value.items()}
    sections = {"mrope_section": [2, 3, 3]}
    return {name: sections.get(name, inner) for name, inner in value.items()}


def _token(name: str, value: Any) -> Any:
    known = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    if isinstance(value, (list, tuple)):
        return [known.get(name, 3 + number) for number, _ in enumerate(value)]
    return known.get(name, 10 + zlib.crc32(name.encode()) % 200)


def causal_lm_classes() -> list[str]:
    """The classes behind AutoModelForCausalLM that can be tiny, sorted."""
    return _classes(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def image_text_classes() -> list[str]:
    """The classes behind AutoModelForImageTextToText that can be tiny, sorted."""
    return _classes(modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)


def _classes(mapping: Mapping[str, Any]) -> list[str]:
    names = {name for value in mapping.values() for name in ([value] if isinstance(value, str) else value)}
    return sorted(name for name in names - NOT_TINY.keys() if hasattr(transformers, name))


def skip_unless_buildable(name: str) -> None:
    """Skip a test of a class that an old transformers cannot build from its own default config."""
    if is_older("transformers", "5.17"):
        if not hasattr(transformers, name):
            pytest.skip(f"transformers {transformers.__version__} has no {name}")
        try:
            with torch.device("meta"):
                getattr(transformers, name)(tiny_config(name))
        except (AttributeError, KeyError) as error:
            pytest.skip(f"transformers {transformers.__version__} cannot build it: {error}")


def saved(name: str, folder: Path) -> None:
    """Save a tiny model of a class with random weights in several files."""
    kind = getattr(transformers, name)
    torch.manual_seed(0)
    model = kind(tiny_config(name))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.normal_(std=0.02)
    model.save_pretrained(folder, max_shard_size="60KB")
