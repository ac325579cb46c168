"""Structures of modules that people train: what the audit says before, and what happens in three steps of a Trainer.

Each structure is made with a mistake and as the fix says. What is wrong must be found, and nothing where all is well.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import accelerate
import pytest
import torch
from engines import skip_unless_transformers_takes_peft
from models import SIZES
from peft import LoraConfig, PeftModel, get_peft_model, set_peft_model_state_dict
from safetensors.torch import load_file
from test_audit_model import Wrapper, adapted, base
from torch import nn
from transformers import (
    BertConfig,
    BertModel,
    LlamaConfig,
    LlamaForSequenceClassification,
    LlamaModel,
    LlamaPreTrainedModel,
    Trainer,
    TrainingArguments,
)
from transformers.modeling_outputs import SequenceClassifierOutput

from safe_loading import Transparent, Workload, attach_head, audit_model, wrap_transparent

HIDDEN, VOCABULARY = SIZES["hidden_size"], SIZES["vocab_size"]
STEPS = 3
LORA: dict[str, Any] = {"r": 2, "target_modules": ["q_proj", "v_proj"]}
Code = Callable[[Any, Any, dict[str, Any]], Any]  # the call of the model, the module itself, and the inputs


class Around(Wrapper):
    """Code around a model as people write it first."""

    def __init__(self, model: Any, code: Code, **heads: nn.Module) -> None:
        super().__init__(model)
        self.code = code
        for name, head in heads.items():
            setattr(self, name, head)

    def forward(self, input_ids: Any, attention_mask: Any = None, labels: Any = None) -> Any:
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}
        return self.code(self.model, self, inputs)

    def get_input_embeddings(self) -> Any:
        return self.model.get_input_embeddings()


class Right(Transparent):
    """The same code in its right place."""

    code: Code

    def __call__(self, *_: Any, **inputs: Any) -> Any:
        return self.code(super().__call__, self, inputs)


def reward(call: Any, own: Any, inputs: dict[str, Any]) -> Any:
    out = call(**inputs)
    out.loss = out.loss + own.reward_head(out.logits[:, -1]).square().mean()
    return out


def value(call: Any, own: Any, inputs: dict[str, Any]) -> Any:
    out = call(**inputs, output_hidden_states=True)
    out.loss = out.loss + own.value_head(out.hidden_states[-1]).square().mean()
    return out


def prefix(call: Any, own: Any, inputs: dict[str, Any]) -> Any:
    embedded = own.get_input_embeddings()(inputs["input_ids"])
    first = own.connector(embedded.mean(1, keepdim=True))
    labels = torch.cat([torch.full_like(inputs["input_ids"][:, :1], -100), inputs["labels"]], 1)
    mask = inputs.get("attention_mask")
    mask = None if mask is None else torch.cat([torch.ones_like(mask[:, :1]), mask], 1)
    return call(inputs_embeds=torch.cat([first, embedded], 1), attention_mask=mask, labels=labels)


def projection(call: Any, own: Any, inputs: dict[str, Any]) -> Any:
    out = call(**inputs)
    out.loss = out.loss + own.projection(out.logits).std()
    return out


def focal(call: Any, _: Any, inputs: dict[str, Any]) -> Any:
    out = call(**inputs)
    out.loss = (1 - torch.exp(-out.loss)) ** 2 * out.loss
    return out


def pooling(call: Any, own: Any, inputs: dict[str, Any]) -> Any:
    out = call(**inputs)
    mask = inputs["attention_mask"].unsqueeze(-1) if inputs.get("attention_mask") is not None else 1.0
    out.loss = own.pooler((out.logits * mask).mean(1)).square().mean()
    return out


def siamese(call: Any, _: Any, inputs: dict[str, Any]) -> Any:
    out, other = call(**inputs), call(**{**inputs, "input_ids": inputs["input_ids"].flip(1)})
    out.loss = out.loss + (out.logits.mean(1) - other.logits.mean(1)).square().mean()
    return out


HEADS: dict[Code, dict[str, Callable[[], nn.Module]]] = {
    reward: {"reward_head": lambda: nn.Linear(VOCABULARY, 1)},
    value: {"value_head": lambda: nn.Linear(HIDDEN, 1)},
    prefix: {"connector": lambda: nn.Linear(HIDDEN, HIDDEN)},
    projection: {"projection": lambda: nn.Linear(VOCABULARY, 8)},
    focal: {},
    pooling: {"pooler": lambda: nn.Linear(VOCABULARY, 1)},
    siamese: {},
}


def wrong(code: Code) -> Any:
    return Around(adapted(), code, **{name: make() for name, make in HEADS[code].items()}).train()


def right(code: Code) -> Any:
    model = adapted()
    for name, make in HEADS[code].items():
        attach_head(model, name, make())
    wrapped = wrap_transparent(model, Right, code=code)
    wrapped.accepts_loss_kwargs = False  # the code makes means of its own
    return wrapped.train()


class HeldInEval(Around):
    """Its encoder stays in eval mode."""

    def train(self, mode: bool = True) -> Any:
        super().train(mode)
        self.model.eval()
        return self

    def gradient_checkpointing_enable(self, *args: Any, **options: Any) -> None:
        self.model.gradient_checkpointing_enable(*args, **options)


class Delegating(Around):
    """It passes on what it does not have."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("model"), name)


