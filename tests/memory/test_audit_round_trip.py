"""What is trained, saved, loaded again and compared: what comes back, what does not, and the fix of each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import skip_unless_transformers_takes_peft
from models import SIZES, save_adapter, save_llama
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import nn
from transformers import (
    BitsAndBytesConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PretrainedConfig,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
    ViTConfig,
    ViTForImageClassification,
)
from wrapped_models import Count, Plain, llama, lora, peft_llama

from safe_loading import attach_head, audit_model, wrap_transparent
from safe_loading.__main__ import main
from safe_loading._core.report import Finding
from safe_loading._memory.audit import round_trip


class Settings(PretrainedConfig):
    """The config of `Own`."""

    model_type = "own-of-the-round-trip"


class Own(PreTrainedModel):
    """A model that people write themselves."""

    config_class = Settings

    def __init__(self, config: Settings) -> None:
        super().__init__(config)
        self.layer = nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.ones(4))
        self.register_buffer("steps", torch.arange(4), persistent=False)
        self.post_init()

    def _init_weights(self, module: Any) -> None:
        pass


class WithoutScale(Own):
    """It leaves a name out of its state dict."""

    def state_dict(self, *args: Any, **options: Any) -> Any:
        return {name: value for name, value in super().state_dict(*args, **options).items() if name != "scale"}


class Overwriting(Own):
    """It writes first values over those that were loaded."""

    def _init_weights(self, module: Any) -> None:
        if module is self:
            self.scale.data.normal_()


class OnlyTrained(Plain):
    """It writes small checkpoints: what is trained alone."""

    def state_dict(self, *args: Any, **options: Any) -> Any:
        trained = {name for name, p in self.named_parameters() if p.requires_grad}
        return {name: value for name, value in super().state_dict(*args, **options).items() if name in trained}


def trainer_of(model: Any, folder: Path) -> Trainer:
    options: dict[str, Any] = {"report_to": [], "use_cpu": True, "disable_tqdm": True}
    return Trainer(model=model, args=TrainingArguments(output_dir=str(folder), **options))


def lost(model: Any, trainer: Any = None) -> Finding | None:
    """Return the finding of the round trip, for a model that it leaves as it was."""
    before, generator = state_of(model), torch.get_rng_state()
    report = audit_model(model, trainer=trainer, round_trip=True, forecast=False)
    assert "round_trip" in report.checked
    assert not [reason for reason in report.skipped if reason.startswith("round trip")]
    assert torch.equal(torch.get_rng_state(), generator)
    assert same(before, state_of(model))
    return next((finding for finding in report.findings if finding.code == "SL132"), None)


def state_of(model: Any) -> dict[str, tuple[object, ...]]:
    """Return what a model consists of: where its tensors lie and what they hold, its modules and its configs."""
    tensors = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    state: dict[str, tuple[object, ...]] = {
        name: (id(value), value.data_ptr(), value.requires_grad, value.detach().clone())
        for name, value in tensors.items()
    }
    for name, module in model.named_modules():
        config, adapters = getattr(module, "config", None), getattr(module, "peft_config", None)
        facts = repr(sorted(vars(config).items(), key=str)) if isinstance(config, PretrainedConfig) else ""
        # a copy of a set may have another order, by the seed of the process's hashes
        sets = [id(value) for each in (adapters or {}).values() for value in vars(each).values() if type(value) is set]
        state[f"module {name}"] = (id(module), module.training, facts, repr(adapters), sets)
    return state


def same(one: dict[str, tuple[object, ...]], other: dict[str, tuple[object, ...]]) -> bool:
    return one.keys() == other.keys() and all(map(_same_item, one.values(), other.values()))


def _same_item(one: tuple[object, ...], other: tuple[object, ...]) -> bool:
    if isinstance(one[-1], torch.Tensor) and isinstance(other[-1], torch.Tensor):
        return one[:-1] == other[:-1] and torch.equal(one[-1], other[-1])
    return one == other


def two_adapters() -> Any:
    model = get_peft_model(llama(), lora(), adapter_name="policy")
    model.add_adapter("reference", lora())
    return model


def both_active() -> Any:
    model = two_adapters()
    model.base_model.set_adapter(["policy", "reference"])
    return model


def classifier() -> Any:
    model = LlamaForSequenceClassification(LlamaConfig(**{**SIZES, "num_labels": 2}))
    return get_peft_model(model, LoraConfig(task_type="SEQ_CLS", target_modules=["q_proj"]))


HEALTHY: dict[str, Callable[[], Any]] = {
    "a model": llama,
    "tied": lambda: llama(tie_word_embeddings=True),
    "in bfloat16": lambda: llama(torch.bfloat16),
    "of one's own": lambda: Own(Settings()),
    "an adapter": peft_llama,
    "an adapter of another name": lambda: get_peft_model(llama(), lora(), adapter_name="q"),
    "two adapters": two_adapters,
    "two active adapters": both_active,
    "tokens": lambda: peft_llama(trainable_token_indices=[1, 2, 3]),
    "embeddings and head": lambda: peft_llama(modules_to_save=["embed_tokens", "lm_head"]),
    "a classifier": classifier,
    "an attached head": lambda: attach_head(peft_llama(), "value_head", nn.Linear(SIZES["hidden_size"], 1)),
    "wrapped": lambda: wrap_transparent(peft_llama(), Count),
    "wrapped without an adapter": lambda: wrap_transparent(llama(), Count),
    "compiled": lambda: torch.compile(peft_llama()),
}


@pytest.mark.each_value
@pytest.mark.parametrize("name", HEALTHY)
@pytest.mark.parametrize("with_trainer", [False, True])
def test_all_that_is_trained_comes_back(name: str, with_trainer: bool, tmp_path: Path) -> None:
    model = HEALTHY[name]()
    trainer = trainer_of(getattr(model, "_orig_mod", model), tmp_path) if with_trainer else None
    assert lost(model, trainer) is None


def with_head(wrapper: type[Plain]) -> Any:
    model = wrapper(peft_llama())
    model.head = nn.Linear(SIZES["hidden_size"], 1)
    return model


def test_the_trainer_saves_and_loads_a_wrapper_whole(tmp_path: Path) -> None:
    model = with_head(Plain)
    assert lost(model, trainer_of(model, tmp_path)) is None


def test_an_adapter_over_a_quantized_base(tiny_llama: Path) -> None:
    quantized = BitsAndBytesConfig(load_in_4bit=True)
    base = LlamaForCausalLM.from_pretrained(tiny_llama, quantization_config=quantized, device_map={"": "cpu"})
    assert lost(peft_llama(base)) is None


def loose(model: Any = None) -> Any:
    model = model or peft_llama()
    model.get_base_model().model.norm.weight.requires_grad_(True)
    return model


def integrated(**options: Any) -> Any:
    skip_unless_transformers_takes_peft()
    model = llama()
    model.add_adapter(lora(**options))
    return model


def with_trained_head() -> Any:
    model = integrated()
    model.lm_head.requires_grad_(True)
    return model


def ignoring() -> Any:
    model = llama()
    model._keys_to_ignore_on_save = {"model.norm.weight"}
    return model


def half_float32() -> Any:
    model = llama(torch.bfloat16)
    model.lm_head.float()
    return model


def aliased() -> Any:
    model = Own(Settings())
    model.again = model.layer
    return model


def unaliased(model: Any) -> Any:
    del model.again
    return model


def unignored(model: Any) -> Any:
    model._keys_to_ignore_on_save = None
    return model


# name: (the mistake, whether a Trainer saves it, the words of the finding, those of its fix, the fix carried out)
MISTAKES: dict[str, tuple[Callable[[], Any], bool, str, str, Callable[[Any], Any]]] = {
    "a loose norm": (
        loose,
        True,
        "1 of 19 trained tensors do not come back by Trainer.save_model and a resumed training: "
        "base_model.model.model.norm.weight (left as before the load).",
        "name their modules in modules_to_save",
        lambda _: peft_llama(modules_to_save=["norm"]),
    ),
    "a head beside an integrated adapter": (
        with_trained_head,
        False,
        "lm_head.weight (left as before the load)",
        "name their modules in modules_to_save",
        lambda _: integrated(modules_to_save=["lm_head"]),
    ),
    "an integrated adapter under a Trainer": (
        integrated,
        True,
        "18 trained tensors cannot be saved and loaded again by Trainer.save_model and a resumed training: ValueError",
        "use get_peft_model(model, config)",
        lambda _: get_peft_model(llama(), lora()),
    ),
    "a name that is not saved": (
        ignoring,
        False,
        "LlamaForCausalLM.save_pretrained and from_pretrained: model.norm.weight (not in the checkpoint).",
        "have save_pretrained write them: _keys_to_ignore_on_save",
        unignored,
    ),
    "a state dict without a name": (
        lambda: WithoutScale(Settings()),
        True,
        "Trainer.save_model and a resumed training: scale (left as before the load).",
        "an overridden state_dict()",
        lambda _: Own(Settings()),
    ),
    "first values over those loaded": (
        lambda: Overwriting(Settings()),
        False,
        "scale (other values).",
        "transformers.initialization",
        lambda _: Own(Settings()),
    ),
    "a head in another dtype": (
        half_float32,
        False,
        "lm_head.weight (rounded to bfloat16).",
        "model.to(dtype)",
        lambda model: model.to(torch.bfloat16),
    ),
    "a wrapper that saves what is trained, and what a Trainer reads of a model it lacks": (
        lambda: with_head(OnlyTrained),
        True,
        "AttributeError: 'OnlyTrained' object has no attribute '_keys_to_ignore_on_save'",
        "end what it names before training: the checkpoint is written, and fails when it is loaded.",
        unignored,
    ),
    "one layer under two names": (
        aliased,
        False,
        "contained shared tensors",
        "end what it names before training: the first checkpoint fails in the same way.",
        unaliased,
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_what_does_not_come_back_is_named_and_mended(name: str, tmp_path: Path) -> None:
    make, with_trainer, words, fix, mended = MISTAKES[name]
    model = make()
    found = lost(model, trainer_of(model, tmp_path) if with_trainer else None)
    assert found is not None
    assert words in found.message
    assert fix in found.fix
    assert found.severity == ("warning" if "rounded" in words else "error")
    assert found.bytes > 0
    right = mended(model)
    assert lost(right, trainer_of(right, tmp_path) if with_trainer else None) is None


def test_what_a_trainer_loses_is_lost_in_training(tmp_path: Path) -> None:
    """The first of the mistakes, trained and resumed: its norm is the new one's."""
    model = loose()
    trainer = trainer_of(model, tmp_path / "run")
    with torch.no_grad():
        model.get_base_model().model.norm.weight.fill_(3.0)
    trainer.save_model(str(tmp_path / "saved"))
    again = loose(PeftModel.from_pretrained(llama(), str(tmp_path / "saved"), is_trainable=True))
    assert not torch.equal(again.get_base_model().model.norm.weight, model.get_base_model().model.norm.weight)


