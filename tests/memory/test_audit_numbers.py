"""Checks of the numbers of a training: what the scripts of `silent_numbers` leave open, and what must not be found."""

from __future__ import annotations

import math
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from silent_numbers import BOUNDS, ROW
from silent_scripts import TOKENS, adapted, base, halved, saved
from silent_untrained import IMAGE, llava
from tiny_models import tiny_config
from transformers import AutoModel, BitsAndBytesConfig, LlamaForCausalLM, LlamaForSequenceClassification

from safe_loading import Workload, audit_model, meta_model

STEP = Workload.train(2, 16)


def codes(model: Any, workload: Workload | None = STEP, **options: Any) -> dict[str, str]:
    report = audit_model(model, workload, forecast=False, **options)
    return {finding.code: f"{finding.message} {finding.fix}" for finding in report.findings}


def test_a_base_that_was_changed_is_saved_and_loaded_again(tmp_path: Path) -> None:
    base().save_pretrained(tmp_path / "base")
    load = lambda folder: LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)  # noqa: E731
    merged = PeftModel.from_pretrained(load(tmp_path / "base"), saved(tmp_path)).merge_and_unload()
    model = adapted(merged)
    told = codes(model, None, round_trip=True)
    assert "6 weights of the frozen base are not what" in told["SL140"]
    assert "q_proj.weight" in told["SL140"]
    assert "there with other values" in told["SL140"]
    model.unload().save_pretrained(tmp_path / "merged")
    assert "SL140" not in codes(adapted(load(tmp_path / "merged")), None, round_trip=True)


def test_a_base_is_compared_as_it_was_loaded(tmp_path: Path) -> None:
    """In another dtype, upcast, with ties and a part that is saved, on meta, and without a checkpoint."""
    base(tie_word_embeddings=True).save_pretrained(tmp_path)
    for dtype in (torch.float32, torch.bfloat16):
        model = LlamaForCausalLM.from_pretrained(tmp_path, dtype=dtype)
        assert "SL140" not in codes(adapted(model, modules_to_save=["norm"]), None, round_trip=True)
    for parameter in model.parameters():
        parameter.data = parameter.data.float()
    assert "SL140" not in codes(model, None, round_trip=True)
    assert "SL140" not in codes(adapted(meta_model(tmp_path)), None, round_trip=True)
    assert "SL140" not in codes(adapted(), None, round_trip=True)
    model = adapted(LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32))
    model.get_base_model().model.norm.weight.data[0] += 1
    assert "1 weight of the frozen base is not what" in codes(model, None, round_trip=True)["SL140"]


def test_a_head_of_which_each_adapter_has_a_copy_is_no_weight_of_the_base(tmp_path: Path) -> None:
    """The checkpoint of a language model has none, and a load replaces it by the adapter's."""
    base().save_pretrained(tmp_path)
    classifier = LlamaForSequenceClassification.from_pretrained(tmp_path, num_labels=2)
    model = adapted(classifier, task_type=None, modules_to_save=["score"])
    assert "SL140" not in codes(model, None, round_trip=True)
    model.add_adapter("headless", LoraConfig(target_modules=["q_proj"]))  # under which the base's own runs
    assert "score.weight (not there)" in codes(model, None, round_trip=True)["SL140"]


def test_a_base_that_is_not_compared_is_said(tmp_path: Path) -> None:
    base().save_pretrained(tmp_path)
    load: Any = LlamaForCausalLM.from_pretrained

    def said(model: Any) -> str:
        report = audit_model(model, forecast=False, round_trip=True)
        return " ".join(text for text in report.skipped if text.startswith("base values"))

    assert said(adapted(load(tmp_path))) == ""
    in_8_bits = load(tmp_path, quantization_config=BitsAndBytesConfig(load_in_8bit=True), device_map={"": "cpu"})
    assert "the base is quantized in memory, whose codes are no values" in said(adapted(in_8_bits))
    assert f"It was not compared with {tmp_path}" in said(adapted(in_8_bits))
    assert "the adapter's start changed the base" in said(adapted(load(tmp_path), init_lora_weights="pissa"))
    model = adapted(load(tmp_path))
    (tmp_path / "model.safetensors").unlink()  # whose pages the model still has
    (tmp_path / "model.safetensors").write_bytes(b"torn")
    assert "could not be compared with the base (SL140)" in said(model)


