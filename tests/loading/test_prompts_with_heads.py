"""Prompts that were trained with a head: both come from the file, in a classifier as in peft."""

from __future__ import annotations

import inspect
import warnings
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from faults import adapters as faults
from peft import PeftModel
from safetensors.torch import load_file
from tiny_models import tiny_config
from transformers import BertModel

from safe_loading import AdapterError, load_peft_on_rank

METHODS = {"PromptTuningConfig": {}, "PromptEncoderConfig": {"encoder_hidden_size": 64}, "PrefixTuningConfig": {}}
CLASSES = {
    "BertForSequenceClassification": ("SEQ_CLS", "classifier"),
    "BertForTokenClassification": ("TOKEN_CLS", "classifier"),
    "BertForQuestionAnswering": ("QUESTION_ANS", "qa_outputs"),
}


def save(folder: Path, kind: Any, config: peft.PeftConfig, dtype: torch.dtype = torch.float32) -> tuple[Path, Path]:
    torch.manual_seed(0)
    base = kind(tiny_config(kind)).to(dtype)
    base.save_pretrained(folder / "base")
    model: Any = peft.get_peft_model(base.float(), config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    model.save_pretrained(folder / "adapter")
    return folder / "base", folder / "adapter"


def outputs(model: Any) -> torch.Tensor:
    with torch.no_grad():
        answer: torch.Tensor = model(input_ids=torch.arange(3, 11)[None], return_dict=True)[0]
        return answer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("method", METHODS)
def test_the_head_is_that_of_the_file(tmp_path: Path, method: str, name: str, dtype: torch.dtype) -> None:
    kind: Any = getattr(transformers, name)
    if method == "PrefixTuningConfig" and "past_key_values" not in inspect.signature(BertModel.forward).parameters:
        pytest.skip("peft gives prefixes under a name that this transformers does not take")
    task, path = CLASSES[name]
    config = getattr(peft, method)(task_type=task, num_virtual_tokens=4, **METHODS[method])
    base, adapter = save(tmp_path, kind, config, dtype)
    model = load_peft_on_rank(adapter, base).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain: Any = PeftModel.from_pretrained(kind.from_pretrained(base), str(adapter)).eval()
    wanted, found = plain.state_dict(), model.state_dict()
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[key], value) and found[key].dtype == value.dtype for key, value in wanted.items())
    head = load_file(adapter / faults.WEIGHTS)[f"base_model.{path}.weight"]
    assert torch.equal(model.get_parameter(f"base_model.{path}.modules_to_save.default.weight"), head.to(dtype))
    assert torch.equal(outputs(model), outputs(plain))


def test_a_file_without_the_head_or_with_a_stranger_is_refused(tmp_path: Path) -> None:
    config = peft.PromptTuningConfig(task_type="SEQ_CLS", num_virtual_tokens=4)
    base, adapter = save(tmp_path, transformers.BertForSequenceClassification, config)

    def strange(tensors: faults.Tensors) -> None:
        tensors["base_model.bert.pooler.dense.bias"] = torch.zeros(64)

    def beheaded(tensors: faults.Tensors) -> None:
        del tensors["base_model.classifier.bias"]

    with pytest.raises(AdapterError, match=r"base_model\.classifier\.bias"):
        load_peft_on_rank(faults.edited(adapter, tmp_path / "without", tensors=beheaded), base)
    with pytest.raises(AdapterError, match="pooler"):
        load_peft_on_rank(faults.edited(adapter, tmp_path / "strange", tensors=strange), base)
