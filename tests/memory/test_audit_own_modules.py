"""Modules that people write around a model: nothing is found on those that train well, and each mistake once."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import skip_unless_transformers_takes_peft
from models import SIZES
from peft import (
    AdaLoraConfig,
    LoraConfig,
    PeftModel,
    XLoraConfig,
    get_peft_model,
    get_peft_model_state_dict,
    set_peft_model_state_dict,
)
from peft.optimizers import create_lorafa_optimizer
from safetensors.torch import load_file, save_file
from test_audit_model import Wrapper, adapted, base, codes
from torch import nn
from transformers import (
    BertConfig,
    BertModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
)

from safe_loading import Transparent, Workload, attach_head, audit_model, wrap_transparent

STEP = Workload.train(2, 16)
LORA = {"r": 2, "target_modules": ["q_proj", "v_proj"]}


def named(*names: str) -> Any:
    """Return a PeftModel with adapters of these names, the first of which is active."""
    model = get_peft_model(base(), LoraConfig(**LORA), adapter_name=names[0])
    for name in names[1:]:
        model.add_adapter(name, LoraConfig(**LORA))
    return model.train()


def test_what_an_x_lora_leaves_out_of_its_files_is_told_and_its_resting_loras_are_not(tmp_path: Path) -> None:
    """peft numbers the LoRAs, and takes the layers of the classifier that have these numbers for theirs."""
    for number in "01":
        adapted(init_lora_weights=False).save_pretrained(tmp_path / number)
    adapters = {number: str(tmp_path / number) for number in "01"}

    def weighing() -> Any:
        config = XLoraConfig(task_type="CAUSAL_LM", hidden_size=SIZES["hidden_size"], xlora_depth=2, adapters=adapters)
        torch.manual_seed(0)
        return get_peft_model(base(use_cache=False), config)

    model = weighing()
    found = codes(model)
    assert {"SL103", "SL105"}.isdisjoint(found)
    first = "base_model.internal_xlora_classifier.layers.0"
    assert found["SL104"].where == f"{first}.bias, {first}.weight"
    assert found["SL104"].fix.startswith("write them into a file of your own")
    model.save_pretrained(tmp_path / "saved")
    written = {name: p for name, p in model.named_parameters() if name in found["SL104"].where}
    assert not load_file(tmp_path / "saved" / "adapter_model.safetensors").keys() & written.keys()
    # the advice
    save_file({name: p.detach() for name, p in written.items()}, tmp_path / "rest.safetensors")
    again = weighing()
    for parameter in again.internal_xlora_classifier.parameters():
        torch.nn.init.zeros_(parameter)
    set_peft_model_state_dict(again, load_file(tmp_path / "saved" / "adapter_model.safetensors"))
    again.load_state_dict(load_file(tmp_path / "rest.safetensors"), strict=False)
    theirs = again.internal_xlora_classifier.state_dict()
    assert all(torch.equal(theirs[name], p) for name, p in model.internal_xlora_classifier.state_dict().items())


@pytest.mark.parametrize("names", [("q",), ("policy", "reference")])
def test_adapters_of_any_name_are_looked_at(names: tuple[str, ...]) -> None:
    model = named(*names)
    assert audit_model(model, STEP, forecast=False).findings == ()
    model.base_model.set_adapter(list(names))
    assert {"SL104", "SL105"}.isdisjoint(codes(model))  # each adapter saves its own
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    found = codes(model, optimizer=sgd(model))["SL105"]
    assert "parameters are saved with the adapter, but not trained" in found.message


def test_first_factors_that_lora_fa_fixes_are_no_mistake() -> None:
    model = adapted()
    optimizer = create_lorafa_optimizer(model, r=4, lora_alpha=8, lr=1e-3)
    assert codes(model, STEP, optimizer=optimizer) == {}
    first = [p for name, p in model.named_parameters() if ".lora_A." in name]
    first[0].requires_grad_(True)
    assert f"{len(first) - 1} parameters are saved with the adapter, but not trained" in codes(model)["SL105"].message
    assert "SL105" in codes(frozen_factors(AdaLoraConfig(target_modules=["q_proj"], total_step=9)))


def frozen_factors(config: Any) -> Any:
    """Return a model whose first factors are frozen by hand."""
    model = get_peft_model(base(), config).train()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name and ".lora_A." not in name)
    return model


def test_adapters_that_peft_cannot_save_beside_one_another_are_named() -> None:
    """peft asks each adapter for the tokens of the other, and finds none."""
    model = named("default")
    model.add_adapter("tokens", LoraConfig(**LORA, trainable_token_indices=[1, 2]))
    with pytest.raises(KeyError, match=r"trainable_tokens_delta\.default"):
        get_peft_model_state_dict(model)
    found = codes(model)["SL104"]
    assert (found.severity, found.where) == ("error", "default")
    assert "KeyError" in found.message
    assert "a base of its own" in found.fix
    assert "SL104" not in codes(get_peft_model(base(), LoraConfig(**LORA, trainable_token_indices=[1, 2])))
    assert "SL104" not in codes(named("default"))


def test_ranks_that_adalora_trains_and_does_not_save_are_frozen_as_advised() -> None:
    """peft moves the count of ranks to the dtype or device of its layer, after which it requires gradients."""
    model = get_peft_model(base().to(torch.bfloat16), AdaLoraConfig(target_modules=["q_proj"], total_step=9))
    found = codes(model)["SL104"]
    assert "ranknum" in found.where
    assert found.fix.startswith("freeze them with requires_grad_(False)")
    for name, parameter in model.named_parameters():
        if ".ranknum." in name:
            parameter.requires_grad_(False)
    assert {"SL103", "SL104"}.isdisjoint(codes(model))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


class Siamese(Wrapper):
    """An encoder that runs twice in one forward pass."""

    def forward(self, input_ids: Any, attention_mask: Any = None, labels: Any = None) -> Any:
        first = super().forward(input_ids, attention_mask, labels)
        other = super().forward(input_ids.flip(1), attention_mask, labels)
        first.loss = first.loss + other.loss
        return first


@pytest.mark.parametrize("reentrant", [True, False])
def test_an_encoder_that_runs_twice_is_not_taken_for_a_recomputed_one(reentrant: bool) -> None:
    workload = STEP.replace(gradient_checkpointing=True)
    assert "only 0 of" in codes(Siamese(adapted()), workload)["SL120"].message
    switched_on = adapted()
    switched_on.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    switched_on.enable_input_require_grads()
    assert "SL120" not in codes(Siamese(switched_on), workload)


class BackboneFirst(Wrapper):
    """The base under a name of its own beside the adapted model."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.backbone = base()
        self.model = get_peft_model(self.backbone, LoraConfig(**LORA))


