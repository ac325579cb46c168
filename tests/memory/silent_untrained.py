"""Scripts of the trackers in which what looks trained is not: see `silent_scripts`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import accelerate
import torch
from engines import skip_unless_transformers_takes_peft
from models import SIZES
from peft import (
    AdaLoraConfig,
    LoraConfig,
    PeftModel,
    PromptTuningConfig,
    get_peft_model,
    prepare_model_for_kbit_training,
)
from silent_scripts import LORA, TOKENS, Script, adamw, adapted, base, mended, saved, trained, trouble
from torch.nn.functional import cross_entropy
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
    MixtralConfig,
    MixtralForCausalLM,
    TrainerCallback,
)

from safe_loading import Transparent, wrap_transparent


@trouble("huggingface/trl#6700", "SL105", "untrained")
def an_adapter_that_was_loaded_to_be_used(right: bool, folder: Path) -> Script:
    model = PeftModel.from_pretrained(base(), saved(folder), is_trainable=right).train()
    return Script(model, optimizer=adamw(model.parameters() if not right else trained(model)))


@trouble("huggingface/peft#3580", "SL105", "untrained")
def a_second_adapter_that_was_loaded_to_be_trained(right: bool, folder: Path) -> Script:
    model = PeftModel.from_pretrained(base(), saved(folder), is_trainable=False)
    model.load_adapter(saved(folder), adapter_name="other", is_trainable=True)
    if right:
        model.set_adapter("other")
    own = [p for name, p in model.named_parameters() if ".other." in name]

    def load(at: Path) -> Any:
        again = PeftModel.from_pretrained(base(), at)
        again.load_adapter(at / "other", "other")
        again.set_adapter(model.active_adapter)
        return again

    return Script(model.train(), trains=(".other.",), keeps=(".default.",), optimizer=adamw(own), again=load)


def other(folder: Path) -> Any:
    return PeftModel.from_pretrained(base(), folder / "other", adapter_name="other")


class Switched(Transparent):
    """Two adapters that take turns in one forward pass."""

    thaws: bool

    def __call__(self, *args: Any, **inputs: Any) -> Any:
        both = ["first", "other"]
        this: Any = self
        this.set_adapter(both[0])
        out = super().__call__(*args, **inputs)
        this.set_adapter(both[1])
        other = super().__call__(*args, **inputs)
        out.loss = out.loss + other.loss
        if self.thaws:
            this.set_requires_grad(both)
        return out


@trouble("huggingface/peft#2759", "SL121", "untrained")
def two_adapters_that_take_turns(right: bool, folder: Path) -> Script:
    model = get_peft_model(base(), LoraConfig(**LORA), adapter_name="first")
    model.add_adapter("other", LoraConfig(**LORA))
    model.set_requires_grad(["first", "other"])
    optimizer = adamw([p for name, p in model.named_parameters() if "lora_" in name])
    wrapped = wrap_transparent(model, Switched, thaws=right)
    wrapped.accepts_loss_kwargs = False

    def load(folder: Path) -> Any:
        again = PeftModel.from_pretrained(base(), folder / "first", adapter_name="first")
        again.load_adapter(folder / "other", "other")
        return wrap_transparent(again, Switched, thaws=False)

    return Script(wrapped.train(), optimizer=optimizer, again=load)


@trouble("gke-labs/open-rl#80", "SL118", "untrained")
def the_optimizer_of_another_adapter(right: bool, folder: Path) -> Script:
    model = get_peft_model(base(), LoraConfig(**LORA), adapter_name="first")
    model.add_adapter("other", LoraConfig(**LORA))
    if right:
        model.set_adapter("other")
    optimizer = adamw(trained(model))
    model.set_adapter("other")
    return Script(model.train(), trains=(".other.",), optimizer=optimizer, again=other)


@trouble("huggingface/trl#3926", "SL105", "untrained")
def prepared_after_the_adapter(right: bool, folder: Path) -> Script:
    model = base(dtype=torch.float32)
    model = adapted(model) if right else prepare_model_for_kbit_training(adapted(model), False)
    return Script(model.train(), optimizer=adamw(model.parameters() if not right else trained(model)))


class FusedHead(Transparent):
    """A loss that multiplies with the head's weight itself, as fused kernels do."""

    def __call__(self, *args: Any, labels: Any = None, **inputs: Any) -> Any:
        out = super().__call__(*args, **inputs, output_hidden_states=True)
        head: Any = self.get_output_embeddings()  # type: ignore[attr-defined]  # of the model
        logits = out.hidden_states[-1] @ head.weight.T
        out.loss = cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())
        return out


