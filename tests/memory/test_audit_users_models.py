"""Models as people train them, of which the audit said something false or gave advice that did not mend."""

from __future__ import annotations

import copy
import types
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from accelerate import cpu_offload, dispatch_model
from engines import needs
from models import SIZES
from peft import LoraConfig, PeftModel, get_peft_model, prepare_model_for_kbit_training
from test_audit_model import codes
from tiny_models import tiny_config
from torch import nn
from transformers import (
    BertConfig,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertModel,
    BitsAndBytesConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MusicgenForConditionalGeneration,
    Qwen2VLForConditionalGeneration,
    RobertaForSequenceClassification,
)
from transformers.pytorch_utils import compile_compatible_method_lru_cache

from safe_loading import (
    AdapterError,
    TraceError,
    Transparent,
    Workload,
    audit_model,
    load_peft_on_rank,
    predict_memory,
    wrap_transparent,
)

STEP = Workload.train(2, 16)
LORA: dict[str, Any] = {"r": 2, "target_modules": ["q_proj", "v_proj"]}


def llama(**sizes: Any) -> Any:
    return LlamaForCausalLM._from_config(LlamaConfig(**{**SIZES, **sizes}), dtype=torch.bfloat16)


def student(*, adapter: bool) -> Any:
    return get_peft_model(llama(), LoraConfig(**LORA)) if adapter else llama()


class Distilled(nn.Module):
    """A student and its teacher in one module."""

    road = "without gradients"

    def __init__(self, model: Any, teacher: Any) -> None:
        super().__init__()
        self.model, self.teacher = model, teacher

    def forward(self, input_ids: Any, attention_mask: Any = None, labels: Any = None, **kwargs: Any) -> Any:
        out = self.model(input_ids=input_ids, attention_mask=attention_mask, labels=labels, **kwargs)
        with torch.set_grad_enabled(self.road != "without gradients"):
            target = self.teacher(input_ids=input_ids, attention_mask=attention_mask).logits
        target = target.detach() if self.road == "detached" else target
        out.loss = out.loss + nn.functional.mse_loss(out.logits, target)
        return out


class Taught(Transparent):
    """The same as the fix says."""

    teacher: Any

    def __call__(self, *args: Any, **inputs: Any) -> Any:
        out = super().__call__(*args, **inputs)
        with torch.no_grad():
            target = self.teacher[0](input_ids=inputs["input_ids"], attention_mask=inputs.get("attention_mask")).logits
        out.loss = out.loss + nn.functional.mse_loss(out.logits, target)
        return out


@pytest.mark.parametrize("adapter", [True, False], ids=["adapter", "whole"])
@pytest.mark.parametrize(
    ("road", "words"),
    [
        ("without gradients", "an optimizer of model.parameters() has them"),
        ("detached", "its activations are kept for nothing"),
        ("trained along", "the loss also changes it"),
    ],
)
def test_a_trainable_teacher_in_a_wrapper_is_told_as_one(road: str, words: str, adapter: bool) -> None:
    wrapper = Distilled(student(adapter=adapter), llama(num_hidden_layers=4))
    wrapper.road = road
    found = codes(wrapper, STEP)
    # it is no head that a checkpoint should have, no copy of the base, and no branch that is never taken
    assert set(found) == {"SL101", "SL114"}
    assert words in found["SL114"].message
    assert found["SL114"].where == "model.teacher"
    exec(found["SL114"].fix.split(",")[0], {"teacher": wrapper.teacher})
    assert set(codes(wrapper, STEP)) == {"SL101"}
    lines = [line.strip() for line in codes(wrapper, STEP)["SL101"].fix.splitlines()[1:]]
    scope: dict[str, Any] = {"wrapper": wrapper, "Mixin": Taught}
    exec("\n".join(lines), {**scope, "wrap_transparent": wrap_transparent}, scope)
    assert codes(scope["model"], STEP) == {}
    assert isinstance(scope["model"], PeftModel) is adapter
    assert not any("teacher" in name for name in scope["model"].state_dict())