def test_the_last_layer_of_a_vision_tower_has_nothing_to_recompute() -> None:
    """LLaVA reads the layer before it."""
    model = get_peft_model(llava(), LoraConfig(r=2, target_modules=r".*language_model.*q_proj")).train()
    model.get_base_model().gradient_checkpointing_enable()
    tokens = TOKENS.clone()
    tokens[:, 1:5] = IMAGE
    inputs = {"input_ids": tokens, "pixel_values": torch.rand(2, 3, 16, 16)}
    step = Workload.train(2, 16, gradient_checkpointing=True)
    assert codes(model, step, inputs=inputs) == {}
    model.eval()
    assert "0 of 5 layers" in codes(model, step, inputs=inputs)["SL120"]


def test_lengths_of_rows_are_not_read_without_flash_attention() -> None:
    lengths = {"cu_seq_lens_q": torch.tensor([0, 16, 32], dtype=torch.int32), "max_length_q": torch.tensor(16)}
    told = codes(adapted(base(use_cache=False)), inputs={"input_ids": ROW, **lengths})
    assert "no position at which a row begins" in told["SL141"]
    assert "SL141" not in codes(adapted(base(use_cache=False)), inputs={"input_ids": ROW, "position_ids": BOUNDS})


def test_a_trainer_switches_the_cache_off_and_a_mask_of_pairs_is_one() -> None:
    inputs = {"input_ids": ROW, "position_ids": BOUNDS}
    trainer = types.SimpleNamespace(model=None, args=None, optimizer=None)
    assert "SL141" in codes(adapted(), inputs=inputs)
    assert "SL141" not in codes(adapted(), inputs=inputs, trainer=trainer)
    pairs = torch.block_diag(torch.ones(16, 16), torch.ones(16, 16)).tril().bool()[None, None]
    assert "SL141" not in codes(adapted(), inputs={**inputs, "attention_mask": pairs})
    assert "SL141" not in codes(adapted())


def test_frequencies_are_loaded_right(tmp_path: Path) -> None:
    base().save_pretrained(tmp_path)
    loaded = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert "SL142" not in codes(adapted(loaded))
    assert "rounded to bfloat16" in codes(adapted(loaded.to(torch.bfloat16)))["SL142"]


@pytest.mark.parametrize("scaling", [{"rope_type": "dynamic", "factor": 2.0}, {"rope_type": "linear", "factor": 2.0}])
def test_frequencies_of_longer_texts_are_those_of_the_config(scaling: dict[str, Any]) -> None:
    assert "SL142" not in codes(adapted(base(rope_parameters={"rope_theta": 10000.0, **scaling})))


@pytest.mark.parametrize("kind", ["gemma3_text", "gemma4_text", "bert", "clip_text_model", "gptj"])
def test_what_no_checkpoint_holds_is_compared_under_every_name(kind: str) -> None:
    """Frequencies for each kind of layer, scales of embeddings, numbers of positions, and tables of them."""
    config = tiny_config(kind)
    with torch.device("meta"):
        model: Any = AutoModel.from_config(config)
    right = AutoModel.from_config(config)
    model.to_empty(device="cpu")
    model.load_state_dict(right.state_dict())
    for buffer in model.buffers():
        buffer.zero_()  # as fresh memory is
    report = audit_model(model, forecast=False)
    (found,) = [each for each in report.findings if each.code == "SL142"]
    assert found.severity == "error"
    assert "other values than the config gives, as to_empty() leaves them" in found.message
    right(torch.arange(12)[None])
    assert not [each for each in audit_model(right, forecast=False).findings if each.code == "SL142"]
    rounds = any("inv_freq" in name for name, _ in model.named_buffers())
    cast = audit_model(right.to(torch.bfloat16), forecast=False).findings
    assert [each.severity for each in cast if each.code == "SL142"] == ["warning"] * rounds


