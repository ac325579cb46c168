"""Bases of compressed-tensors whose layers transformers alone decodes by another group of the config, or not at all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed import decoded, load, logits, save_compressed, save_mixture
from models import save_adapter

from safe_loading import check_checkpoint, load_peft_on_rank, merge_lora_checkpoint, meta_model
from safe_loading.errors import AdapterError, ArgumentError, CheckpointError, MergeError

integration = pytest.importorskip("transformers.integrations.compressed_tensors")
pytestmark = pytest.mark.skipif(
    not hasattr(integration, "CompressedTensorsDequantize"), reason="needs a transformers that decodes as it loads"
)
ATTENTION, MLP, EXPERTS = "re:.*self_attn.*", "re:.*mlp.*", r"re:.*mlp\.experts.*"
OPTIONS = {"quantization_config": decoded()}
# differences that rounding leaves, in parts of the largest value
WITHIN = {"W4A16": 0.1, "W4A16_ASYM": 0.1, "W8A16": 0.01, "W8A8": 0.01, "FP8_DYNAMIC": 0.05, "NVFP4": 0.25}


def worst(model: Any, plain: Any, part: str) -> float:
    """Return the largest difference of the weights of a part of two models, in parts of the largest of their values."""
    found = {name.replace(".base_layer", ""): value.float() for name, value in model.state_dict().items()}
    wanted = {name: value.float() for name, value in plain.named_parameters() if part in name and value.dim() > 1}
    return max(float((found[name] - value).abs().max() / value.abs().max()) for name, value in wanted.items())


@pytest.mark.parametrize(
    ("first", "second"),
    [("W4A16", "W8A16"), ("W8A16", "W4A16"), ("FP8_DYNAMIC", "NVFP4"), ("W8A8", "W4A16"), ("W4A16", "W4A16_ASYM")],
)
def test_each_layer_is_decoded_by_its_own_group(first: str, second: str, tmp_path: Path) -> None:
    base, adapter = save_compressed(tmp_path, {first: [ATTENTION], second: [MLP]})
    ours = load_peft_on_rank(base, adapter, base_kwargs=OPTIONS)
    for preset, part in ((first, "self_attn"), (second, "mlp")):
        assert worst(ours.get_base_model(), load(tmp_path / "plain"), part) < WITHIN[preset]
    (finding,) = ours.load_report.findings
    assert (finding.code, finding.severity) == ("decoded-wrongly", "warning")


def test_codes_tell_the_group_of_a_layer_that_two_groups_name(tmp_path: Path) -> None:
    """As unsloth publishes NVFP4: the last layers are in fp8, and the names of the other group are theirs, too."""
    groups = {"FP8_DYNAMIC": [ATTENTION, r"re:.*layers\.0\.mlp.*"], "NVFP4": [r"re:.*layers\.1\.mlp.*"]}
    base, adapter = save_compressed(tmp_path, groups)
    document = json.loads((base / "config.json").read_text())
    document["quantization_config"]["config_groups"]["group_1"]["targets"] = ["re:.*(mlp)\\..*_proj$"]
    (base / "config.json").write_text(json.dumps(document))
    ours, plain = load_peft_on_rank(base, adapter, base_kwargs=OPTIONS).get_base_model(), load(tmp_path / "plain")
    for part, preset in (("layers.0.mlp", "FP8_DYNAMIC"), ("layers.1.mlp", "NVFP4"), ("self_attn", "FP8_DYNAMIC")):
        assert worst(ours, plain, part) < WITHIN[preset]


def test_embeddings_of_a_group_of_their_own_are_decoded_by_it(tmp_path: Path) -> None:
    base, adapter = save_compressed(tmp_path, {"W4A16": ["Linear"], "W8A16": ["Embedding"]})
    ours = load_peft_on_rank(base, adapter, base_kwargs=OPTIONS).get_base_model()
    assert worst(ours, load(tmp_path / "plain"), "embed_tokens") < WITHIN["W8A16"]


def test_groups_are_decoded_as_by_the_first_forward_pass(tmp_path: Path) -> None:
    base, adapter = save_compressed(tmp_path, {"W4A16": [ATTENTION], "W8A16": [MLP]})
    wrong, right = load(base, **OPTIONS), load(base)
    logits(right)  # decodes it, by the groups for which its layers were made
    ours = load_peft_on_rank(base, adapter, base_kwargs=OPTIONS).get_base_model().state_dict()
    for name, value in right.named_parameters():
        if name.endswith("_proj.weight"):
            assert torch.equal(ours[name if name in ours else name.replace(".weight", ".base_layer.weight")], value)
    mlp = "layers.0.mlp.up_proj.weight"
    error = wrong.get_parameter(f"model.{mlp}") - right.get_parameter(f"model.{mlp}")
    assert error.abs().max() > 0.9 * right.get_parameter(f"model.{mlp}").abs().max()  # or nothing needs to be mended


@pytest.mark.parametrize("preset", ["NVFP4", "W8A8", "W4A16_ASYM"])
def test_experts_that_transformers_alone_decodes_wrongly_or_not_at_all(preset: str, tmp_path: Path) -> None:
    """transformers#48371 and #47430."""
    base, adapter = save_mixture(tmp_path, preset)
    (found,) = (each for each in check_checkpoint(base).findings if each.code == "decoded-wrongly")
    assert found.fix == "take the base in 16 bits that it was made from, for a load without this package."
    ours = load_peft_on_rank(base, adapter, base_kwargs=OPTIONS)
    assert worst(ours.get_base_model(), load(tmp_path / "plain"), "mlp.experts") < WITHIN[preset]
    assert load_peft_on_rank(tmp_path / "plain", adapter).load_report.ok  # the advice taken


