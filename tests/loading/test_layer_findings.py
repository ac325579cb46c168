"""What check_checkpoint sees by comparing layers, and that it says nothing of models that are as they should be."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from faults.folders import tensors
from tiny_models import _config_class, causal_lm_classes, image_text_classes

from safe_loading import check_checkpoint
from safe_loading._checkpoint.base_config import base_config_faults
from safe_loading._checkpoint.header import TensorInfo
from safe_loading._loading.layer_findings import layer_findings
from safe_loading._model.dtypes import DTYPES
from safe_loading._model.meta_model import build_on_meta

EVERY = sorted({*causal_lm_classes(), *image_text_classes()})
SAMPLE = {*random.Random(3).sample(EVERY, 5), "Gemma3nForCausalLM", "GitForCausalLM", "DeepseekV3ForCausalLM"}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
Change = Callable[[dict[str, torch.Tensor]], Any]
Q, NORM = "model.layers.1.self_attn.q_proj.weight", "model.norm.weight"


def codes(folder: Path) -> dict[str, str]:
    return {finding.code: finding.severity for finding in check_checkpoint(folder).findings}


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    from models import save_llama

    return save_llama(tmp_path / "llama", num_hidden_layers=4)


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in SAMPLE else [pytest.mark.slow]) for n in EVERY])
def test_a_model_of_its_published_size_is_as_it_should_be(name: str) -> None:
    try:
        config = _config_class(name)()
        model = build_on_meta(getattr(transformers, name), config, torch.float32)
    except Exception as error:  # the defaults of some configs describe no model
        pytest.skip(f"{type(error).__name__}: {error}")
    document = json.loads(config.to_json_string(use_diff=False))
    held = {
        name: TensorInfo(name, NAMES[tensor.dtype], tuple(tensor.shape), 0, tensor.nbytes)
        for name, tensor in model.state_dict().items()
    }
    found = [*base_config_faults(Path("config.json"), document), *layer_findings(Path("config.json"), document, held)]
    assert [finding for finding in found if finding.severity == "error"] == []


@pytest.mark.parametrize(
    ("pick", "change", "code"),
    [
        (Q, lambda held: held.pop(Q), "layer-tensor-missing"),
        (Q, lambda held: held.update({Q: held[Q].view(16, 64)}), "layer-shape"),
        (Q, lambda held: held.update({Q: held[Q][:31]}), "layer-shape"),
        (Q, lambda held: held.update({Q: held[Q].int()}), "integer-weight"),
        (NORM, lambda held: held.update({NORM: held[NORM].to(torch.int8)}), "integer-weight"),
        (NORM, lambda held: held.update({"norm.weight": held[NORM].clone()}), "tensor-two-names"),
    ],
)
def test_what_one_layer_alone_has_is_an_error(llama: Path, pick: str, change: Change, code: str) -> None:
    assert codes(llama) == {}
    tensors(change, pick)(llama)
    assert codes(llama) == {code: "error"}


FIRST = Q.replace(".1.", ".0.")


@pytest.mark.parametrize(
    ("pick", "config", "change"),
    [
        (FIRST, {}, lambda held: held.update({FIRST: held[FIRST][:31]})),
        (Q, {"layer_types": ["full", "other", "full", "full"]}, lambda held: held.pop(Q)),
        (Q, {"quantization_config": {"quant_method": "fp8"}}, lambda held: held.update({Q: held[Q].to(torch.int8)})),
        (Q, {}, lambda held: held.update({"model.layers.1.of_another_kind.weight": held.pop(Q)})),
    ],
)
def test_what_may_differ_is_none(llama: Path, pick: str, config: dict[str, Any], change: Change) -> None:
    document = json.loads((llama / "config.json").read_text())
    (llama / "config.json").write_text(json.dumps({**document, **config}))
    tensors(change, pick)(llama)
    assert "error" not in codes(llama).values()


def test_layers_that_predict_further_tokens_are_not_counted(llama: Path) -> None:
    document = json.loads((llama / "config.json").read_text())
    (llama / "config.json").write_text(json.dumps({**document, "num_hidden_layers": 3}))
    assert codes(llama) == {"layers-differ": "error"}
    (llama / "config.json").write_text(json.dumps({**document, "num_hidden_layers": 3, "num_nextn_predict_layers": 1}))
    assert codes(llama) == {}
