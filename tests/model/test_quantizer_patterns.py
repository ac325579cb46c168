"""Each pattern of a quantization config is compiled once, however many a config names."""

from __future__ import annotations

import re
from collections import Counter

import pytest
import torch
from models import QUANTIZABLE
from transformers import LlamaConfig
from transformers.quantizers import quantizers_utils

from safe_loading._model.quantized_meta_model import quantized_meta_model

# As GLM-5 in fp8 does: more names than re keeps compiled.
NAMES = [f"model.layers.{layer}.mlp.gate" for layer in range(700)]
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": [*NAMES, "lm_head"]}
NF4 = {"load_in_4bit": True, "llm_int8_skip_modules": [*NAMES, "lm_head"]}


@pytest.mark.parametrize("quantization", [FP8, NF4], ids=["transformers' own layers", "stand-ins"])
def test_more_patterns_than_re_keeps_are_compiled_once_each(
    quantization: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    import re._compiler as compiler

    compiled: Counter[str] = Counter()
    compile_again = compiler.compile

    def counted(pattern: str, flags: int = 0) -> re.Pattern[str]:
        compiled[pattern] += 1
        return compile_again(pattern, flags)

    monkeypatch.setattr(compiler, "compile", counted)
    re.purge()
    made = quantized_meta_model(LlamaConfig(**QUANTIZABLE), quantization, dtype=torch.bfloat16)
    of_gates = {pattern: times for pattern, times in compiled.items() if "mlp.gate)" in pattern and "(?<=" in pattern}
    assert len(of_gates) == len(NAMES)
    assert set(of_gates.values()) == {1}
    assert quantizers_utils.re is re
    assert made.model.get_submodule("lm_head").weight.dtype == torch.bfloat16
    assert made.model.get_submodule("model.layers.0.mlp.up_proj").weight.dtype != torch.bfloat16