def fused(model: Any) -> Any:
    wrapped = wrap_transparent(model, FusedHead)
    wrapped.get_base_model().accepts_loss_kwargs = False
    return wrapped.train()


@trouble("huggingface/trl#4612", "SL121", "untrained")
def an_adapter_on_a_head_that_a_fused_loss_reads(right: bool, folder: Path) -> Script:
    targets = ["q_proj"] if right else ["q_proj", "lm_head"]
    return Script(fused(adapted(target_modules=targets)), again=lambda at: fused(PeftModel.from_pretrained(base(), at)))


@trouble("unslothai/unsloth#9331", "SL105", "untrained")
def factors_of_embeddings_that_are_frozen_again(right: bool, folder: Path) -> Script:
    model = adapted(target_modules=["embed_tokens", "q_proj"])
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name if right else ".lora_A." in name or ".lora_B." in name)
    return Script(model)


@trouble("unslothai/unsloth#9326", None, "untrained")
def targets_that_another_library_drops(right: bool, folder: Path) -> Script:
    layers = r".*\.(q_proj|v_proj)"
    model = adapted(target_modules=layers, modules_to_save=["lm_head"] if right else None)
    return Script(model, trains=("lora_", "lm_head.modules_to_save" if right else "lm_head"))


@mended("locuslab/open-unlearning#178")
def reentrant_checkpoints_without_gradients_of_inputs(right: bool, folder: Path) -> Script:
    model = adapted(modules_to_save=["lm_head"])
    model.get_base_model().gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    if right:
        model.enable_input_require_grads()
    return Script(model, trains=("lora_", "modules_to_save"), recomputes=True)


@trouble("NVIDIA-NeMo/Megatron-Bridge#5991", None, "untrained")
def a_part_that_was_to_be_trained_before_the_adapter(right: bool, folder: Path) -> Script:
    model = base().requires_grad_(False)
    model.lm_head.requires_grad_(True)
    model = adapted(model, modules_to_save=["lm_head"] if right else None)
    return Script(model, trains=("lora_", "lm_head.modules_to_save" if right else "lm_head"))


@trouble("huggingface/peft#3582", "SL138", "scaled otherwise")
def a_key_of_alpha_pattern_that_matches_nothing(right: bool, folder: Path) -> Script:
    model = adapted(alpha_pattern={"q_proj" if right else "self_attn.query": 64}, lora_alpha=2)
    scaled = model.get_base_model().model.layers[0].self_attn.q_proj.scaling["default"]
    return Script(model, also=lambda: set() if scaled == 64 / LORA["r"] else {"scaled otherwise"})


@trouble("vvvvvjdy/D-OPSD#5", "SL138", "untrained")
def a_comma_that_is_missing(right: bool, folder: Path) -> Script:
    targets = ["q_proj", "gate_proj", "up_proj"] if right else ["q_proj", "gate_projup_proj"]
    return Script(adapted(target_modules=targets), trains=("lora_", "gate_proj.lora_B" if right else "gate_proj"))


def mixture() -> Any:
    return base(MixtralForCausalLM, MixtralConfig, num_local_experts=2, num_experts_per_tok=1)


@trouble("unslothai/unsloth#6936", "SL138", "untrained")
def experts_under_a_name_that_the_model_does_not_have(right: bool, folder: Path) -> Script:
    targets = ["experts.gate_up_proj"] if right else ["experts.gate_up_projs"]
    model = adapted(mixture(), target_parameters=targets)
    again = lambda at: PeftModel.from_pretrained(mixture(), at)  # noqa: E731
    return Script(model, trains=("lora_", "experts.lora_B" if right else "experts.gate_up"), again=again)


@trouble("unslothai/unsloth#11014", None, "untrained")
def half_of_the_experts(right: bool, folder: Path) -> Script:
    targets = ["experts.gate_up_proj", "experts.down_proj"] if right else ["experts.down_proj"]
    model = adapted(mixture(), target_parameters=targets)
    again = lambda at: PeftModel.from_pretrained(mixture(), at)  # noqa: E731
    return Script(model, trains=("lora_",) if right else ("lora_", "gate_up_proj"), again=again)