def without_gradients(call: Any, own: Any, inputs: dict[str, Any]) -> Any:
    with torch.no_grad():
        out = call(**inputs)
    out.loss = own.reward_head(out.logits).square().mean()
    return out


def classifier(**lora: Any) -> Any:
    model = LlamaForSequenceClassification(LlamaConfig(**{**SIZES, "num_labels": 2, "pad_token_id": 0}))
    return get_peft_model(model, LoraConfig(**{**LORA, **lora})).train()


def aliased() -> Any:
    model = wrong(focal)
    model.embed = model.model.get_input_embeddings()
    return model


def integrated(**lora: Any) -> Any:
    skip_unless_transformers_takes_peft()
    model = base()
    model.add_adapter(LoraConfig(**{**LORA, **lora}))
    if not lora:
        model.lm_head.requires_grad_(True)
    return model


class Turns(Transparent):
    """Two adapters that take turns in one forward pass, the first as a policy and the other as a critic."""

    thaws: bool

    def __call__(self, *args: Any, **inputs: Any) -> Any:
        this: Any = self
        this.set_adapter("default")
        out = super().__call__(*args, **inputs)
        this.set_adapter("critic")
        out.loss = out.loss + super().__call__(*args, **inputs).loss
        if self.thaws:
            this.set_requires_grad(["default", "critic"])
        return out


def taking_turns(*, thaws: bool) -> Any:
    model = adapted()
    model.add_adapter("critic", LoraConfig(**LORA))
    model.set_requires_grad(["default", "critic"])
    return wrap_transparent(model, Turns, thaws=thaws).train()


def prepared(model: Any) -> Any:
    """A model as a loop with accelerate has it: its forward runs under autocast. The state is a process's own."""
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    prepared: Any = accelerate.Accelerator(cpu=True, mixed_precision="bf16").prepare(model)
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    return prepared


class Pairs(nn.Module):
    """An encoder that runs for the query and for the passage, as FlagEmbedding has it."""

    def __init__(self, *, adapter: bool = False) -> None:
        super().__init__()
        sizes = {
            name: SIZES[name] for name in ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
        }
        self.model: Any = BertModel(BertConfig(**sizes, num_hidden_layers=2), add_pooling_layer=False)
        if adapter:
            self.model = get_peft_model(self.model, LoraConfig(r=2, target_modules=["query"]))

    def gradient_checkpointing_enable(self, *args: Any, **options: Any) -> None:
        self.model.gradient_checkpointing_enable(*args, **options)

    def encode(self, ids: Any, mask: Any) -> Any:
        hidden = self.model(input_ids=ids, attention_mask=mask).last_hidden_state[:, 0]
        return nn.functional.normalize(hidden, dim=-1)

    def forward(self, input_ids: Any, attention_mask: Any = None, labels: Any = None) -> Any:
        scores = self.encode(input_ids, attention_mask) @ self.encode(input_ids.flip(1), attention_mask).T
        chosen = torch.arange(len(scores), device=scores.device)
        return SequenceClassifierOutput(loss=nn.functional.cross_entropy(scores / 0.05, chosen), logits=scores)


class PairsWithInputs(Pairs):
    """The same over a frozen base, whose inputs have gradients for its checkpoints."""

    def enable_input_require_grads(self) -> None:
        self.model.enable_input_require_grads()


class SavesInside(Trainer):
    """A trainer that saves the encoder alone, and resumes from it."""

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        trained: Any = self.model
        trained.model.save_pretrained(output_dir)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        trained: Any = self.model
        load_inside(trained.model, Path(resume_from_checkpoint))


def load_inside(model: Any, folder: Path) -> None:
    """Load a checkpoint of the model or of its adapter."""
    if isinstance(model, PeftModel):
        set_peft_model_state_dict(model, load_file(folder / "adapter_model.safetensors"))
    else:
        model.load_state_dict(load_file(folder / "model.safetensors"))


