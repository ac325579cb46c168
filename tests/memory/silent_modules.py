"""Troubles of people's own modules: parts that torch does not see, that stay frozen, or that no checkpoint has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from silent_scripts import HIDDEN, Script, adamw, adapted, base, trained, trouble
from torch import nn
from torch.nn import functional as F  # noqa: N812  # as everybody calls it
from transformers import LlamaForCausalLM, LlamaModel, LlamaPreTrainedModel
from transformers.modeling_outputs import SequenceClassifierOutput


class Heads(nn.Module):
    """Heads for the tokens to come, as Medusa has them."""

    def __init__(self, *, registered: bool) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Embedding(101, HIDDEN), nn.Linear(HIDDEN, HIDDEN), nn.ReLU())
        heads = [nn.Linear(HIDDEN, 3) for _ in range(2)]
        self.heads: Any = nn.ModuleList(heads) if registered else heads

    def forward(self, input_ids: Any, attention_mask: Any = None, labels: Any = None) -> Any:
        state = self.body(input_ids).mean(1)
        losses = [F.cross_entropy(head(state), labels[:, index] % 3) for index, head in enumerate(self.heads)]
        return SequenceClassifierOutput(loss=sum(losses))  # type: ignore[arg-type]  # a tensor


@trouble("LianpoWang/SLIIF#13", "SL146", "heads untrained, lost")
def heads_in_a_list(right: bool, folder: Path) -> Script:
    def make(_: Any = None) -> Heads:
        return Heads(registered=right)

    def load(at: Path) -> Any:
        model = make()
        model.load_state_dict(torch.load(at / "model.pt"))
        return model

    model = make()
    before = [head.weight.detach().clone() for head in model.heads]

    def still() -> set[str]:
        same = any(torch.equal(first, head.weight) for first, head in zip(before, model.heads, strict=True))
        return {"heads untrained"} if same else set()

    save = lambda at: torch.save(model.state_dict(), at / "model.pt")  # noqa: E731
    return Script(model, trains=("body",), save=save, again=load, also=still)


class Retriever(LlamaPreTrainedModel):
    """A model that projects each token, as ColPali does."""

    accepts_loss_kwargs = False

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model = LlamaModel(config)
        self.custom_text_proj = nn.Linear(config.hidden_size, 16)
        self.post_init()

    def forward(self, input_ids: Any = None, attention_mask: Any = None, labels: Any = None, **_: Any) -> Any:
        each = self.custom_text_proj(self.model(input_ids=input_ids, attention_mask=attention_mask)[0])
        scores = torch.einsum("bnd,csd->bcns", each, each.roll(1, 0)).max(3).values.sum(2)
        return SequenceClassifierOutput(loss=F.cross_entropy(scores, torch.arange(len(each), device=each.device)))


@trouble("illuin-tech/colpali#300", "SL135", "untrained")
def a_projection_of_ones_own_that_the_adapter_freezes(right: bool, folder: Path) -> Script:
    kept = {"modules_to_save": ["custom_text_proj"]} if right else {}
    model = adapted(base(Retriever), task_type="FEATURE_EXTRACTION", **kept)
    trains = ("lora_", "proj.modules_to_save" if right else "custom_text_proj")
    return Script(model, trains=trains, again=lambda at: PeftModel.from_pretrained(base(Retriever), at))


@trouble("MakazhanAlpamys/Soup#335", "SL106", "lost")
def layers_that_are_compiled_one_by_one(right: bool, folder: Path) -> Script:
    model = adapted()
    layers = model.get_base_model().model.layers
    for index, layer in enumerate(layers):
        if right:
            layer.compile(backend="eager")
        else:
            layers[index] = torch.compile(layer, backend="eager")
    return Script(model)


class Centers(nn.Module):
    """A loss with weights, as ArcFace has them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(7, 101))

    def forward(self, out: Any) -> Any:
        return F.linear(F.normalize(out), F.normalize(self.weight))


@trouble("4uiiurz1/pytorch-adacos#10", "SL118", "centers untrained")
def a_loss_with_weights_that_no_optimizer_has(right: bool, folder: Path) -> Script:
    model, criterion = base(), Centers()
    before = criterion.weight.detach().clone()
    optimizer = adamw([*trained(model), *(criterion.parameters() if right else ())])

    def step(_: int) -> None:
        F.cross_entropy(criterion(torch.randn(2, 101)), torch.tensor([0, 1])).backward()
        optimizer.step()

    def still() -> set[str]:
        return {"centers untrained"} if torch.equal(before, criterion.weight) else set()

    settings: dict[str, Any] = {"trainer": {"criterion": criterion}, "after_a_step": step, "also": still}
    return Script(model, trains=("q_proj",), optimizer=optimizer, **settings)


