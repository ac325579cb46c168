"""Every method of peft, as the fields of its config on the tiny Llama of ``models.save_llama``; shared by tests.

``METHODS`` has one entry for each method and variant that peft has; ``save_trained`` saves an adapter of one, with
random values in everything that is trained.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import peft
import torch
from transformers import AutoModelForCausalLM

# All square on the tiny Llama, which some methods ask for.
SQUARE = ["q_proj", "o_proj"]
_PROMPT = {"num_virtual_tokens": 3}


class Method(NamedTuple):
    """A method of peft, or a variant of one, with a config that fits the tiny Llama."""

    config: str  # peft's class
    options: Mapping[str, Any]

    def make(self, **more: Any) -> peft.PeftConfig:
        """Make the config, with other options where ``more`` has them."""
        options: dict[str, Any] = {"task_type": "CAUSAL_LM", **self.options, **more}
        # Sub-configs are made anew: peft writes into them.
        options = {name: value() if callable(value) else value for name, value in options.items()}
        config: peft.PeftConfig = getattr(peft, self.config)(**options)
        return config


def _lora(**options: Any) -> Method:
    return Method("LoraConfig", {"r": 4, "lora_alpha": 8, "target_modules": [*SQUARE, "down_proj"], **options})


def _on_square(config: str, **options: Any) -> Method:
    return Method(config, {"target_modules": SQUARE, **options})


def _sub(name: str, **options: Any) -> Any:
    return lambda: getattr(peft.tuners.lora, name)(**options)


METHODS: dict[str, Method] = {
    "LoRA": _lora(),
    "LoRA, rsLoRA": _lora(use_rslora=True),
    "LoRA, DoRA": _lora(use_dora=True),
    "LoRA, bias": _lora(lora_bias=True),
    "LoRA, base biases trained": _lora(bias="all"),
    "LoRA on the embedding": _lora(target_modules=["embed_tokens", "q_proj"]),
    "LoRA on parameters": _lora(target_modules=[], target_parameters=["q_proj.weight"]),
    "LoRA, modules to save": _lora(modules_to_save=["lm_head"]),
    "LoRA, trainable tokens": _lora(trainable_token_indices=[1, 5, 7]),
    "LoRA, replicated layers": _lora(layer_replication=[[0, 2], [1, 3]]),
    "LoRA, orthogonal": _lora(init_lora_weights="orthogonal"),
    "LoRA, PiSSA": _lora(init_lora_weights="pissa"),
    "LoRA, OLoRA": _lora(init_lora_weights="olora"),
    "LoRA, MiCA": _lora(init_lora_weights="mica"),
    "LoRA, EVA": _lora(init_lora_weights="eva"),
    "aLoRA": _lora(alora_invocation_tokens=[5, 6]),
    "BD-LoRA": _lora(
        use_bdlora=_sub(
            "BdLoraConfig", target_modules_bd_a=["o_proj"], target_modules_bd_b=["q_proj", "down_proj"], nblocks=2
        )
    ),
    "KaSA": _lora(kasa_config=_sub("KasaConfig")),
    "VeLoRA": _lora(velora_config=_sub("VeloraConfig", num_groups=4, init_type="random")),
    "MonteCLoRA": _lora(monteclora_config=_sub("MontecloraConfig")),
    "AdaLoRA": Method("AdaLoraConfig", {"target_modules": [*SQUARE, "down_proj"], "total_step": 10}),
    "Adaption prompt": Method("AdaptionPromptConfig", {"adapter_len": 4, "adapter_layers": 2}),
    "BEFT": Method("BeftConfig", {"target_modules": ["v_proj"]}),
    "BOFT": _on_square("BOFTConfig", boft_block_size=4),
    "C3A": _on_square("C3AConfig", block_size=8),
    "Cartridge": Method("CartridgeConfig", _PROMPT),
    "CPT": Method(
        "CPTConfig",
        {"cpt_token_ids": [1, 2, 3], "cpt_mask": [1, 1, 1], "cpt_tokens_type_mask": [1, 2, 4]},
    ),
    "DEFT": _on_square("DeftConfig"),
    "DeLoRA": _on_square("DeloraConfig"),
    "FourierFT": _on_square("FourierFTConfig", n_frequency=50),
    "FRoD": _on_square("FrodConfig", progressbar=False),
    "GLoRA": _on_square("GloraConfig"),
    "GraLoRA": _on_square("GraloraConfig", r=8),
    "HiRA": _on_square("HiraConfig"),
    "HRA": _on_square("HRAConfig"),
    "IA3": Method("IA3Config", {"target_modules": ["k_proj", "down_proj"], "feedforward_modules": ["down_proj"]}),
    "Lily": _on_square("LilyConfig", r=8),
    "LN tuning": Method("LNTuningConfig", {"target_modules": ["input_layernorm", "norm"]}),
    "LoHa": _on_square("LoHaConfig"),
    "LoKr": _on_square("LoKrConfig"),
    "MiSS": _on_square("MissConfig", r=8),
    "Multitask prompt tuning": Method("MultitaskPromptTuningConfig", {**_PROMPT, "num_tasks": 2}),
    "OFT": _on_square("OFTConfig", oft_block_size=4),
    "OSF": _on_square("OSFConfig", effective_rank=8),
    "P-tuning": Method("PromptEncoderConfig", {**_PROMPT, "encoder_hidden_size": 16}),
    "PEANuT": _on_square("PeanutConfig"),
    "Poly": _on_square("PolyConfig"),
    "Prefix tuning": Method("PrefixTuningConfig", _PROMPT),
    "Prefix tuning, projected": Method(
        "PrefixTuningConfig", {**_PROMPT, "prefix_projection": True, "encoder_hidden_size": 16}
    ),
    "Prompt tuning": Method("PromptTuningConfig", _PROMPT),
    "PSOFT": _on_square("PsoftConfig", r=8),
    "PVeRA": _on_square("PveraConfig", r=16),
    "RandLora": _on_square("RandLoraConfig", r=8),
    "RoAd": _on_square("RoadConfig", group_size=8),
    "Shadow": Method("ShadowConfig", {}),
    "SHiRA": _on_square("ShiraConfig", r=4, random_seed=0),
    "Supertuning": _on_square("SupertuningConfig", sparsity=0.9),
    "TinyLoRA": _on_square("TinyLoraConfig", u=8),
    "Trainable tokens": Method("TrainableTokensConfig", {"target_modules": ["embed_tokens"], "token_indices": [1, 5]}),
    "UniLoRA": _on_square("UniLoraConfig", theta_d_length=64),
    "VB-LoRA": _on_square("VBLoRAConfig", num_vectors=8, vector_length=16),
    "VeRA": _on_square("VeraConfig", r=16),
    "WaveFT": _on_square("WaveFTConfig", n_frequency=64),
}


def save_trained(method: Method, base: Path, folder: Path, *, seed: int = 0, **more: Any) -> Path:
    """Save an adapter of ``method`` as a training would leave it: random values in everything that is trained."""
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(seed)
        model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), method.make(**more))
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad and parameter.is_floating_point():
                    parameter.add_(torch.randn_like(parameter), alpha=0.02)
        model.save_pretrained(os.fspath(folder))
    return folder
