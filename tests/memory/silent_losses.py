"""Scripts of the trackers in which what is trained does not come back, or costs memory: see `silent_scripts`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from engines import skip_unless_transformers_takes_peft
from peft import (
    LoraConfig,
    PeftModel,
    get_peft_model,
    prepare_model_for_kbit_training,
)
from silent_scripts import HIDDEN, LORA, Script, adapted, base, halved, mended, saved, trained, trouble
from torch import nn
from transformers import (
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    Qwen2Config,
    Qwen2ForCausalLM,
    initialization,
)

from safe_loading import Transparent, attach_head, wrap_transparent


@mended("huggingface/peft#3306")
def biases_of_lora_only(right: bool, folder: Path) -> Script:
    make = lambda: base(Qwen2ForCausalLM, Qwen2Config)  # noqa: E731
    model = adapted(make(), bias="all" if right else "lora_only")
    return Script(
        model, trains=("lora_", "q_proj.base_layer.bias"), again=lambda at: PeftModel.from_pretrained(make(), at)
    )


@trouble("Blaizzy/mlx-vlm#2178", "SL109", "lost, moved")
def a_base_that_is_not_frozen_when_resumed(right: bool, folder: Path) -> Script:
    model = PeftModel.from_pretrained(base(), saved(folder), is_trainable=True)
    if not right:
        model.requires_grad_(True)
    return Script(model.train(), keeps=("base_layer", "embed_tokens"))


@trouble("huggingface/peft#2738", "SL103", "lost")
def a_projector_that_is_trained_beside_the_adapter(right: bool, folder: Path) -> Script:
    model = adapted(modules_to_save=["norm"] if right else None)
    if not right:
        model.get_base_model().model.norm.requires_grad_(True)
    return Script(model, trains=("lora_", "model.norm.modules_to_save" if right else "model.norm"))


class Valued(Transparent):
    """A value head on the last hidden states."""

    def __call__(self, *args: Any, **inputs: Any) -> Any:
        out = super().__call__(*args, **inputs, output_hidden_states=True)
        this: Any = self
        out.loss = out.loss + this.value_head(out.hidden_states[-1]).square().mean()
        return out


@trouble("radixark/miles#3080", "SL104", "lost")
def a_head_that_was_made_after_the_adapter(right: bool, folder: Path) -> Script:
    def with_head(model: Any) -> Any:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            head = nn.Linear(HIDDEN, 1)
        if right:
            attach_head(model, "value_head", head)
        else:
            model.get_base_model().value_head = head
        wrapped = wrap_transparent(model, Valued)
        wrapped.accepts_loss_kwargs = False
        return wrapped.train()

    def load(at: Path) -> Any:
        if not right:
            return with_head(PeftModel.from_pretrained(base(), at))
        model = base()
        attach_head(model, "value_head", nn.Linear(HIDDEN, 1))
        return wrap_transparent(PeftModel.from_pretrained(model, at), Valued)

    return Script(
        with_head(adapted()), trains=("lora_", "value_head.modules_to_save" if right else "value_head"), again=load
    )


class Scaled(LlamaForCausalLM):
    """A model with a parameter of its own, whose first value is drawn as transformers asks for."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.temperature = nn.Parameter(torch.ones(()))
        self.register_buffer("counts", torch.zeros(2), persistent=False)  # in no checkpoint, so that it is made anew

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)  # type: ignore[no-untyped-call]  # of transformers
        if module is self:
            initialization.ones_(self.temperature)

    def forward(self, input_ids: Any = None, attention_mask: Any = None, labels: Any = None, **kwargs: Any) -> Any:
        out = super().forward(input_ids, attention_mask, labels=labels, **kwargs)
        out.loss = out.loss * self.temperature
        return out


class Overwritten(Scaled):
    """The same, which writes over what was loaded."""

    def _init_weights(self, module: nn.Module) -> None:
        if module is self:
            self.temperature.data.fill_(1.0)


@trouble("huggingface/transformers#46620", "SL132", "lost")
def a_value_that_is_written_after_the_load(right: bool, folder: Path) -> Script:
    return Script(base(Scaled if right else Overwritten), trains=("weight", "temperature"), round_trip=True)