@pytest.mark.parametrize("options", [{}, OPTIONS], ids=["packed", "decoded"])
def test_experts_of_another_group_than_the_other_layers_beside_plain_ones(options: Any, tmp_path: Path) -> None:
    first = r"re:.*layers\.0\.mlp\.experts.*"
    groups = {"FP8_DYNAMIC": [ATTENTION], "W8A16": [EXPERTS]}
    base, adapter = save_mixture(tmp_path, groups, also_ignored=[first], depth=2)
    ours, plain = load_peft_on_rank(base, adapter, base_kwargs=options).get_base_model(), load(tmp_path / "plain")
    for layer, within in ((0, 1e-9), (1, WITHIN["W8A16"])):
        assert worst(ours, plain, f"layers.{layer}.mlp.experts") < within


def test_a_base_that_cannot_stay_packed_is_refused_with_a_load_that_decodes_it(tmp_path: Path) -> None:
    """transformers makes no place for packed zero points (AWQ of llm-compressor) before it decodes them."""
    base, _ = save_compressed(tmp_path, "W4A16_ASYM")
    adapter = save_adapter(tmp_path / "head", tmp_path / "plain", target_modules=["lm_head"])
    with pytest.raises(
        CheckpointError, match=r"cannot load the base: .*\. Load it decoded: base_kwargs=.*dequantize=True"
    ):
        load_peft_on_rank(base, adapter)
    ours = load_peft_on_rank(base, adapter, base_kwargs=OPTIONS).get_base_model()
    assert worst(ours, load(tmp_path / "plain"), "mlp") < WITHIN["W4A16_ASYM"]


@pytest.mark.parametrize("preset", ["FP8_DYNAMIC", "W8A8"])
def test_codes_that_no_name_of_the_config_reaches_are_refused(preset: str, tmp_path: Path) -> None:
    """Names of another release of transformers, say: the layers stay plain, and their weights are the codes alone."""
    base, adapter = save_compressed(tmp_path, preset)
    document = json.loads((base / "config.json").read_text())
    names = ["lm_head", "re:.*down_proj"]
    document["quantization_config"]["ignore"] = names
    (base / "config.json").write_text(json.dumps(document))
    with pytest.raises(AdapterError, match=r"codes of 2 layers for values .*down_proj.*dequantize=True\)\}; or"):
        load_peft_on_rank(base, adapter)
    with pytest.warns(UserWarning, match="took the codes of 2 layers for values"):
        wrong = load_peft_on_rank(base, adapter, strict=False)
    assert "codes-as-values" in {finding.code for finding in wrong.load_report.findings}
    plain = load(tmp_path / "plain")
    assert worst(wrong.get_base_model(), plain, "down_proj") > 100
    # the advice taken, each
    ours = load_peft_on_rank(base, adapter, base_kwargs=OPTIONS).get_base_model()
    assert worst(ours, plain, "down_proj") < WITHIN[preset]
    names.pop()
    (base / "config.json").write_text(json.dumps(document))
    assert load_peft_on_rank(base, adapter).load_report.ok


@pytest.mark.parametrize("folder", ["groups", "experts"])
def test_a_load_in_plain_weights_is_no_advice_where_it_is_wrong(folder: str, tmp_path: Path) -> None:
    if folder == "groups":
        base, adapter = save_compressed(tmp_path, {"W4A16": [ATTENTION], "W8A16": [MLP]})
    else:
        base, adapter = save_mixture(tmp_path, "NVFP4")
    with pytest.raises(ArgumentError, match="take the one that it was made of, whose weights are not quantized"):
        meta_model(base)
    assert meta_model(tmp_path / "plain")
    with pytest.raises(MergeError, match="Merge into the base that it was made from"):
        merge_lora_checkpoint(base, adapter, tmp_path / "out")