@trouble("modelscope/ms-swift#10153", None, "untrained")
def a_pattern_that_leaves_a_layer_out(right: bool, folder: Path) -> Script:
    pattern = r".*\.(q_proj|v_proj)" + (r"|.*\.up_proj" if right else r"|up_proj(?=\.)")
    return Script(adapted(target_modules=pattern), trains=("lora_", "up_proj.lora_B" if right else "up_proj"))


@trouble("huggingface/peft#3487", "SL105", "untrained")
def another_adapter_for_inference_freezes_the_trained_one(right: bool, folder: Path) -> Script:
    model = adapted()
    model.add_adapter("reference", LoraConfig(**{**LORA, "target_modules": ["k_proj"]}, inference_mode=True))
    if right:
        model.set_adapter("default")
    else:
        model.set_requires_grad("default", requires_grad=False)
    return Script(
        model.train(), trains=(".default.",), optimizer=adamw(model.parameters() if not right else trained(model))
    )


@trouble("huggingface/lerobot#3459", "SL137", "lost")
def an_adapter_around_an_adapter(right: bool, folder: Path) -> Script:
    model = PeftModel.from_pretrained(base(), saved(folder), is_trainable=True)
    return Script((model if right else adapted(model)).train())


class Allocates(TrainerCallback):
    """What peft's documentation asks for, in a Trainer."""

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        kwargs["model"].base_model.update_and_allocate(state.global_step)


@trouble("huggingface/sentence-transformers#3842", "SL139", "as LoRA")
def adalora_whose_ranks_nobody_allocates(right: bool, folder: Path) -> Script:
    sizes: dict[str, Any] = {"init_r": 4, "target_r": 1, "tinit": 0, "tfinal": 1, "deltaT": 1, "total_step": 4}
    sizes["orth_reg_weight"] = 1e-9  # a part of the loss that depends on the ranks that are saved
    model = get_peft_model(base(), AdaLoraConfig(**{**LORA, "r": 8}, **sizes)).train()
    callback = Allocates()

    def after_a_step(number: int) -> None:
        if right:
            callback.on_optimizer_step(None, SimpleNamespace(global_step=number + 1), None, model=model)

    def ranks() -> set[str]:
        return set() if model.peft_config["default"].rank_pattern else {"as LoRA"}

    handler = SimpleNamespace(callbacks=[callback] if right else [])
    again = lambda at: PeftModel.from_pretrained(base(), at, is_trainable=True)  # noqa: E731
    return Script(
        model,
        trains=("lora_A",),
        again=again,
        trainer={"callback_handler": handler},
        also=ranks,
        after_a_step=after_a_step,
    )