@mended("huggingface/transformers#48595")
def a_saved_module_of_an_integrated_adapter(right: bool, folder: Path) -> Script:
    skip_unless_transformers_takes_peft()
    model = base()
    model.add_adapter(LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"]))
    base().save_pretrained(folder / "base")
    for config in model.peft_config.values():
        config.base_model_name_or_path = str(folder / "base")

    def load(at: Path) -> Any:
        return LlamaForCausalLM.from_pretrained(at)

    def by_hand(at: Path) -> Any:
        again = base()
        again.load_adapter(str(at))
        return again

    return Script(model.train(), trains=("lora_", "modules_to_save"), again=by_hand if right else load, round_trip=True)


@trouble("huggingface/peft#2777", "SL111", "untied")
def tied_parts_that_are_both_saved(right: bool, folder: Path) -> Script:
    make = lambda: base(tie_word_embeddings=True)  # noqa: E731
    model = adapted(make(), modules_to_save=["embed_tokens", "lm_head"], ensure_weight_tying=right)
    again = lambda at: PeftModel.from_pretrained(make(), at)  # noqa: E731
    return Script(model, trains=("lora_", "modules_to_save"), again=again, also=lambda: untied(model))


def untied(model: Any) -> set[str]:
    """Whether the embeddings and the head, which the config ties, have other values."""
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    parts = [base.get_input_embeddings(), base.get_output_embeddings()]
    weights = [
        part.modules_to_save["default"].weight if hasattr(part, "modules_to_save") else part.weight for part in parts
    ]
    return set() if torch.equal(*weights) else {"untied"}


@trouble("hiyouga/LlamaFactory#6749", "SL111", "untied")
def one_of_two_tied_parts(right: bool, folder: Path) -> Script:
    make = lambda: base(tie_word_embeddings=True)  # noqa: E731
    model = adapted(make(), modules_to_save=["embed_tokens"], ensure_weight_tying=right)
    again = lambda at: PeftModel.from_pretrained(make(), at)  # noqa: E731
    return Script(model, trains=("lora_", "modules_to_save"), again=again, also=lambda: untied(model))


@trouble("TransformerLensOrg/TransformerLens#1725", "SL111", "untied")
def a_tie_that_a_load_takes_apart(right: bool, folder: Path) -> Script:
    model = base(tie_word_embeddings=True)
    state = {"model.embed_tokens.weight": model.lm_head.weight.detach().clone()}
    model.load_state_dict(state, strict=False, assign=True)
    if right:
        model.tie_weights()
    return Script(model.requires_grad_(True), trains=("weight",), also=lambda: untied(model))


@trouble("FareedKhan-dev/train-llm-from-scratch#36", "SL106", "lost")
def keys_of_a_compiled_model(right: bool, folder: Path) -> Script:
    model = base()
    compiled = torch.compile(model, backend="eager")
    save = lambda at: torch.save((model if right else compiled).state_dict(), at / "state.pt")  # noqa: E731

    def load(at: Path) -> Any:
        again = base()
        again.load_state_dict(torch.load(at / "state.pt", weights_only=True), strict=False)
        return again

    return Script(model if right else compiled, trains=("weight",), save=save, again=load)


@trouble("unslothai/unsloth#3317", "SL135", "untrained")
def a_score_head_that_the_adapter_freezes(right: bool, folder: Path) -> Script:
    config = {"num_labels": 2, "pad_token_id": 0}
    fields = {**LORA, "task_type": "SEQ_CLS" if right else None}
    make = lambda: base(LlamaForSequenceClassification, **config)  # noqa: E731
    model = get_peft_model(make(), LoraConfig(**fields)).train()
    trains = ("lora_", "score.modules_to_save" if right else "score")
    return Script(
        model,
        trains=trains,
        inputs={"labels": torch.tensor([0, 1])},
        again=lambda at: PeftModel.from_pretrained(make(), at),
    )


class Wrapper(nn.Module):
    """Code around a model."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.auto_model = model

    def forward(self, input_ids: Any, attention_mask: Any = None, labels: Any = None, **kwargs: Any) -> Any:
        return self.auto_model(input_ids=input_ids, attention_mask=attention_mask, labels=labels, **kwargs)


@trouble("huggingface/sentence-transformers#3402", "SL101", "lost")
def a_checkpoint_of_a_wrapper(right: bool, folder: Path) -> Script:
    model = adapted() if right else Wrapper(adapted())
    save = None if right else (lambda at: torch.save(model.state_dict(), at / "state.pt"))

    def load(at: Path) -> Any:
        again = adapted()
        again.load_state_dict(torch.load(at / "state.pt", weights_only=True), strict=False)
        return again

    return Script(model, save=save, again=None if right else load)


@trouble("MakazhanAlpamys/Soup#425", "SL129", "16 bits")
def bfloat16_under_a_scaler(right: bool, folder: Path) -> Script:
    make = lambda: halved(base(dtype="bfloat16"))  # noqa: E731
    model = adapted(make())
    if not right:
        model = halved(model)
    # on a GPU the scaler raises: "_amp_foreach_non_finite_check_and_unscale_cuda" not implemented for 'BFloat16'
    halves = {"16 bits"} if any(p.dtype == torch.bfloat16 for p in trained(model)) else set()
    again = lambda at: PeftModel.from_pretrained(make(), at, autocast_adapter_dtype=right)  # noqa: E731
    return Script(model, arguments={"fp16": True}, again=again, also=lambda: halves)


@trouble("axolotl-ai-cloud/axolotl#2621", "SL108", "float32")
def embeddings_that_a_preparation_casts(right: bool, folder: Path) -> Script:
    make = lambda: halved(base(dtype="bfloat16"))  # noqa: E731
    model = adapted(make() if right else prepare_model_for_kbit_training(make(), use_gradient_checkpointing=False))
    wide = {"float32"} if model.get_base_model().model.embed_tokens.weight.dtype == torch.float32 else set()
    load = lambda: make() if right else make().float()  # noqa: E731
    return Script(model, again=lambda at: PeftModel.from_pretrained(load(), at), also=lambda: wide)