def test_the_base_beside_its_adapter_is_not_the_inner_model() -> None:
    model = BackboneFirst().train()
    found = codes(model, STEP)
    assert f"with the {PeftModel.__name__} inside it ('model')" in found["SL101"].message
    assert "start from the PeftModel" in found["SL101"].fix
    assert "attach_head" not in found["SL101"].fix
    assert {"SL104", "SL113", "SL114"}.isdisjoint(found)


class WithParts(Wrapper):
    """A wrapper with a head that is trained and a teacher whose outputs are a target."""

    def __init__(self, teacher: Any = None) -> None:
        super().__init__(adapted())
        self.connector = nn.ModuleList([nn.Linear(SIZES["vocab_size"], 1)])
        self.teacher = teacher

    def forward(self, input_ids: Any, attention_mask: Any = None, labels: Any = None) -> Any:
        out = super().forward(input_ids, attention_mask, labels)
        out.loss = out.loss + self.connector[0](out.logits).mean()
        if self.teacher is not None:
            out.loss = out.loss + (out.logits - self.teacher(input_ids).logits.detach()).square().mean()
        return out


def test_a_teacher_is_what_builds_a_graph_that_no_gradient_goes_through() -> None:
    assert "SL114" not in codes(WithParts())
    assert "SL114" not in codes(WithParts(), STEP)
    model = WithParts(base())
    found = [f for f in audit_model(model, STEP, forecast=False).findings if f.code == "SL114"]
    assert [f.where for f in found] == ["model.teacher"]
    assert found[0].bytes == sum(p.nbytes for p in model.teacher.parameters())
    model.teacher.requires_grad_(False).eval()
    assert "SL114" not in codes(model, STEP)


class WithValues(Wrapper):
    """A policy with a value head as PPO's was: the values are returned, and the loss of them is the trainer's."""

    def __init__(self) -> None:
        super().__init__(adapted())
        self.v_head = nn.Sequential(nn.Dropout(0.1), nn.Linear(SIZES["vocab_size"], 1))

    def forward(self, input_ids: Any, attention_mask: Any = None, labels: Any = None) -> Any:
        out = super().forward(input_ids, attention_mask, labels)
        return out.logits, out.loss, self.v_head(out.logits).squeeze(-1)