class Averaged(nn.Module):
    """A model and its moving average in one module, of which the average was not frozen."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model, self.ema = model, copy.deepcopy(model)

    def forward(self, **inputs: Any) -> Any:
        return self.model(**inputs)


def test_an_average_in_a_wrapper_is_no_head_either() -> None:
    wrapper = Averaged(llama())
    found = codes(wrapper, STEP)
    assert set(found) == {"SL101", "SL114"}
    assert "wrap_transparent(model, Mixin, ema=(wrapper.ema,))" in found["SL101"].fix
    wrapper.ema.requires_grad_(requires_grad=False)
    assert set(codes(wrapper, STEP)) == {"SL101"}


class Refined(Distilled):
    """A part of one's own whose name begins as a reference's does."""

    def __init__(self, model: Any) -> None:
        super().__init__(model, None)
        self.refiner = nn.Linear(SIZES["vocab_size"], 1)

    def forward(self, input_ids: Any, attention_mask: Any = None, labels: Any = None, **kwargs: Any) -> Any:
        out = self.model(input_ids=input_ids, attention_mask=attention_mask, labels=labels, **kwargs)
        out.loss = out.loss + self.refiner(out.logits.float()).square().mean()
        return out


def test_layers_of_a_head_that_is_trained_whole_are_no_unknown_names() -> None:
    model = get_peft_model(
        RobertaForSequenceClassification(tiny_config("roberta")), LoraConfig("SEQ_CLS", target_modules="all-linear")
    )
    targets: Any = model.peft_config["default"].target_modules
    assert "classifier.dense" in targets  # of peft, which trains a copy of the whole head
    assert "SL138" not in codes(model.train(), STEP)
    targets.add("classifier.dens")
    assert "SL138" in codes(model, STEP)


def test_patterns_whose_order_is_lost_are_told_before_they_are_saved() -> None:
    def found(**patterns: dict[str, int]) -> list[str]:
        model = get_peft_model(
            LlamaForCausalLM(LlamaConfig(**SIZES)),
            LoraConfig("CAUSAL_LM", target_modules=["k_proj", "q_proj"], **patterns),
        )
        return [each.message for each in audit_model(model.train(), STEP).findings if each.code == "SL138"]

    for field in ("rank_pattern", "alpha_pattern"):
        (told,) = found(**{field: {"self_attn.q_proj": 4, "q_proj": 2, "k_proj": 3}})
        assert told.startswith(f"{field} of adapter 'default' gives model.layers.0.self_attn.q_proj 4 here, and 2 once")
        assert not found(**{field: {"self_attn.q_proj": 4, "k_proj": 3}})
        assert not found(**{field: {"self_attn.q_proj": 4, "q_proj": 4}})


def test_a_head_is_no_teacher() -> None:
    found = codes(Refined(student(adapter=True)), STEP)
    assert "SL114" not in found
    assert found["SL104"].where == "refiner.bias, refiner.weight"


def test_another_model_is_no_second_base() -> None:
    model = student(adapter=True)
    trainer = types.SimpleNamespace(model=model, args=None, optimizer=None)
    for other, expected in (
        (copy.deepcopy(model.get_base_model()), {"SL113"}),
        (llama().requires_grad_(requires_grad=False), set()),  # of the same class, with weights of its own
        (llama(num_hidden_layers=4).requires_grad_(requires_grad=False), set()),
    ):
        trainer.reward_model = other.requires_grad_(requires_grad=False)
        assert set(codes(model, STEP, trainer=trainer)) == expected


@pytest.mark.parametrize("bias", ["all", "lora_only"])
def test_biases_of_a_head_that_rests_are_no_finding(bias: str) -> None:
    sizes = {name: SIZES[name] for name in ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")}
    model = BertForSequenceClassification(BertConfig(**sizes, num_hidden_layers=1))
    adapter = LoraConfig(r=2, target_modules=["query"], bias=bias, task_type="SEQ_CLS")  # type: ignore[arg-type]
    inputs = {"input_ids": torch.ones(2, 8, dtype=torch.long), "labels": torch.zeros(2, dtype=torch.long)}
    trained: Any = get_peft_model(model, adapter)
    trained.config.dtype = None
    assert "SL105" not in codes(trained, STEP, inputs=inputs)
    trained.base_model.model.bert.encoder.layer[0].attention.self.query.lora_B.default.requires_grad_(False)
    assert "SL105" in codes(trained, STEP, inputs=inputs)


METHODS: dict[str, dict[str, Any]] = {
    "LoraConfig": {},
    "AdaLoraConfig": {"total_step": 10},
    "LoHaConfig": {},
    "IA3Config": {"feedforward_modules": []},
    "VeraConfig": {},
}


@needs("peft", "0.20")
@pytest.mark.parametrize("method", METHODS)
def test_a_copy_of_tied_weights_is_told_as_its_method_has_it(method: str) -> None:
    config = getattr(peft, method)

    def adapted(cls: Any, **options: Any) -> Any:
        own = METHODS[cls.__name__]
        return get_peft_model(llama(tie_word_embeddings=True), cls(target_modules=["q_proj"], **own, **options))

    fix = codes(adapted(config, modules_to_save=["lm_head"]), STEP)["SL111"].fix
    if hasattr(config(**METHODS[method]), "ensure_weight_tying"):
        assert fix == f"{method}(ensure_weight_tying=True) trains one copy for both."
        roads = [adapted(config, modules_to_save=["lm_head"], ensure_weight_tying=True)]
    else:
        assert fix.startswith(f"leave them out of modules_to_save, for {method} cannot tie copies; or take LoraConfig(")
        roads = [adapted(config), adapted(LoraConfig, modules_to_save=["lm_head"], ensure_weight_tying=True)]
    for road in roads:
        assert "SL111" not in codes(road, STEP)


def hooked() -> Any:
    return dispatch_model(llama(), {"": "cpu"}, force_hooks=True)


def offloaded() -> Any:
    return cpu_offload(llama(), execution_device=torch.device("cpu"))


def split() -> Any:
    return dispatch_model(llama(), {"model": "cpu", "lm_head": "cpu"}, force_hooks=True)


@pytest.mark.parametrize("make", [hooked, offloaded, split])
def test_hooks_of_accelerate_do_not_end_the_step(make: Any) -> None:
    model = make()
    forward = model.forward
    assert "SL126" not in codes(model, STEP)
    assert model.forward is forward
    model.lm_head.weight.requires_grad_(requires_grad=False)
    model.model.embed_tokens.weight.requires_grad_(requires_grad=False)
    model.extra = nn.Linear(4, 4)
    assert codes(model, STEP)["SL121"].where == "extra.bias, extra.weight"


@needs("peft", "0.21")
def test_a_method_that_adapts_no_layer(tmp_path: Path) -> None:
    config = GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=50, n_positions=32, bos_token_id=1, eos_token_id=2)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "base")
    model = GPT2LMHeadModel.from_pretrained(tmp_path / "base")
    empty = get_peft_model(model, peft.OSFConfig(target_modules=["c_attn"]))  # of Conv1D, which peft passes over
    found = codes(empty, STEP)["SL126"]
    assert "the adapter has put no parameter into the model" in found.message
    assert found.fix.startswith("take a method that adapts the layers of this model, such as LoraConfig")
    empty.save_pretrained(str(tmp_path / "empty"))
    with pytest.raises(AdapterError, match=r"holds no tensor at all.*\(safe-loading explain no-tensors\)"):
        load_peft_on_rank(tmp_path / "empty", tmp_path / "base", device="cpu")
    adapted = get_peft_model(GPT2LMHeadModel.from_pretrained(tmp_path / "base"), LoraConfig(target_modules=["c_attn"]))
    assert "SL126" not in codes(adapted, STEP)


@needs("transformers", "5.17")
def test_a_tower_without_pictures_is_told_with_what_it_needs() -> None:
    config = tiny_config("Qwen2VLForConditionalGeneration")
    config.dtype = "float32"
    model: Any = get_peft_model(Qwen2VLForConditionalGeneration(config), LoraConfig(r=2, target_modules="all-linear"))
    found = codes(model, STEP)["SL121"]
    assert "for the step has no pixel_values" in found.message
    assert "visual" in found.where
    tower = [p for name, p in model.named_parameters() if "visual" in name]
    for parameter in tower:
        parameter.requires_grad_(requires_grad=False)
    assert "SL121" not in codes(model, STEP)
    for parameter in tower:
        parameter.requires_grad_(requires_grad=True)
    model.base_model.model.extra = nn.Linear(4, 4)  # which no picture reaches either
    fixes = [finding.fix for finding in audit_model(model, STEP).findings if finding.code == "SL121"]
    assert ["pixel_values" in str(fix) for fix in fixes] == [True, False]


def test_what_peft_casts_of_a_quantized_base(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path)
    quantized: dict[str, Any] = {
        "quantization_config": BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16),
        "dtype": torch.bfloat16,
    }
    base = prepare_model_for_kbit_training(LlamaForCausalLM.from_pretrained(tmp_path, **quantized))
    found = codes(get_peft_model(base, LoraConfig(**LORA)).train(), STEP)
    assert found["SL108"].fix.startswith("leave prepare_model_for_kbit_training out, which has cast them")
    again: Any = LlamaForCausalLM.from_pretrained(tmp_path, **quantized)
    again.requires_grad_(requires_grad=False)
    again.gradient_checkpointing_enable()
    again.enable_input_require_grads()
    assert codes(get_peft_model(again, LoraConfig(**LORA)).train(), STEP) == {}


class Compressing(LlamaForCausalLM):
    """A model with a part that runs over long rows alone, as the compressed attention of DeepSeek V4."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.far = nn.Linear(config.vocab_size, 1)

    def forward(self, input_ids: Any, attention_mask: Any = None, labels: Any = None, **kwargs: Any) -> Any:
        out = super().forward(input_ids, attention_mask, labels=labels, **kwargs)
        if input_ids.shape[1] > 128:
            out.loss = out.loss + self.far(out.logits).square().mean()
        return out


