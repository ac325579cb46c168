"""Scripts of the trackers in which a step or a load computes with other numbers than it seems: see `silent_scripts`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from models import SIZES
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from silent_scripts import HIDDEN, TOKENS, Script, adamw, adapted, base, halved, mended, saved, trained, trouble
from silent_untrained import IMAGE, llava
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel

ROW = TOKENS.reshape(1, 32)  # two texts in one row
BOUNDS = torch.arange(16).repeat(2)[None]  # their positions


def mixed(model: Any, **inputs: Any) -> set[str]:
    """Whether what stands in the first text is seen in the second."""
    model.eval()
    changed = ROW.clone()
    changed[:, :16] = changed[:, :16].flip(1)
    with torch.no_grad():
        one, other = (model(ids, position_ids=BOUNDS, **inputs).logits[:, 16:] for ids in (ROW, changed))
    model.train()
    return set() if torch.allclose(one, other, atol=1e-5) else {"mixed"}


@trouble("huggingface/transformers#46634", "SL141", "mixed")
def packed_rows_under_a_mask_of_ones(right: bool, folder: Path) -> Script:
    model = adapted()
    model.config.use_cache = False
    mask = {} if right else {"attention_mask": torch.ones_like(ROW)}
    inputs = {"attention_mask": None, "input_ids": ROW, "position_ids": BOUNDS, **mask}
    again = lambda at: PeftModel.from_pretrained(base(use_cache=False), at)  # noqa: E731
    return Script(model, inputs=inputs, also=lambda: mixed(model, **mask), again=again)


@trouble("unlisted: use_cache is on by default, and a loop of one's own leaves it so", "SL141", "mixed")
def packed_rows_while_a_cache_is_filled(right: bool, folder: Path) -> Script:
    model = adapted()
    model.config.use_cache = not right
    again = lambda at: PeftModel.from_pretrained(base(use_cache=not right), at)  # noqa: E731
    inputs = {"attention_mask": None, "input_ids": ROW, "position_ids": BOUNDS}
    return Script(model, inputs=inputs, also=lambda: mixed(model), again=again)


@trouble("NVIDIA-NeMo/Automodel#2549", "SL142", "lost")
def frequencies_that_a_cast_has_rounded(right: bool, folder: Path) -> Script:
    model = base()
    for name, parameter in model.named_parameters():
        parameter.data.mul_(300 if "q_proj" in name or "k_proj" in name else 1)  # attention that looks at positions
    if right:
        for parameter in model.parameters():
            parameter.data = parameter.data.to(torch.bfloat16).float()
    else:
        model = model.to(torch.bfloat16).float()
    text = {"attention_mask": None, "input_ids": torch.arange(128)[None] % SIZES["vocab_size"]}  # errors grow with it
    return Script(adapted(model), again=lambda at: PeftModel.from_pretrained(again_of(model), at), inputs=text)


def again_of(model: Any) -> Any:
    """The base as a load makes it, with the weights of another and the frequencies of its class."""
    fresh = base()
    fresh.load_state_dict({name.replace(".base_layer", ""): v for name, v in model.state_dict().items()}, strict=False)
    return fresh


@trouble("huggingface/transformers#45902", "SL142", "lost")
def frequencies_that_nothing_computed(right: bool, folder: Path) -> Script:
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**SIZES))
    model.to_empty(device="cpu")
    model.load_state_dict(base().state_dict())
    model.model.rotary_emb.inv_freq.fill_(0.5)  # whatever was in that memory
    if right:
        model.model.rotary_emb.__init__(model.config)
    return Script(adapted(model))


@trouble("tianweiy/CausVid#19", "SL143", "untrained")
def weights_too_large_for_their_steps(right: bool, folder: Path) -> Script:
    make = lambda: base() if right else halved(base())  # noqa: E731
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, weight_decay=0.0)
    dtype = torch.float32 if right else torch.bfloat16
    again = lambda at: LlamaForCausalLM.from_pretrained(at, dtype=dtype)  # noqa: E731
    return Script(model, trains=("norm",), optimizer=optimizer, again=again)


@trouble("workofart/ml-by-hand#85", "SL143", "untrained")
def norms_that_no_step_reaches(right: bool, folder: Path) -> Script:
    model = (base() if right else halved(base())).requires_grad_(False)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("norm" in name)
    optimizer = torch.optim.AdamW(trained(model), lr=6e-4, weight_decay=0.0)
    with_norms = lambda at: model  # noqa: E731
    return Script(model, trains=("norm",), optimizer=optimizer, again=with_norms)


def scaled(model: Any, factor: float) -> Any:
    for module in model.modules():
        if isinstance(module, LoraLayer):
            module.set_scale("default", factor)
    return model


@trouble("unlisted: set_scale and scale_layer change the layer, and not the config", "SL132", "lost")
def a_scale_that_no_checkpoint_holds(right: bool, folder: Path) -> Script:
    model = adapted(lora_alpha=64) if right else scaled(adapted(lora_alpha=4), 16)
    return Script(model)


@mended("huggingface/peft#2733")
def a_scale_of_rank_stabilized_lora(right: bool, folder: Path) -> Script:
    model = adapted(use_rslora=True, lora_alpha=4)
    return Script(model if right else scaled(model, 1))


@trouble("nvidia-cosmos/cosmos-predict2.5#15", "SL121", "untrained")
def factors_that_are_both_zero(right: bool, folder: Path) -> Script:
    model = adapted()
    if not right:
        for name, parameter in model.named_parameters():
            if "lora_A" in name:
                parameter.data.zero_()
    return Script(model)


@trouble("nvidia-cosmos/cosmos-predict1#49", "SL118", "untrained")
def a_rate_of_zero(right: bool, folder: Path) -> Script:
    model = adapted()
    return Script(model, optimizer=torch.optim.AdamW(trained(model), lr=1e-2 if right else 0.0, weight_decay=0.0))


@trouble("unlisted: get_peft_model puts its layers into the base that it is given", "SL144", "reference moved")
def a_reference_with_the_adapter_in_it(right: bool, folder: Path) -> Script:
    first = base()
    model = adapted(first)
    reference = base() if right else first
    reference.eval()
    with torch.no_grad():
        before = reference(TOKENS).logits

    def moved() -> set[str]:
        with torch.no_grad():
            return set() if torch.equal(before, reference.eval()(TOKENS).logits) else {"reference moved"}

    held = {"ref_model": None if right else reference}
    return Script(model.train(), trainer=held, also=moved)


def adapter_of_vision(model: Any) -> Any:
    fields: dict[str, Any] = {"r": 2, "target_modules": r".*vision_tower.*layers\.[01]\..*(q_proj|fc1)"}
    return get_peft_model(model, LoraConfig(**fields)).train()


def with_images(model: Any, make: Any, **fields: Any) -> Script:
    tokens = TOKENS.clone()
    tokens[:, 1:5] = IMAGE
    inputs = {"input_ids": tokens, "pixel_values": torch.rand(2, 3, 16, 16)}
    return Script(model, again=lambda at: PeftModel.from_pretrained(make(), at), inputs=inputs, **fields)


@mended("unslothai/unsloth#5039")
def reentrant_checkpoints_of_a_vision_tower(right: bool, folder: Path) -> Script:
    model = adapter_of_vision(llava())
    kwargs = {"use_reentrant": not right}
    model.get_base_model().gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs)
    if not right:  # for the language model alone, as the hook of unsloth does
        model.get_base_model().model.language_model.enable_input_require_grads()
    return with_images(model, llava, recomputes=True)


def without_graph(model: Any) -> Any:
    """A vision tower that runs as LLaVA's does."""
    tower = model.model.vision_tower
    tower.forward = torch.no_grad()(tower.forward)
    return model