class Tasks(LlamaPreTrainedModel):
    """A head for each task, of which a batch uses one."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.model = LlamaModel(config)
        self.heads = nn.ModuleList([nn.Linear(HIDDEN, 2) for _ in range(config.num_labels)])
        self.post_init()

    def forward(self, input_ids: Any, attention_mask: Any = None, task: Any = None, labels: Any = None) -> Any:
        hidden = self.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state[:, -1]
        logits = self.heads[0 if task is None else int(task[0])](hidden)
        return SequenceClassifierOutput(loss=nn.functional.cross_entropy(logits, labels), logits=logits)


def tasks(heads: int) -> Any:
    return Tasks(LlamaConfig(**SIZES, num_labels=heads)).train()


class Structure(NamedTuple):
    """A mistake, a code that finds it, what happens, the same without it, and what rows and the right trainer are."""

    wrong: Callable[[], Any]
    code: str
    happens: str
    right: Callable[[], Any]
    of_rows: bool = False  # whether rows have one label each
    of_tasks: bool = False  # whether rows name a task
    trainer: type[Trainer] = Trainer


# Threads with the same trouble: huggingface/setfit#526 (a head that no checkpoint has), huggingface/lerobot#3459 (a
# nested adapter), unslothai/unsloth#3317 (a frozen classifier), huggingface/transformers#33807 (two names),
# huggingface/sentence-transformers#3402 (a checkpoint of a wrapper).
STRUCTURES = {
    "a reward head beside the model": Structure(lambda: wrong(reward), "SL101", "refused", lambda: right(reward)),
    "a value head": Structure(lambda: wrong(value), "SL101", "refused", lambda: right(value)),
    "a connector of a prefix": Structure(lambda: wrong(prefix), "SL101", "refused", lambda: right(prefix)),
    "a projection": Structure(lambda: wrong(projection), "SL101", "refused", lambda: right(projection)),
    "a focal loss": Structure(lambda: wrong(focal), "SL101", "refused", lambda: right(focal)),
    "pooled sentences": Structure(lambda: wrong(pooling), "SL101", "refused", lambda: right(pooling)),
    "siamese": Structure(lambda: wrong(siamese), "SL101", "refused", lambda: right(siamese)),
    "delegating": Structure(lambda: Delegating(adapted(), focal).train(), "SL102", "saved whole", lambda: right(focal)),
    "held in eval mode": Structure(
        lambda: HeldInEval(adapted(lora_dropout=0.1), focal).train(),
        "SL134",
        "in eval, saved whole",
        lambda: right(focal),
    ),
    "without gradients": Structure(
        lambda: Around(adapted(), without_gradients, reward_head=nn.Linear(VOCABULARY, 1)).train(),
        "SL121",
        "refused, untrained",
        lambda: right(reward),
    ),
    "a frozen head": Structure(
        classifier, "SL135", "lost, untrained", lambda: classifier(task_type="SEQ_CLS"), of_rows=True
    ),
    "a second name": Structure(aliased, "SL133", "refused, unsaved", lambda: right(focal)),
    "a base in a wrapper": Structure(
        lambda: get_peft_model(Wrapper(base()), LoraConfig(**LORA)).train(),  # type: ignore[arg-type]  # the mistake
        "SL101",
        "refused",
        adapted,
    ),
    "two adapters that take turns": Structure(
        lambda: taking_turns(thaws=False), "SL121", "untrained", lambda: taking_turns(thaws=True)
    ),
    "accelerate first": Structure(
        lambda: prepared(wrong(focal)), "SL101", "refused", lambda: prepared(adapted(lora_dropout=0.1))
    ),
    "DataParallel": Structure(lambda: nn.DataParallel(adapted()), "SL136", "refused, untrained", adapted),
    "a nested adapter": Structure(lambda: adapted(adapted()), "SL137", "lost", adapted),
    "an adapter of transformers' own beside a trained head": Structure(
        integrated, "SL104", "lost", lambda: adapted(modules_to_save=["lm_head"])
    ),
    "everything trained": Structure(lambda: adapted().requires_grad_(requires_grad=True), "SL109", "lost", adapted),
    "an encoder that runs twice": Structure(Pairs, "SL101", "saved whole", Pairs, of_rows=True, trainer=SavesInside),
    "an adapted encoder that runs twice": Structure(
        lambda: Pairs(adapter=True),
        "SL101",
        "saved whole",
        lambda: PairsWithInputs(adapter=True),
        of_rows=True,
        trainer=SavesInside,
    ),
    "a head for each task": Structure(
        lambda: tasks(3), "SL121", "untrained", lambda: tasks(2), of_rows=True, of_tasks=True
    ),
    "a loose norm": Structure(lambda: _loose(adapted()), "SL103", "lost", lambda: adapted(modules_to_save=["norm"])),
}


def _loose(model: Any) -> Any:
    model.get_base_model().model.norm.requires_grad_(True)
    return model


def trainer_of(
    model: Any, folder: Path, structure: Structure, *, checkpointing: bool = True, right: bool = False
) -> Trainer:
    rows = [{"input_ids": [3 + i, 4 + i, 5 + i, 6 + i], "attention_mask": [1] * 4} for i in range(STEPS * 2)]
    data: Any = [{**row, "labels": i % 2 if structure.of_rows else row["input_ids"]} for i, row in enumerate(rows)]
    data = [{**row, "task": i % 2} if structure.of_tasks else row for i, row in enumerate(data)]
    kind = structure.trainer if right else Trainer
    options: dict[str, Any] = {"report_to": [], "use_cpu": True, "disable_tqdm": True, "seed": 0, "max_steps": STEPS}
    options |= {"per_device_train_batch_size": 2, "save_steps": STEPS, "learning_rate": 1e-2}
    options |= {"gradient_checkpointing": checkpointing}
    return kind(model=model, args=TrainingArguments(output_dir=str(folder), **options), train_dataset=data)


def happens(structure: Structure, make: Callable[[], Any], folder: Path) -> set[str]:
    """Train a structure and return the troubles that were seen."""
    troubles: set[str] = set()
    right = folder.name == "right"
    model = make()
    wanted = {name for name, p in model.named_parameters() if p.requires_grad or name.endswith("score.weight")}
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    watched = [m for m in model.modules() if "lora_dropout" in dict(m.named_children())]
    seen = [m.register_forward_pre_hook(lambda m, _: None if m.training else troubles.add("in eval")) for m in watched]
    for checkpointing in (True, False):
        trainer = trainer_of(model, folder / str(checkpointing), structure, checkpointing=checkpointing, right=right)
        try:
            trainer.train()
        except (AttributeError, ValueError):  # without the switch, or without the arguments of the forward
            troubles.add("refused")
            continue
        except RuntimeError as error:
            troubles.add("unsaved" if "share memory" in str(error) else str(error))
        break
    for handle in seen:
        handle.remove()
    after = dict(model.named_parameters())
    troubles |= {"untrained"} if any(torch.equal(before[name], after[name]) for name in wanted) else set()
    saved = folder / str(checkpointing) / f"checkpoint-{STEPS}"
    if "unsaved" not in troubles and "refused" not in troubles:
        has_adapter = any("lora_" in name for name in before)
        own = "adapter_model.safetensors" if has_adapter else "config.json"
        if not (saved / own).exists():
            troubles.add("saved whole")
        troubles |= _lost(make(), after, wanted, saved)
    return troubles


def _lost(model: Any, after: dict[str, Any], wanted: set[str], saved: Path) -> set[str]:
    """Load a checkpoint into a new model, as people do, and return whether something trained is not there."""
    if isinstance(model, Pairs) and list(saved.glob("*config.json")):
        load_inside(model.model, saved)
    elif (saved / "adapter_model.safetensors").exists():
        tensors = load_file(saved / "adapter_model.safetensors")
        if isinstance(model, PeftModel) and isinstance(model.base_model.model, PeftModel):
            model = adapted()  # the new base has no adapter, and gets one
            wanted = {name for name in wanted if name in dict(model.named_parameters())} or {"none"}
            set_peft_model_state_dict(model, tensors)
            return {"lost"} if wanted == {"none"} else set()
        set_peft_model_state_dict(model, tensors)
        for more in saved.glob("*/adapter_model.safetensors"):  # of adapters with other names
            set_peft_model_state_dict(model, load_file(more), more.parent.name)
    else:
        model.load_state_dict(load_file(saved / "model.safetensors"))
    loaded = dict(model.named_parameters())
    return {"lost"} if any(not torch.equal(loaded[name], after[name]) for name in wanted) else set()


def audited(structure: Structure, model: Any, folder: Path) -> dict[str, str]:
    """Return the severity of each code, of an audit as it is made before the training."""
    trainer = trainer_of(model, folder, structure, right=folder.name == "right")
    options: dict[str, Any] = {"inputs": {"labels": torch.tensor([0, 1])}} if structure.of_rows else {}
    report = audit_model(model, Workload.train(2, 8), trainer, forecast=False, round_trip=True, **options)
    return {finding.code: finding.severity for finding in report.findings}


@pytest.mark.parametrize("name", STRUCTURES)
def test_a_mistake_is_found_before_the_training_and_nothing_after_the_fix(name: str, tmp_path: Path) -> None:
    structure = STRUCTURES[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert structure.code in audited(structure, structure.wrong(), tmp_path / "wrong")
        assert audited(structure, structure.right(), tmp_path / "right") == {}


@pytest.mark.slow
@pytest.mark.parametrize("name", STRUCTURES)
def test_what_happens_in_training_is_what_was_found(name: str, tmp_path: Path) -> None:
    structure = STRUCTURES[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert happens(structure, structure.wrong, tmp_path / "wrong") == set(structure.happens.split(", "))
        assert happens(structure, structure.right, tmp_path / "right") == set()