def test_a_checkpoint_with_published_names_is_resumed_from_its_own_model(tmp_path: Path) -> None:
    sizes = {name: SIZES[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers")}
    config = ViTConfig(**sizes, num_attention_heads=4, image_size=8, patch_size=4)
    model, checkpoint = ViTForImageClassification(config), tmp_path / "checkpoint"
    trainer = trainer_of(model, tmp_path / "run")
    trainer.save_model(str(checkpoint))
    if load_file(checkpoint / "model.safetensors").keys() == model.state_dict().keys():
        pytest.skip("this transformers saves a ViT under the names of its modules")
    found = lost(model, trainer)
    assert found is not None
    assert found.fix.startswith(
        "resume with the model of the checkpoint: from_pretrained(checkpoint) for a new Trainer"
    )
    for again, equal in (
        (ViTForImageClassification(config), False),
        (ViTForImageClassification.from_pretrained(checkpoint), True),
    ):
        resumed = trainer_of(again, tmp_path / "again")
        resumed._load_from_checkpoint(str(checkpoint))
        assert all(torch.equal(value, again.state_dict()[name]) for name, value in model.state_dict().items()) == equal
    assert lost(model) is None


def test_where_there_is_no_round_trip_the_report_says_why() -> None:
    frozen = llama().requires_grad_(requires_grad=False)
    for model, why in (
        (llama().to("meta"), "on meta"),
        (nn.Linear(3, 3), "pass the trainer that saves it"),
        (frozen, "nothing is trained"),
    ):
        report = audit_model(model, round_trip=True)
        assert why in report.skipped[-1]
        assert "SL132" not in {finding.code for finding in report.findings}


def test_the_command_goes_the_way_of_an_adapter_without_the_weights_of_its_base(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = save_llama(tmp_path / "base", torch.bfloat16)
    adapter = save_adapter(tmp_path / "adapter", saved, modules_to_save=["lm_head"], trainable_token_indices=[1, 5])
    for file in saved.glob("*.safetensors*"):
        file.unlink()
    assert main(["audit", str(adapter), "--round-trip"]) == 0
    assert "nothing found" in capsys.readouterr().out
    assert main(["audit", str(saved), "--round-trip"]) == 1
    assert "Not checked: round trip: the model is on meta" in capsys.readouterr().out
    monkeypatch.setattr(round_trip, "_load_adapters", lambda *_: None)
    assert main(["audit", str(adapter), "--round-trip"]) == 1
    assert "20 of 20 trained tensors do not come back" in capsys.readouterr().out