def test_a_part_for_long_rows_needs_a_length_that_was_planned() -> None:
    model = Compressing(LlamaConfig(**SIZES))
    assert "SL121" not in codes(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    assert codes(model, STEP)["SL121"].where == "far.bias, far.weight"
    assert "SL121" not in codes(model, STEP.replace(sequence_length=256))


def test_a_part_that_the_first_output_does_not_need() -> None:
    sizes = {name: SIZES[name] for name in ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")}
    found = codes(BertModel(BertConfig(**sizes, num_hidden_layers=1)), STEP)["SL121"]
    assert found.where == "pooler.dense.bias, pooler.dense.weight"
    assert "by the mean of the first output, for it takes no labels" in found.message
    answers = BertForQuestionAnswering(BertConfig(**sizes, num_hidden_layers=1))  # start_positions, and no labels
    answers.qa_outputs.register_parameter("unused", torch.nn.Parameter(torch.ones(2)))
    assert "mean of the first output" not in codes(answers, STEP)["SL121"].message
    assert "SL121" not in codes(BertModel(BertConfig(**sizes, num_hidden_layers=1), add_pooling_layer=False), STEP)


class Grouped(nn.Linear):
    """A layer that multiplies each group of its input with rows of its own."""

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        groups = states.unflatten(-1, (2, -1))
        return torch.einsum("...gi,goi->...go", groups, self.weight.view(2, -1, groups.shape[-1])).flatten(-2)


def test_a_layer_of_groups_is_left_as_it_is() -> None:
    def adapted(**options: Any) -> Any:
        model = llama()
        model.model.layers[0].self_attn.o_proj = Grouped(SIZES["hidden_size"] // 2, SIZES["hidden_size"], bias=False)
        model.to(torch.bfloat16)
        return get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "o_proj"], **options))

    found = codes(adapted(), STEP)["SL126"]
    assert "Leave it as it is: exclude_modules=['o_proj'] in the adapter's config." in found.fix
    assert "SL126" not in codes(adapted(exclude_modules=["o_proj"]), STEP)