def test_a_head_that_the_loss_of_the_model_does_not_reach_is_no_teacher() -> None:
    found = codes(WithValues().train(), STEP)
    assert "SL114" not in found
    assert found["SL121"].where == "v_head.1.bias, v_head.1.weight"
    assert found["SL104"].where == "v_head.1.bias, v_head.1.weight"


class HandsOn(Wrapper):
    """A wrapper that hands on the switches of a step, and nothing else."""

    def gradient_checkpointing_enable(self, *args: Any, **options: Any) -> None:
        self.model.gradient_checkpointing_enable(*args, **options)

    def enable_input_require_grads(self) -> None:
        self.model.enable_input_require_grads()


def test_a_wrapper_that_hands_the_switches_on_is_a_warning_without_bytes() -> None:
    model = HandsOn(adapted())
    model.gradient_checkpointing_enable()
    model.enable_input_require_grads()
    found = codes(model, STEP.replace(gradient_checkpointing=True))
    assert "SL120" not in found
    assert (found["SL101"].severity, found["SL101"].bytes) == ("warning", 0)
    assert "save_pretrained from Trainer._save" in found["SL101"].message
    assert codes(Wrapper(adapted()), STEP)["SL101"].severity == "error"


class Weighted(Wrapper):
    """A wrapper that weighs the tokens, by a tensor that it makes on `device`; None is where torch puts it."""

    device: Any = None

    def forward(self, input_ids: Any, attention_mask: Any = None, labels: Any = None) -> Any:
        out = super().forward(input_ids, attention_mask, labels)
        weights = torch.arange(input_ids.shape[1], device=self.device and input_ids.device)
        out.loss = out.loss + (out.logits.mean(-1) * weights).mean()
        return out


def test_a_tensor_made_on_the_host() -> None:
    model = Weighted(adapted())
    found = codes(model, STEP)["SL126"]
    assert "(out.logits.mean(-1) * weights)" in found.message
    assert "device=input_ids.device" in found.fix
    assert "device=input_ids.device" not in found.message
    model.device = "the inputs'"
    assert "SL126" not in codes(model, STEP)


class Tied(LlamaForCausalLM):
    """A model with a second head on the embeddings, which its class does not say."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.second = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.second.weight = self.model.embed_tokens.weight


def test_a_tie_that_no_checkpoint_knows(tmp_path: Path) -> None:
    model: Any = Tied(LlamaConfig(**SIZES)).train()
    found = codes(model, STEP)["SL133"]
    assert found.where == "model.embed_tokens.weight"
    with pytest.raises(RuntimeError, match="shared tensors"):
        model.save_pretrained(tmp_path)
    assert "_tied_weights_keys = {'head.weight': 'embed.weight'}" in found.fix
    model._tied_weights_keys = {"second.weight": "model.embed_tokens.weight"}
    model.all_tied_weights_keys = model.get_expanded_tied_weights_keys()
    assert "SL133" not in codes(model, STEP)
    model.save_pretrained(tmp_path)


def test_a_tied_model_in_a_wrapper_is_saved_once_the_wrapper_is_gone(tmp_path: Path) -> None:
    model: Any = Wrapper(base(tie_word_embeddings=True))
    trainer = trainer_of(model, tmp_path)
    found = codes(model, STEP, trainer=trainer)["SL133"]
    assert (found.severity, found.where) == ("error", "model.lm_head.weight")
    with pytest.raises(RuntimeError, match="share memory"):
        trainer.save_model()
    right = wrap_transparent(model.model, Through)
    trainer = trainer_of(right, tmp_path)
    assert "SL133" not in codes(right, STEP, trainer=trainer)
    trainer.save_model()


def trainer_of(model: Any, folder: Path) -> Trainer:
    options: dict[str, Any] = {"report_to": [], "use_cpu": True, "disable_tqdm": True}
    return Trainer(model=model, args=TrainingArguments(output_dir=str(folder), **options))


class Through(Transparent):
    """Code in its right place."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        return super().__call__(*args, **options)


class WithValueHead(Wrapper):
    """A base with a head of its own, which is handed to peft."""

    def __init__(self) -> None:
        super().__init__(base())
        self.value = nn.Linear(SIZES["vocab_size"], 1)

    def forward(self, input_ids: Any, attention_mask: Any = None, labels: Any = None, **_: Any) -> Any:
        out = super().forward(input_ids, attention_mask, labels)
        out.loss = out.loss + self.value(out.logits).square().mean()
        return out