@trouble("huggingface/trl#6277", "SL126", "untrained")
def virtual_tokens_that_a_loss_goes_around(right: bool, folder: Path) -> Script:
    class Around(Transparent):
        def __call__(self, *args: Any, **inputs: Any) -> Any:
            this: Any = self
            return super().__call__(*args, **inputs) if right else this.get_base_model()(*args, **inputs)

    def wrapped(model: Any) -> Any:
        return wrap_transparent(model, Around).train()

    model = get_peft_model(base(), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
    return Script(
        wrapped(model), trains=("prompt_encoder",), again=lambda at: wrapped(PeftModel.from_pretrained(base(), at))
    )


@trouble("radixark/miles#1087", "SL127", "untrained")
def merged_for_generation_and_never_unmerged(right: bool, folder: Path) -> Script:
    model = PeftModel.from_pretrained(base(), saved(folder), is_trainable=True).train()
    model.merge_adapter()
    if right:
        model.unmerge_adapter()
    return Script(model)


@trouble("unslothai/unsloth#2736", "SL127", "untrained")
def disabled_for_a_reference_and_left_so(right: bool, folder: Path) -> Script:
    model = adapted()
    optimizer = adamw(trained(model))
    model.disable_adapter_layers()
    if right:
        model.enable_adapter_layers()
    return Script(model, optimizer=optimizer)


@trouble("unslothai/unsloth#2188", "SL128", "untrained")
def tokens_that_were_added(right: bool, folder: Path) -> Script:
    base().save_pretrained(folder / "base")
    rows = SIZES["vocab_size"]

    def larger() -> Any:
        model = LlamaForCausalLM.from_pretrained(folder / "base", dtype=torch.float32).train()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model.resize_token_embeddings(rows + 2)
        return model

    model = adapted(larger(), trainable_token_indices=[rows, rows + 1] if right else None)
    trains = ("lora_", "embed_tokens") if not right else ("lora_", "trainable_tokens_delta")
    tokens = torch.full((2, 16), rows)
    tokens[:, ::2] = rows + 1
    again = lambda at: PeftModel.from_pretrained(larger(), at)  # noqa: E731
    return Script(model, trains=trains, again=again, inputs={"input_ids": tokens})


class OwnLoss(LlamaForCausalLM):
    """A forward with **kwargs that drops the number of tokens."""

    def forward(self, input_ids: Any = None, attention_mask: Any = None, labels: Any = None, **kwargs: Any) -> Any:
        kwargs.pop("num_items_in_batch", None)
        return super().forward(input_ids, attention_mask, labels=labels, **kwargs)


@trouble("huggingface/transformers#37766", "SL119", "undivided")
def a_forward_that_drops_the_number_of_tokens(right: bool, folder: Path) -> Script:
    model = adapted(base(LlamaForCausalLM if right else OwnLoss))

    def undivided() -> set[str]:
        both = [model(TOKENS, labels=TOKENS, num_items_in_batch=torch.tensor(count)).loss for count in (10, 1000)]
        return {"undivided"} if torch.equal(*both) else set()

    return Script(model, arguments={"gradient_accumulation_steps": 4}, also=undivided)


@trouble("huggingface/accelerate#3209", "SL118", "untrained")
def prepared_by_accelerate_before_the_adapter(right: bool, folder: Path) -> Script:
    model = base()
    accelerator = accelerate.Accelerator(cpu=True)
    if right:
        model = adapted(model)
        optimizer = adamw(trained(model))
    else:
        optimizer = adamw(trained(model))
    model, optimizer = accelerator.prepare(model, optimizer)
    return Script(model if right else adapted(model), optimizer=optimizer)


IMAGE = 100  # the token of an image


def llava() -> Any:
    vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
    vision |= {"image_size": 16, "patch_size": 8, "projection_dim": 32}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        parts = {"vision_config": CLIPVisionConfig(**vision), "text_config": LlamaConfig(**SIZES)}
        config = LlavaConfig(**parts, image_token_index=IMAGE)
        return LlavaForConditionalGeneration(config).train()


def of_llava(exclude: str | None, images: bool) -> Script:
    fields: dict[str, Any] = {"r": 2, "target_modules": ["q_proj"], "exclude_modules": exclude}
    model = get_peft_model(llava(), LoraConfig(**fields)).train()
    tokens = TOKENS.clone()
    if images:
        tokens[:, 1:5] = IMAGE
    inputs = {"input_ids": tokens, **({"pixel_values": torch.rand(2, 3, 16, 16)} if images else {})}
    return Script(model, again=lambda at: PeftModel.from_pretrained(llava(), at), inputs=inputs)


@trouble("huggingface/trl#1936", "SL121", "untrained")
def the_last_layer_of_a_vision_tower(right: bool, folder: Path) -> Script:
    return of_llava(r".*vision_tower.*layers\.2\..*" if right else None, images=True)


@trouble("haotian-liu/LLaVA#1647", "SL121", "untrained")
def a_vision_tower_that_gets_an_adapter_and_no_image(right: bool, folder: Path) -> Script:
    return of_llava(r".*vision_tower.*" if right else None, images=False)


@trouble("huggingface/peft#3373", "SL139", "as LoRA")
def adalora_in_a_model_without_the_method(right: bool, folder: Path) -> Script:
    script = adalora_whose_ranks_nobody_allocates(right, folder)
    if right:
        return script
    skip_unless_transformers_takes_peft()
    model = base()
    sizes: dict[str, Any] = {"init_r": 4, "target_r": 1, "tinit": 0, "tfinal": 1, "deltaT": 1, "total_step": 4}
    model.add_adapter(AdaLoraConfig(r=8, target_modules=["q_proj"], **sizes))

    def load(at: Path) -> Any:
        again = base()
        again.load_adapter(str(at))
        return again

    ranks = lambda: set() if model.peft_config["default"].rank_pattern else {"as LoRA"}  # noqa: E731
    return dataclasses.replace(script, model=model.train(), again=load, also=ranks)


@mended("huggingface/peft#2494")
def a_module_to_save_whose_original_is_frozen(right: bool, folder: Path) -> Script:
    skip_unless_transformers_takes_peft()
    model = base()
    model.add_adapter(LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"]))

    def load(at: Path) -> Any:
        again = base()
        again.load_adapter(str(at))
        return again

    return Script(model.train(), trains=("lora_", "modules_to_save"), again=load)