class Positions(nn.Module):
    """A table of positions that is kept for the last size, as those of DETR, Mask2Former and SAM 2 are."""

    @compile_compatible_method_lru_cache(maxsize=1)
    def forward(self, length: int, device: Any) -> torch.Tensor:
        return torch.arange(length, device=device, dtype=torch.float32)[:, None].expand(-1, 32) + 1


class Leveled(Transparent):
    """A model that asks for such a table in two sizes."""

    def __call__(self, input_ids: Any, **inputs: Any) -> Any:
        own: Any = self
        tables = [own.positions(length, input_ids.device) for length in (7, input_ids.shape[1])]
        out = super().__call__(input_ids, **inputs)
        out.loss = out.loss + sum(table.mean() for table in tables)
        if own.keeps:
            own.kept.append(tables[0] + 1)
        return out


@pytest.mark.parametrize("keeps", [False, True], ids=["the cache alone", "a list, too"])
def test_a_cache_of_one_table_that_several_sizes_replace_is_no_leak(keeps: bool) -> None:
    model = student(adapter=False)
    model.positions = Positions()
    found = codes(wrap_transparent(model, Leveled, keeps=keeps, kept=[]).train(), STEP)
    assert ("SL122" in found) == keeps


def test_a_model_of_sound_whose_text_has_a_vocabulary_of_its_own(tmp_path: Path) -> None:
    config = tiny_config("musicgen")
    model: Any = MusicgenForConditionalGeneration(config)
    model.save_pretrained(tmp_path)
    model = MusicgenForConditionalGeneration.from_pretrained(tmp_path)
    for each in (model.config, model.config.decoder):
        each.decoder_start_token_id = each.pad_token_id = config.decoder.vocab_size
    model = get_peft_model(model, LoraConfig(**LORA)).train()
    labels = torch.ones(2, 9, config.decoder.num_codebooks, dtype=torch.long)
    inputs = {"input_ids": torch.ones(2, 6, dtype=torch.long), "labels": labels}
    model(**inputs).loss.backward()  # as the audit finds it
    found = {finding.code for finding in audit_model(model, STEP, inputs=inputs, forecast=False).findings}
    assert {"SL126", "SL128"}.isdisjoint(found)