def test_a_head_that_peft_froze_in_its_wrapper() -> None:
    model: Any = get_peft_model(WithValueHead(), LoraConfig(**LORA))  # type: ignore[arg-type]  # a plain module
    found = codes(model, STEP)["SL135"]
    assert found.where == "base_model.model.value"
    exec(found.fix.partition(", or call ")[2].rstrip("."), {"model": model})
    assert model.base_model.model.value.weight.requires_grad
    assert "SL135" not in codes(model, STEP)
    trained: Any = get_peft_model(WithValueHead(), LoraConfig(**LORA))  # type: ignore[arg-type]  # as above
    with torch.no_grad():
        trained.base_model.model.value.weight.mul_(3.0)  # as of a training that was over
    assert "SL135" not in codes(trained, STEP)


class HeldInEval(Wrapper):
    """An adapted encoder that stays in eval mode."""

    def train(self, mode: bool = True) -> Any:
        super().train(mode)
        self.model.eval()
        return self


def test_an_encoder_that_is_held_in_eval_mode_is_told_with_its_cause(tmp_path: Path) -> None:
    model = HeldInEval(adapted())
    assert "SL134" not in codes(model, STEP)  # without dropout and checkpoints its mode does not matter
    model.model.gradient_checkpointing_enable()
    for trainer in (None, trainer_of(model, tmp_path)):
        found = codes(model.train(), STEP.replace(gradient_checkpointing=True), trainer=trainer)
        assert found["SL134"].where == "model"
        assert "HeldInEval.train() keeps it in eval mode" in found["SL134"].message
        assert "The likely cause: HeldInEval.train() keeps it in eval mode" in found["SL120"].message
    model.model.requires_grad_(requires_grad=False)
    assert "SL134" not in codes(model, optimizer=sgd(model))


def test_a_trainer_that_sees_several_gpus_puts_data_parallel_around_a_model() -> None:
    arguments = types.SimpleNamespace(n_gpu=4, parallel_mode=types.SimpleNamespace(name="NOT_DISTRIBUTED"))
    trainer = types.SimpleNamespace(args=arguments)
    model = adapted()
    found = codes(model, trainer=trainer)["SL136"]
    assert (found.severity, found.bytes) == ("warning", 3 * sum(p.nbytes for p in model.parameters()))
    arguments.n_gpu = 1  # as with CUDA_VISIBLE_DEVICES=0
    assert "SL136" not in codes(model, trainer=trainer)


def test_an_adapter_of_transformers_own_is_looked_at() -> None:
    skip_unless_transformers_takes_peft()
    model = base()
    model.add_adapter(LoraConfig(**LORA))
    assert codes(model) == {}
    model.lm_head.requires_grad_(True)
    assert codes(model)["SL104"].where == "lm_head.weight"
    right = base()
    right.add_adapter(LoraConfig(**LORA, modules_to_save=["lm_head"]))
    assert codes(right) == {}


class Contrastive(Wrapper):
    """A wrapper with a projection and a temperature, whose names peft matches with the model's own."""

    def __init__(self) -> None:
        super().__init__(adapted())
        self.proj = nn.Linear(SIZES["vocab_size"], 8)
        self.scale = nn.Parameter(torch.ones(()))


def test_the_fix_of_a_wrapper_takes_heads_of_any_name_and_bare_parameters() -> None:
    wrapper = Contrastive()
    found = codes(wrapper, STEP)["SL101"]
    lines = [line.strip() for line in found.fix.splitlines() if line.startswith("    ")]
    scope: dict[str, Any] = {"wrapper": wrapper, "attach_head": attach_head, "wrap_transparent": wrap_transparent}
    exec("\n".join(lines), {**scope, "Mixin": Through}, scope)
    assert scope["model"].proj_head.modules_to_save["default"] is wrapper.proj
    assert scope["model"].scale.value is wrapper.scale
    assert {"SL101", "SL102", "SL104"}.isdisjoint(codes(scope["model"]))


class Towers(nn.Module):
    """Two models of different classes, whose outputs are compared."""

    def __init__(self, text: Any, other: Any) -> None:
        super().__init__()
        self.text, self.other = text, other

    def forward(self, input_ids: Any, attention_mask: Any = None, labels: Any = None) -> Any:
        out = self.text(input_ids=input_ids, attention_mask=attention_mask, labels=labels)
        out.loss = out.loss + self.other(input_ids=input_ids).last_hidden_state.square().mean()
        return out


