"""Published adapter configs of many writers, each with weights made for a tiny base of its architecture."""

from __future__ import annotations

import json
import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from engines import needs
from peft import LoraConfig, PeftModel, get_peft_model
from tiny_models import tiny_config

from safe_loading import SafeLoadingError, check_checkpoint, load_peft_on_rank, merge_lora_checkpoint

pytestmark = [needs("peft", "0.20"), needs("transformers", "5.17")]

FOLDER = Path(os.environ.get("SAFE_LOADING_FIELD", Path(__file__).parents[3] / "shared" / "field")) / "adapters"
CLASSES = {
    "bert_cls": "BertForSequenceClassification",
    "distilbert_cls": "DistilBertForSequenceClassification",
    "gemma3": "Gemma3ForConditionalGeneration",
    "glm4_remote": "GlmForCausalLM",
    "llama": "LlamaForCausalLM",
    "llava": "LlavaForConditionalGeneration",
    "mistral": "MistralForCausalLM",
    "phi": "PhiForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
    "qwen3_5": "Qwen3_5ForConditionalGeneration",
    "t5": "T5ForConditionalGeneration",
    "unet": "LlamaForCausalLM",
    "whisper": "WhisperForConditionalGeneration",
}
REFUSED = {
    "bert_cls--adapterhub_bert": "AdapterHub",
    "bert_cls--adapterhub_xlmr": "AdapterHub",
    "glm4_remote--chatglm_0.9": "not found in the base model",  # their base is code of a repository
    "glm4_remote--glm4_remote_0.11": "not found in the base model",
    "llama--git_lfs_pointer": "git lfs pull",
    "llama--mlx_gemma": r"has adapter_config\.json but no adapters\.safetensors",
    "llama--mlx_old_lora_layers": "which releases of mlx_lm read differently",
    "unet--unet_0.19_a": "of diffusers, which is not loaded here",
}
FILES = sorted(FOLDER.glob("*.json")) if FOLDER.is_dir() else []


def save_base(folder: Path, file: Path) -> Any:
    torch.manual_seed(0)
    kind: Any = getattr(transformers, CLASSES[file.stem.partition("--")[0]])
    kind(tiny_config(kind)).eval().save_pretrained(folder)
    return kind


def save_adapter(folder: Path, base: Path, kind: Any, file: Path) -> Path:
    """The published config, with weights of random numbers for the modules of the base that it selects."""
    try:
        config = json.loads(file.read_text())
        known = {name: value for name, value in config.items() if name in LoraConfig.__dataclass_fields__}
        task = config.get("task_type") if config.get("task_type") == "SEQ_CLS" else None
        known |= {"task_type": task, "init_lora_weights": False, "auto_mapping": None, "revision": None}
        model = get_peft_model(kind.from_pretrained(base), LoraConfig(**known))
    except ValueError:  # no module of this base, or no config at all
        model = get_peft_model(kind.from_pretrained(base), LoraConfig(target_modules="all-linear"))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_" in name and "magnitude" not in name:
                parameter.copy_(torch.randn_like(parameter) / 50)
    model.save_pretrained(folder)
    shutil.copy(file, folder / "adapter_config.json")
    return folder


@pytest.mark.skipif(not FILES, reason="the published configs lie beside the repository")
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_published_adapter_is_loaded_and_merged_or_named(tmp_path: Path, file: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        kind = save_base(tmp_path / "base", file)
        adapter = save_adapter(tmp_path / "adapter", tmp_path / "base", kind, file)
    checked = check_checkpoint(adapter)
    if (said := REFUSED.get(file.stem)) is not None:
        for refused in (
            lambda: load_peft_on_rank(adapter, tmp_path / "base"),
            lambda: merge_lora_checkpoint(tmp_path / "base", adapter, tmp_path / "merged"),
        ):
            with pytest.raises(SafeLoadingError, match=said):
                refused()
        return
    assert checked.ok, str(checked)
    model = load_peft_on_rank(adapter, tmp_path / "base")
    assert type(model.get_base_model()) is kind
    plain = PeftModel.from_pretrained(kind.from_pretrained(tmp_path / "base"), str(adapter))
    wanted, found = plain.state_dict(), model.state_dict()
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], value) for name, value in wanted.items())
    merge_lora_checkpoint(tmp_path / "base", adapter, tmp_path / "merged")
    merged = kind.from_pretrained(tmp_path / "merged").state_dict()
    for name, value in plain.merge_and_unload().state_dict().items():
        assert torch.allclose(merged[name], value, rtol=1e-3, atol=1e-4 * max(1.0, float(value.abs().max()))), name