def test_a_step_that_trains_nothing_is_told_so_of_a_model_without_a_loss() -> None:
    sizes = {name: SIZES[name] for name in ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")}
    model = BertModel(BertConfig(**sizes, num_hidden_layers=1)).requires_grad_(False)
    with pytest.raises(TraceError, match="Nothing is trained: no parameter that the loss depends on has requires_grad"):
        predict_memory(model, STEP)


class Pooled(nn.Sequential):
    """An encoder and a layer, with the switches and the saving of sentence-transformers' models."""

    @property
    def config(self) -> Any:
        return self[0].config

    @property
    def _no_split_modules(self) -> Any:
        return self[0]._no_split_modules

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: Any = None) -> None:
        self[0].gradient_checkpointing_enable(gradient_checkpointing_kwargs)

    def save_pretrained(self, folder: Any) -> None:
        for index, module in enumerate(self):
            module.save_pretrained(f"{folder}/{index}")


def test_a_library_around_an_adapter_of_transformers_own_is_no_mistake() -> None:
    """transformers itself lets the embeddings require gradients, once such a model has an adapter."""
    sizes = {name: SIZES[name] for name in ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")}
    model: Any = BertModel(BertConfig(**sizes, num_hidden_layers=2), add_pooling_layer=False)
    model.add_adapter(LoraConfig(r=2, target_modules=["query"]))
    wrapper = Pooled(model).train()
    assert "SL101" not in codes(wrapper)
    wrapper.gradient_checkpointing_enable({"use_reentrant": True})
    model(input_ids=torch.ones(1, 4, dtype=torch.long))[0].mean().backward()
    assert all(parameter.grad is not None for parameter in model.parameters() if parameter.requires_grad)
    by_peft: Any = BertModel(BertConfig(**sizes, num_hidden_layers=2), add_pooling_layer=False)
    get_peft_model(by_peft, LoraConfig(r=2, target_modules=["query"]))
    assert "enable_input_require_grads" in codes(Pooled(by_peft).train())["SL101"].message