def test_factors_are_made_anew() -> None:
    model = adapted()
    for name, parameter in model.named_parameters():
        parameter.data.mul_("lora_" not in name)
    assert "both factors of the adapter are 0 in 6 of 6 layers" in codes(model)["SL121"]
    for layer in model.modules():
        if isinstance(layer, LoraLayer):
            layer.reset_lora_parameters("default", True)
    assert codes(model) == {}


def test_a_schedule_may_begin_at_zero() -> None:
    model = adapted()
    own = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(own, lr=1e-3)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 10))
    assert optimizer.param_groups[0]["lr"] == 0
    assert codes(model, optimizer=optimizer) == {}


def trainer_of(model: Any, **arguments: Any) -> Any:
    arguments = {"optim": "adamw_torch_fused", "learning_rate": 2e-5, **arguments}
    return types.SimpleNamespace(model=model, args=types.SimpleNamespace(**arguments), optimizer=None)


def test_steps_are_rounded_away_where_nothing_keeps_them() -> None:
    model = halved(base())
    told = codes(model, trainer=trainer_of(model, bf16=True))["SL143"]
    assert "lr=2e-05" in told
    share = int(told.partition("%")[0]) / 100
    values = torch.cat([p.detach().flatten().float() for p in model.parameters()])
    assert share == pytest.approx(float((values.bfloat16() - 2e-5 == values.bfloat16()).float().mean()), abs=0.06)
    for rate, severity in ((1e-6, "warning"), (1e-5, "warning"), (5e-5, "info"), (1e-2, None)):
        report = audit_model(model, STEP, trainer_of(model, bf16=True, learning_rate=rate), forecast=False)
        assert {f.code: f.severity for f in report.findings}.get("SL143") == severity
    for other in (
        {"deepspeed": "config.json"},
        {"optim": "adamw_anyprecision"},
        {"learning_rate": 1e-2},
        {"optim": "sgd"},
    ):
        assert "SL143" not in codes(model, trainer=trainer_of(model, **other)), other
    for engine in ("is_deepspeed_enabled", "is_fsdp_enabled"):  # as accelerate launch sets them up
        launched = types.SimpleNamespace(**vars(trainer_of(model, bf16=True)), **{engine: True})
        assert "SL143" not in codes(model, trainer=launched), engine
    sgd = torch.optim.SGD(model.parameters(), lr=1e-5)
    assert "SL143" not in codes(model, optimizer=sgd)


def test_scales_of_patterns_and_of_rank_stabilized_lora_are_those_of_the_config() -> None:
    for fields in ({"use_rslora": True}, {"alpha_pattern": {"q_proj": 64}}, {"rank_pattern": {"v_proj": 4}}):
        assert codes(adapted(**fields)) == {}
    model = adapted(use_rslora=True, lora_alpha=4)
    for layer in model.modules():
        if isinstance(layer, LoraLayer):
            layer.scale_layer(0.5)
    assert f"by {2 / math.sqrt(2):g} and not {4 / math.sqrt(2):g}" in codes(model)["SL132"]


def test_a_reference_that_shares_frozen_weights_is_one() -> None:
    model = adapted()
    shared = LlamaForCausalLM(model.config)
    shared.load_state_dict(
        {n.replace(".base_layer", ""): p for n, p in model.get_base_model().state_dict().items() if "lora_" not in n},
        assign=True,
    )
    trainer = types.SimpleNamespace(model=model, args=None, optimizer=None, ref_model=shared.requires_grad_(False))
    assert "SL144" not in codes(model, trainer=trainer)
    full = base()
    trainer = types.SimpleNamespace(model=full, args=None, optimizer=None, ref_model=full)
    assert "moves with it" in codes(full, trainer=trainer)["SL144"]


def test_a_loss_that_is_an_attribute_of_the_output_is_the_loss() -> None:
    class Attributed(LlamaForCausalLM):
        def forward(self, input_ids: Any = None, attention_mask: Any = None, labels: Any = None, **kwargs: Any) -> Any:
            out = self.model(input_ids=input_ids, attention_mask=attention_mask)
            out.loss = self.lm_head(out.last_hidden_state).square().mean()
            return out

    assert "SL121" not in codes(Attributed(base().config).train())