@trouble("haotian-liu/LLaVA#1173", "SL126", "untrained")
def a_vision_tower_under_no_grad(right: bool, folder: Path) -> Script:
    return with_images(adapter_of_vision(llava() if right else without_graph(llava())), llava)


class Pooled(LlamaForCausalLM):
    """A model whose loss is of states that torch's own attention has gone over."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.pool = nn.MultiheadAttention(HIDDEN, 4, batch_first=True)
        nn.init.orthogonal_(self.pool.out_proj.weight)  # as of a checkpoint, and not as it was made
        self.last = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, input_ids: Any = None, attention_mask: Any = None, labels: Any = None, **kwargs: Any) -> Any:
        kwargs.pop("num_items_in_batch", None)
        out = self.model(input_ids=input_ids, attention_mask=attention_mask, **kwargs)
        states = out.last_hidden_state
        pooled = self.last(self.pool(states, states, states, need_weights=False)[0])
        out.loss = pooled.square().mean()
        return out

    accepts_loss_kwargs = False


@trouble("helicalAI/helical#405", "SL121", "untrained")
def a_projection_that_torch_reads_itself(right: bool, folder: Path) -> Script:
    targets = ["last", "q_proj"] if right else ["last", "q_proj", "out_proj"]
    model = adapted(base(Pooled), target_modules=targets)
    return Script(model, again=lambda at: PeftModel.from_pretrained(base(Pooled), at))


@trouble("MakazhanAlpamys/Soup#351", "SL106", "lost")
def a_checkpoint_of_a_compiled_adapter(right: bool, folder: Path) -> Script:
    model = adapted()
    compiled = torch.compile(model, backend="eager")
    own = lambda state: {name: value for name, value in state.items() if "lora_" in name}  # noqa: E731
    save = lambda at: torch.save(own((model if right else compiled).state_dict()), at / "state.pt")  # noqa: E731

    def load(at: Path) -> Any:
        again = adapted()
        again.load_state_dict(torch.load(at / "state.pt", weights_only=True), strict=False)
        return again

    return Script(model if right else compiled, save=save, again=load)


class Prefixed(LlamaModel):
    """A base whose class does not say by which name the model with a head has it."""

    base_model_prefix = "llama"

    def forward(self, input_ids: Any = None, attention_mask: Any = None, labels: Any = None, **kwargs: Any) -> Any:
        out = super().forward(input_ids=input_ids, attention_mask=attention_mask, **kwargs)
        out["loss"] = out.last_hidden_state.square().mean() if labels is None else out.last_hidden_state.abs().mean()
        return out

    accepts_loss_kwargs = False


@trouble("huggingface/transformers#48744", "SL140", "lost")
def a_base_whose_names_were_not_found(right: bool, folder: Path) -> Script:
    base().save_pretrained(folder / "base")
    cls = Prefixed if not right else type("Found", (Prefixed,), {"base_model_prefix": "model"})
    make = lambda: cls.from_pretrained(folder / "base", dtype=torch.float32)  # noqa: E731
    model = get_peft_model(make(), LoraConfig(r=2, target_modules=["q_proj"]))
    again = lambda at: PeftModel.from_pretrained(make(), at)  # noqa: E731
    return Script(model.train(), again=again, round_trip=True)


def from_disk(folder: Path) -> Any:
    if not (folder / "base").exists():
        base().save_pretrained(folder / "base")
    return LlamaForCausalLM.from_pretrained(folder / "base", dtype=torch.float32)


@trouble("huggingface/trl#4713", "SL140", "lost")
def a_base_that_only_memory_has(right: bool, folder: Path) -> Script:
    model = from_disk(folder)
    if not right:
        model = PeftModel.from_pretrained(model, saved(folder)).merge_and_unload()
    again = lambda at: PeftModel.from_pretrained(from_disk(folder), at)  # noqa: E731
    return Script(adapted(model), again=again, round_trip=True)


@trouble("huggingface/peft#2184", "SL140", "lost")
def a_start_that_is_drawn_anew(right: bool, folder: Path) -> Script:
    return Script(adapted(init_lora_weights="pissa" if right else "pissa_niter_4"))


class Normed(LlamaForCausalLM):
    """A model with running statistics."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.statistics = nn.BatchNorm1d(HIDDEN)

    def forward(self, input_ids: Any = None, attention_mask: Any = None, labels: Any = None, **kwargs: Any) -> Any:
        kwargs.pop("num_items_in_batch", None)
        out = self.model(input_ids=input_ids, attention_mask=attention_mask, **kwargs)
        out.loss = self.statistics(out.last_hidden_state.flatten(0, 1) + 1).abs().mean()
        return out

    accepts_loss_kwargs = False


@trouble("huggingface/peft#1732", "SL145", "lost")
def running_statistics_beside_an_adapter(right: bool, folder: Path) -> Script:
    model = adapted(base(Normed), modules_to_save=["statistics"] if right else None)
    return Script(model, again=lambda at: PeftModel.from_pretrained(base(Normed), at))


@trouble("huggingface/transformers#3532", "SL118", "untrained")
def a_head_that_was_resized_after_the_optimizer(right: bool, folder: Path) -> Script:
    model = base()
    optimizer = adamw(model.parameters())
    model.resize_token_embeddings(SIZES["vocab_size"] + 3)
    return Script(model, trains=("lm_head",), optimizer=adamw(model.parameters()) if right else optimizer)
