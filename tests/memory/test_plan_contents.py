"""What a device of a plan holds, in words, in its table and in its picture."""

from __future__ import annotations

import pytest
from transformers import LlamaConfig

from safe_loading import Workload, plan_device_map
from safe_loading._memory.plan.contents import contents_of


@pytest.mark.parametrize(
    ("paths", "text"),
    [
        ([], ""),
        ([""], "the whole model"),
        (["model.embed_tokens", "model.layers.0", "model.layers.1", "model.layers.2"], "embed_tokens, layers 0-2"),
        (["model.layers.3", "model.layers.7", "model.norm", "lm_head"], "layer 3, layer 7, norm, lm_head"),
        (["model.layers.3.mlp", "model.layers.3.self_attn", "model.layers.4"], "part of layer 3, layer 4"),
        (["encoder.block.0", "encoder.block.1", "decoder.block.0"], "block 0-1, block 0"),
        (["0", "1"], "0, 1"),
    ],
)
def test_layers_are_ranges_and_other_modules_have_their_names(paths: list[str], text: str) -> None:
    assert contents_of(paths) == text


def test_the_table_and_the_picture_say_what_each_card_holds_and_leave_out_what_no_card_has() -> None:
    config = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=6, num_attention_heads=4, vocab_size=99
    )
    plan = plan_device_map(config, {0: "2MB", 1: "2MB"}, workload=Workload.generate(1, 16))
    svg, table = plan._repr_svg_(), plan.table()
    for text in (svg, table):
        assert "layers 0-" in text
        assert "KV cache" in text
        assert "gradients" not in text
    assert "LlamaForCausalLM, Workload.generate" in svg
    assert "LlamaForCausalLM" not in plan._picture(), "the page has the title once"
    assert svg.count(" free<") == 2
