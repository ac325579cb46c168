"""Rows longer than a model's positions: a finding of plans and forecasts, and of no searches within them."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import torch
from models import SIZES
from transformers import (
    EncodecConfig,
    GPT2Config,
    LlamaConfig,
    MambaConfig,
    MusicgenConfig,
    MusicgenDecoderConfig,
    PreTrainedConfig,
    T5Config,
    XLNetConfig,
)

from safe_loading import Workload, largest_workload, plan_device_map, predict_memory
from safe_loading.__main__ import main
from safe_loading._model.positions import long_rows, positions_of

CARD = {0: "1GB"}
LIMITED: dict[str, Any] = {**SIZES, "max_position_embeddings": 64}
CONFIGS = [
    LlamaConfig(**LIMITED),
    GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=64, n_positions=64),
]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.model_type)
def test_rows_beyond_the_positions_are_told_and_shorter_ones_are_not(config: PreTrainedConfig) -> None:
    found = [
        *predict_memory(config, Workload.train(1, 65)).findings,
        *plan_device_map(config, CARD, workload=Workload.generate(1, 65), verify=False).findings,
    ]
    assert [(finding.code, finding.severity) for finding in found] == [("context-too-long", "warning")] * 2
    (most,) = {int(re.search(r"at most (\d+) tokens", finding.fix)[1]) for finding in found}
    assert predict_memory(config, Workload.train(1, most)).findings == ()
    assert plan_device_map(config, CARD, workload=Workload.generate(1, most), verify=False).findings == ()
    assert largest_workload(config, CARD).sequence_length == most


def test_of_two_language_models_the_one_that_writes_counts() -> None:
    config = MusicgenConfig(text_encoder=T5Config(), audio_encoder=EncodecConfig(), decoder=MusicgenDecoderConfig())
    assert positions_of(config) == MusicgenDecoderConfig().max_position_embeddings


def test_a_model_without_a_limit_has_none() -> None:
    for config in (MambaConfig(), XLNetConfig(), None):
        model = torch.nn.Module()
        vars(model)["config"] = config
        assert long_rows(model, Workload.train(1, 10**6)) == []


def test_the_command_says_it_in_words_and_in_json(tmp_path, capsys) -> None:
    LlamaConfig(**LIMITED, architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path)
    words = ["predict", str(tmp_path), "--generate", "65"]
    assert main(words) == 0
    assert "a row has 65 tokens, and the model was made for 64" in capsys.readouterr().out
    assert main([*words, "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert [finding["code"] for finding in row["forecast"]["findings"]] == ["context-too-long"]
    assert "context-too-long" in predict_memory(tmp_path, Workload.generate(1, 65))._repr_html_()
