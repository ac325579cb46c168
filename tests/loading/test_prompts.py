"""Prompts of another base are refused before it is read: peft loads them, and the model fails, or is off, later."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from tiny_models import tiny_config

from safe_loading import AdapterError, check_checkpoint, load_adapter_on_rank, load_peft_on_rank

PROMPTS = {
    "PromptTuningConfig": {"num_virtual_tokens": 4},
    "PromptEncoderConfig": {"num_virtual_tokens": 4, "encoder_hidden_size": 16},
    "PrefixTuningConfig": {"num_virtual_tokens": 4},
}
WIDTH = r"token_dim=64, and the embeddings of LlamaForCausalLM have 32 columns\. Pass the base that it was trained on"
LAYERS = r"num_layers=2, and LlamaForCausalLM has {} layers?\. Pass the base that it was trained on"


def base(folder: Path, **changed: int) -> Path:
    kind: Any = transformers.LlamaForCausalLM
    config = tiny_config(kind)
    for name, value in changed.items():
        setattr(config, name, value)
    kind(config).save_pretrained(folder)
    return folder


def saved(folder: Path, method: str) -> tuple[Path, Path]:
    """Save a base and a prompt that was trained on it."""
    own = base(folder / "base", hidden_size=64, num_hidden_layers=2)
    model = transformers.AutoModelForCausalLM.from_pretrained(own)
    config = getattr(peft, method)(task_type="CAUSAL_LM", **PROMPTS[method])
    peft.get_peft_model(model, config).save_pretrained(str(folder / "prompt"))
    return own, folder / "prompt"


@pytest.mark.parametrize("method", ["PromptTuningConfig", "PromptEncoderConfig"])
def test_a_prompt_of_another_width_is_refused(tmp_path: Path, method: str) -> None:
    own, prompt = saved(tmp_path, method)
    narrow = base(tmp_path / "narrow", hidden_size=32)
    with pytest.raises(AdapterError, match=WIDTH):
        load_peft_on_rank(prompt, narrow)
    assert not check_checkpoint(prompt, base_model=narrow).ok
    # rows of embeddings know nothing of layers
    deep = base(tmp_path / "deep", hidden_size=64, num_hidden_layers=3)
    for right in (own, deep):
        load_peft_on_rank(prompt, right)(input_ids=torch.arange(3, 11)[None])


@pytest.mark.parametrize("layers", [1, 3])
def test_a_prefix_of_another_number_of_layers_is_refused(tmp_path: Path, layers: int) -> None:
    own, prompt = saved(tmp_path, "PrefixTuningConfig")
    other = base(tmp_path / "other", hidden_size=64, num_hidden_layers=layers)
    with pytest.raises(AdapterError, match=LAYERS.format(layers)):
        load_peft_on_rank(prompt, other)
    assert not check_checkpoint(prompt, base_model=other).ok
    load_peft_on_rank(prompt, own)(input_ids=torch.arange(3, 11)[None])


def test_a_later_prompt_is_refused_and_the_model_stays_as_it_was(tmp_path: Path) -> None:
    own, prompt = saved(tmp_path, "PromptTuningConfig")
    (tmp_path / "again").mkdir()
    second = saved(tmp_path / "again", "PromptTuningConfig")[1]
    document = (second / "adapter_config.json").read_text().replace('"token_dim": 64', '"token_dim": 32')
    (second / "adapter_config.json").write_text(document)
    model = load_peft_on_rank(prompt, own)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(AdapterError, match="token_dim=32, and the embeddings of LlamaForCausalLM have 64 columns"):
        load_adapter_on_rank(model, second, "second")
    assert list(model.peft_config) == ["default"]
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], value) for name, value in before.items())


@pytest.mark.parametrize("method", PROMPTS)
def test_a_prompt_without_a_task_is_refused_and_loads_with_it(tmp_path: Path, method: str) -> None:
    own, prompt = saved(tmp_path, method)
    tokens = torch.arange(3, 11)[None]
    file = prompt / "adapter_config.json"
    document = json.loads(file.read_text())
    file.write_text(json.dumps({name: value for name, value in document.items() if name != "task_type"}))
    plain = transformers.AutoModelForCausalLM.from_pretrained(own)
    base_alone = plain(input_ids=tokens).logits
    with_peft = peft.PeftModel.from_pretrained(plain, str(prompt))
    assert torch.equal(with_peft(input_ids=tokens).logits, base_alone)  # as if there were no prompt
    with pytest.raises(AdapterError, match=r'task_type is missing.*add .*"task_type": "CAUSAL_LM"'):
        load_peft_on_rank(prompt, own)
    assert not check_checkpoint(prompt, base_model=own).ok
    file.write_text(json.dumps({**document, "task_type": "CAUSAL_LM"}))
    assert not torch.equal(load_peft_on_rank(prompt, own)(input_ids=tokens).logits[:, -8:], base_alone)
