"""The lines that belong into the block of load_at_prepare."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

import safe_loading._sharding.load_at_prepare as block
from safe_loading import load_at_prepare


def test_a_block_around_the_wrong_lines_is_told(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(block, "shard_at_prepare", lambda **_: None)  # it would stay in this process
    model = AutoModelForCausalLM.from_pretrained(tiny_llama)
    with caplog.at_level("WARNING", logger="safe_loading"):
        with load_at_prepare():
            model.train()
        assert "no from_pretrained of transformers ran in its block" in caplog.text
        caplog.clear()
        with load_at_prepare():
            AutoModelForCausalLM.from_pretrained(tiny_llama)
        assert not caplog.records