class OneModel(PreTrainedModel):
    """The same, as the fix says."""

    supports_gradient_checkpointing = _supports_sdpa = True
    forward: Any = Towers.forward

    def __init__(self, text: Any, other: Any) -> None:
        super().__init__(text.config)
        self.text, self.other = text, other


def test_two_models_of_different_classes_become_one() -> None:
    sizes = {name: SIZES[name] for name in ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")}
    text, other = base(), BertModel(BertConfig(**sizes, num_hidden_layers=2))
    found = codes(Towers(text, other), STEP)["SL101"]
    assert "derive Towers from PreTrainedModel" in found.fix
    config = LoraConfig(r=2, target_modules=["q_proj", "query"])
    model: Any = get_peft_model(OneModel(text, other), config)
    assert {"SL101", "SL102", "SL103", "SL104", "SL120", "SL121"}.isdisjoint(codes(model.train(), STEP))
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    assert "SL120" not in codes(model, STEP.replace(gradient_checkpointing=True))


class Saving(HandsOn):
    """A wrapper with code of its own that saves the model."""

    def save(self, folder: str) -> None:
        self.model.save_pretrained(folder)


class Saver(Trainer):
    """A trainer that takes the model out of its wrapper."""

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        saved: Any = self.model
        saved.model.save_pretrained(output_dir)


def test_a_wrapper_whose_file_is_no_engines_is_not_told_of(tmp_path: Path) -> None:
    assert "SL101" not in codes(Saving(base()), STEP)
    assert codes(Saving(base()), STEP, trainer=trainer_of(Saving(base()), tmp_path))["SL101"].severity == "warning"
    for wrapper in (HandsOn(base()), HandsOn(adapted())):
        options: dict[str, Any] = {"report_to": [], "use_cpu": True}
        trainer = Saver(model=wrapper, args=TrainingArguments(output_dir=str(tmp_path), **options))
        assert "SL101" not in codes(wrapper, STEP, trainer=trainer)
        trainer.is_fsdp_enabled = True  # which looks for the layers
        assert "_no_split_modules" in codes(wrapper, STEP, trainer=trainer)["SL101"].message
    assert codes(Wrapper(base()), STEP, trainer=trainer)["SL101"].severity == "error"  # which has no switch


class OneSwitch(Wrapper):
    """A wrapper that hands one of two switches on."""

    def gradient_checkpointing_enable(self, *args: Any, **options: Any) -> None:
        self.model.gradient_checkpointing_enable(*args, **options)


def test_the_switch_for_inputs_matters_over_frozen_embeddings_alone() -> None:
    trained, frozen = codes(OneSwitch(base()), STEP)["SL101"], codes(OneSwitch(adapted()), STEP)["SL101"]
    assert (trained.severity, frozen.severity) == ("warning", "error")
    assert "enable_input_require_grads" not in trained.message
    assert "enable_input_require_grads" in frozen.message


class Scored(OneSwitch):
    """A wrapper with a head beside the model."""

    def __init__(self) -> None:
        super().__init__(base())
        self.score_head = nn.Linear(SIZES["vocab_size"], 1)

    def forward(self, input_ids: Any, attention_mask: Any = None, labels: Any = None) -> Any:
        out = super().forward(input_ids, attention_mask, labels)
        out.loss = out.loss + self.score_head(out.logits).square().mean()
        return out


class WithHead(Saver):
    """A trainer that writes the head into a file of its own."""

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        super()._save(output_dir, state_dict)
        saved: Any = self.model
        save_file({"weight": saved.score_head.weight}, f"{output_dir}/head.safetensors")


class WithEachPart(Saver):
    """A trainer that writes each part of the model into a folder of its own, as sentence-transformers does."""

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        saved: Any = self.model
        for name, part in saved.named_children():
            write_part(part, Path(str(output_dir)) / name)


def write_part(part: nn.Module, folder: Path) -> None:
    save_file(part.state_dict(), folder / "model.safetensors")


def test_a_head_that_the_users_own_code_leaves_out_is_lost(tmp_path: Path) -> None:
    model = Scored()

    def told(kind: type[Trainer]) -> dict[str, Any]:
        arguments = TrainingArguments(output_dir=str(tmp_path), report_to=[], use_cpu=True)
        return codes(model, STEP, trainer=kind(model=model, args=arguments))

    lost = told(Saver)["SL104"]
    assert (lost.severity, lost.where) == ("error", "score_head.bias, score_head.weight")
    assert "your own code that saves does not name them" in lost.message
    assert told(WithHead) == told(WithEachPart) == {}
    assert told(Trainer)["SL104"].severity == "warning"  # which writes them, under the wrapper's names