class Normalized(nn.Module):
    """A backbone with running statistics, and a head."""

    def __init__(self, *, held: bool) -> None:
        super().__init__()
        self.held = held
        self.backbone = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)).requires_grad_(requires_grad=False)
        self.head = nn.Linear(8, 3)

    def train(self, mode: bool = True) -> Any:
        super().train(mode)
        if self.held:
            self.backbone.eval()
        return self

    def forward(self, values: Any, labels: Any = None) -> Any:
        return SequenceClassifierOutput(loss=F.cross_entropy(self.head(self.backbone(values)), labels))


@trouble("pgniewko/gt-pyg#112", "SL145", "statistics moved")
def statistics_of_a_frozen_backbone(right: bool, folder: Path) -> Script:
    model = Normalized(held=right).train()
    statistics: Any = model.backbone[1]
    mean = statistics.running_mean.clone()

    def load(at: Path) -> Any:
        again = Normalized(held=right)
        again.load_state_dict(torch.load(at / "model.pt"))
        return again

    def moved() -> set[str]:
        return set() if torch.equal(mean, statistics.running_mean) else {"statistics moved"}

    inputs: dict[str, Any] = {"values": torch.randn(4, 8), "labels": torch.tensor([0, 1, 2, 0])}
    inputs |= {"input_ids": None, "attention_mask": None}
    save = lambda at: torch.save(model.state_dict(), at / "model.pt")  # noqa: E731
    return Script(model, trains=("head",), keeps=("backbone",), inputs=inputs, save=save, again=load, also=moved)


class Running(LlamaForCausalLM):
    """A model that divides by a running mean of what it has seen."""

    accepts_loss_kwargs = False
    saved = True

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.register_buffer("seen", torch.ones(()), persistent=self.saved)
        self.post_init()

    def forward(self, input_ids: Any = None, attention_mask: Any = None, labels: Any = None, **kwargs: Any) -> Any:
        out = super().forward(input_ids, attention_mask, labels=labels, **kwargs)
        if self.training:
            self.seen = 0.5 * self.seen + 0.5 * labels.float().mean()
        out.loss = out.loss / self.seen
        return out


class Forgotten(Running):
    """The same, with a buffer that no checkpoint has."""

    saved = False


@trouble("bayesiains/nflows#4", "SL145", "lost")
def a_running_mean_that_is_not_persistent(right: bool, folder: Path) -> Script:
    return Script(base(Running if right else Forgotten), trains=("q_proj",))


class Mean(nn.Module):
    """A running mean in a module of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.ones(()))

    def forward(self, values: Any) -> Any:
        if self.training:
            self.seen.mul_(0.5).add_(0.5 * values.float().mean())
        return self.seen.clone()


class Measured(LlamaForCausalLM):
    """A model that divides by it."""

    accepts_loss_kwargs = False

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.mean = Mean()
        self.post_init()

    def forward(self, input_ids: Any = None, attention_mask: Any = None, labels: Any = None, **kwargs: Any) -> Any:
        out = super().forward(input_ids, attention_mask, labels=labels, **kwargs)
        out.loss = out.loss / self.mean(labels)
        return out


@trouble("unlisted: an adapter's file has no buffer of the base", "SL145", "lost")
def a_running_mean_beside_an_adapter(right: bool, folder: Path) -> Script:
    model = adapted(base(Measured), modules_to_save=["mean"] if right else None)
    return Script(model, again=lambda at: PeftModel.from_pretrained(base(Measured), at))


class Soft(LlamaForCausalLM):
    """A model with a vector of its own."""

    accepts_loss_kwargs = False

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.soft = nn.Parameter(torch.zeros(config.hidden_size))
        self.post_init()

    def forward(self, input_ids: Any = None, attention_mask: Any = None, labels: Any = None) -> Any:
        embedded = self.model.embed_tokens(input_ids) + self.soft
        return super().forward(inputs_embeds=embedded, attention_mask=attention_mask, labels=labels)


@trouble("huggingface/transformers#42418", "SL147", "not a number, lost")
def a_parameter_that_nothing_has_filled(right: bool, folder: Path) -> Script:
    model = base(Soft)
    with torch.no_grad():
        model.soft.fill_(0.0 if right else float("nan"))  # as memory may be that torch.empty() gives
    return Script(model, trains=("soft",), also=lambda: {"not a number"} if model.soft.isnan().any() else set())
