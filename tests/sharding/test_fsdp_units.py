"""Which modules are gathered together: the model's hints, its lists of layers, ties, dtypes and the caller's wishes."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from engines import needs
from fsdp_cases import NOTHING, gpt2, llama, on_meta, reference, whole
from rank_server import RankServer
from tiny_models import skip_unless_buildable, tiny_config
from torch import nn
from torch.distributed.fsdp.wrap import (
    ModuleWrapPolicy,
    _or_policy,
    lambda_auto_wrap_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
)

from safe_loading import ArgumentError, meta_model, wrap_fsdp_meta_safe
from safe_loading._sharding.fsdp_units import plan_units
from safe_loading._sharding.parameters import ignored_parameters


def names(model: nn.Module, wrap: object = None, **options: object) -> list[str]:
    units = plan_units(model, wrap, **options)  # type: ignore[arg-type]
    every = [name for unit in units for name in unit.parameters]
    assert len(every) == len(set(every)) == len(list(model.parameters()))
    return [unit.name for unit in units]


class Block(nn.Module):
    def __init__(self, size: int = 4) -> None:
        super().__init__()
        self.inner = nn.Linear(size, size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.heads = nn.ModuleList(nn.Linear(1, 1, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def test_the_layers_the_embeddings_the_head_with_its_norm_and_the_root() -> None:
    assert names(on_meta(llama))[-3:] == ["model.embed_tokens", "model.norm + lm_head", "(root)"]
    assert names(on_meta(llama), flat=True)[-2:] == ["model.layers.2", "(root)"]


@pytest.mark.parametrize("flat", [False, True])
def test_embeddings_that_a_model_around_them_calls_by_itself_are_in_no_unit_of_a_module_between(flat: bool) -> None:
    """As ModernVBert calls those of its text model, past the module that the text model's hints name."""
    skip_unless_buildable("ModernVBertModel")
    with torch.device("meta"):
        around = transformers.ModernVBertModel(tiny_config("ModernVBertModel"))
        alone = transformers.ModernBertModel(tiny_config("ModernBertModel"))
    assert "text_model.embeddings" not in names(around, flat=flat)
    assert "vision_model.embeddings" in names(around, flat=flat)
    assert "embeddings" in names(alone, flat=flat)


def test_policies_of_torch_for_layers_are_taken_and_others_refused() -> None:
    """As published calls of FullyShardedDataParallel have them."""
    layer = type(on_meta(llama).model.layers[0])
    expected = names(on_meta(llama), {layer})
    by_classes = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={layer})
    assert names(on_meta(llama), by_classes) == names(on_meta(llama), ModuleWrapPolicy({layer})) == expected
    norms = functools.partial(
        lambda_auto_wrap_policy, lambda_fn=lambda module: module.__class__.__name__ == "LlamaRMSNorm"
    )
    assert names(on_meta(llama), norms) == names(on_meta(llama), "LlamaRMSNorm")
    beside = functools.partial(
        transformer_auto_wrap_policy, transformer_layer_cls=(layer, Custom)
    )  # no Custom is there
    either = functools.partial(_or_policy, policies=[norms, beside])  # as peft's own policy is
    assert names(on_meta(llama), either) == names(on_meta(llama), [layer, "LlamaRMSNorm"])
    by_size = functools.partial(size_based_auto_wrap_policy, min_num_params=100)
    one_by_size = functools.partial(_or_policy, policies=[norms, by_size])
    for policy in (by_size, one_by_size, size_based_auto_wrap_policy, lambda module, recurse, nonwrapped_numel: True):
        with pytest.raises(ArgumentError, match=r"pass classes, names or patterns of modules, or fn\(module\)"):
            names(on_meta(llama), policy)


def test_embeddings_with_an_adapter_are_one_unit_with_it() -> None:
    """peft's layer may compute with the weight inside (DoRA, trained tokens), so the unit is around both."""
    from peft import LoraConfig, get_peft_model

    for options in ({"target_modules": ["embed_tokens"]}, {"modules_to_save": ["embed_tokens"], "r": 4}):
        model: Any = get_peft_model(reference(llama), LoraConfig(task_type="CAUSAL_LM", **options))  # type: ignore[arg-type]
        unit = next(unit for unit in plan_units(model) if unit.name.endswith("embed_tokens"))
        assert model.get_submodule(unit.modules[0]) is model.get_input_embeddings()
        assert len(unit.parameters) == len(list(model.get_input_embeddings().parameters())) > 1


def test_embeddings_that_the_head_uses_too_stay_with_the_root() -> None:
    tied = on_meta(llama)
    tied.lm_head.weight = tied.model.embed_tokens.weight
    assert names(tied)[-2:] == ["model.layers.2", "(root)"]
    assert "model.embed_tokens" not in names(on_meta(llama), flat=True)


def test_embeddings_of_every_layer_are_a_unit_where_the_head_is_tied() -> None:
    """Those of Gemma 3n are four times its input embeddings."""
    units = names(meta_model(tiny_config("Gemma3nForCausalLM")))
    assert "model.embed_tokens_per_layer" in units
    assert "model.embed_tokens" not in units


@pytest.mark.parametrize(
    ("patterns", "last"), [(["lm_head"], ["(root)"]), (["model.norm"], ["model.norm + lm_head", "(root)"])]
)
def test_an_ignored_head_or_norm_is_in_no_unit(patterns: list[str], last: list[str]) -> None:
    model = on_meta(llama)
    ignored = ignored_parameters(model, patterns)
    units = plan_units(model, ignored=ignored)
    assert [unit.name for unit in units][4:] == last
    assert sum(len(unit.parameters) for unit in units) == len(list(model.parameters())) - len(ignored)


def test_a_tied_head_stays_with_the_root_and_the_root_is_never_alone() -> None:
    assert names(on_meta(gpt2)) == ["transformer.h.0", "transformer.h.1", "(root)"]
    model = on_meta(gpt2)
    for module in model.modules():
        if hasattr(module, "_no_split_modules"):
            module._no_split_modules = {"NoSuchBlock"}
    assert names(model) == ["transformer.h.0", "transformer.h.1", "(root)"]


def test_the_largest_list_of_equal_modules_and_no_small_ones() -> None:
    assert names(Custom()) == ["blocks.0", "blocks.1", "blocks.2", "(root)"]
    assert names(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))) == ["0", "2", "(root)"]


class Reads(nn.Module):
    """Computes with weights of leaves, past their forward."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.out = nn.Embedding(5, 4), nn.LayerNorm(4), nn.Linear(4, 4)
        self.experts = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(3))
        self.block = Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed = torch.stack([each.weight for each in self.experts]).sum(0)
        x = self.block(self.embed(x)) @ mixed * self.norm.weight + self.out.weight.mean()
        return nn.functional.linear(x, self.embed.weight)


def test_bare_leaves_stay_with_the_root_because_a_parent_may_read_their_weights(one_rank: None) -> None:
    assert names(Reads()) == ["block", "(root)"]
    x, model = torch.arange(5), Reads()
    wanted = model(x)
    wanted.sum().backward()
    sharded: Any = wrap_fsdp_meta_safe(copy.deepcopy(model))
    found = sharded(x)
    found.sum().backward()
    assert torch.equal(found, wanted)
    for own, other in zip(sharded.parameters(), model.parameters(), strict=True):
        assert own.grad is None if other.grad is None else torch.equal(whole(own.grad), other.grad)


def test_what_a_sequential_calls_is_a_unit_and_a_layer_that_peft_wraps_is_as_bare_as_its_own() -> None:
    from peft import LoraConfig, get_peft_model

    assert names(nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))) == ["0", "1", "(root)"]
    adapted = get_peft_model(Reads(), LoraConfig(r=2, target_modules=["out", "experts.0"]))  # type: ignore[arg-type]
    assert [name.rpartition(".")[2] for name in names(adapted)] == ["block", "(root)"]


def test_wrappers_count_as_the_layers_that_they_hold() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = on_meta(llama)
    for number, layer in enumerate(model.model.layers):
        model.model.layers[number] = checkpoint_wrapper(layer)
    model.model.layers[0] = torch.compile(model.model.layers[0])
    units = plan_units(model)
    assert [unit.name for unit in units][:3] == ["model.layers.0", "model.layers.1", "model.layers.2"]
    assert units[0].modules == ("model.layers.0",)
    assert "model.layers.0.mlp.up_proj.weight" in units[0].parameters


def test_layers_that_share_a_parameter_become_one_unit_and_what_the_root_shares_goes_there() -> None:
    model = Custom()
    model.blocks[2].inner.weight = model.blocks[0].inner.weight
    assert names(model) == ["blocks.1", "blocks.0 + blocks.2", "(root)"]
    assert names(model, flat=True) == ["blocks.1", "(root)"]
    model = Custom()
    model.extra = nn.Linear(4, 4)
    model.extra.weight = model.blocks[1].inner.weight
    assert names(model) == ["blocks.0", "blocks.2", "(root)"]


def test_another_dtype_gets_a_unit_where_torch_asks_for_one() -> None:
    model = Custom()
    model.blocks[0].extra = nn.Linear(2, 2).to(torch.bfloat16)
    assert "blocks.0.extra" in names(model)
    model.blocks[0].extra.requires_grad_(False)
    assert "blocks.0.extra" not in names(model)
    assert "blocks.0.extra" in names(model, flat=True)
    model.scale = nn.Parameter(torch.ones(1, dtype=torch.float64))
    with pytest.raises(ArgumentError, match=r"scale is torch\.float64"):
        plan_units(model)


class Gate(nn.Module):
    """Reads the weight of a layer past its forward, as routers and causal convolutions do."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + nn.functional.linear(x.float(), self.scores.weight).to(x.dtype)


class Kept(nn.Module):
    """Has parameters that stay in float32 beside layers in 16 bits."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.gate = nn.Linear(4, 4), Gate()
        self.sinks = nn.Parameter(torch.randn(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.gate(self.inner(x) * self.sinks.to(x.dtype))


class KeptLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.gate, self.out = Kept(), Gate(), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.gate(x + self.attention(x)))


class KeptModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.body = nn.Sequential(*(KeptLayer() for _ in range(2)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(self.embed(x))


def kept_model() -> KeptModel:
    torch.manual_seed(0)
    model = KeptModel().bfloat16()
    for name, parameter in model.named_parameters():
        if "sinks" in name or "scores.weight" in name:
            parameter.data = parameter.data.float()
    return model


def test_a_parameter_of_another_dtype_is_a_unit_of_the_module_that_computes_with_it(one_rank: None) -> None:
    """The others of that module stay in the unit around, so that no layer becomes a unit of its own."""
    units = {unit.name: unit.parameters for unit in plan_units(kept_model())}
    for number in range(2):
        assert units[f"body.{number}.attention"] == (f"body.{number}.attention.sinks",)
        assert units[f"body.{number}.gate"] == (f"body.{number}.gate.scores.weight",)
        assert units[f"body.{number}.attention.gate"] == (f"body.{number}.attention.gate.scores.weight",)
        assert len(units[f"body.{number}"]) == 6
    with pytest.raises(ArgumentError, match="pass version=2, or auto_wrap_policy="):
        wrap_fsdp_meta_safe(kept_model(), version=1)
    one, sharded = kept_model(), wrap_fsdp_meta_safe(kept_model())
    for _ in range(2):
        for model in (one, sharded):
            model(torch.arange(5)).float().square().sum().backward()
    for own, other in zip(sharded.parameters(), one.parameters(), strict=True):
        assert own.dtype == other.dtype
        assert torch.equal(whole(own), other)
        assert own.grad is None if other.grad is None else torch.equal(whole(own.grad), other.grad)


@pytest.mark.parametrize("wider", ["model.norm", "lm_head"])
def test_a_last_norm_of_another_dtype_than_the_head_is_a_unit_of_its_own(one_rank: None, wider: str) -> None:
    """As k-bit preparation casts the norms, and TRL the head."""
    model = reference(llama, torch.bfloat16)
    model.get_submodule(wider).float()
    assert names(model)[-3:] == ["model.embed_tokens", "model.norm", "(root)"]
    wanted = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    sharded: Any = wrap_fsdp_meta_safe(model)
    assert all(torch.equal(whole(parameter), wanted[name]) for name, parameter in sharded.named_parameters())


def test_the_caller_decides_by_class_name_pattern_or_predicate() -> None:
    assert names(Custom(), Block) == ["blocks.0", "blocks.1", "blocks.2", "(root)"]
    assert names(Custom(), "Block") == names(Custom(), ["blocks.*"])[:0] + names(Custom(), {Block})
    assert names(Custom(), ["blocks.1", "embed"]) == ["blocks.1", "embed", "(root)"]
    assert names(Custom(), lambda module: isinstance(module, nn.Embedding)) == ["embed", "(root)"]
    with pytest.raises(ArgumentError, match="NoSuch"):
        plan_units(Custom(), ["NoSuch"])
    with pytest.raises(ArgumentError, match="no forward"):
        plan_units(Custom(), ["blocks"])
    with pytest.raises(ArgumentError, match="auto_wrap_policy=3"):
        plan_units(Custom(), 3)  # type: ignore[arg-type]


def test_a_module_without_parameters_may_be_ignored() -> None:
    """As a pattern of accelerate's ignored_modules finds it (the norms of Llama 4 in its attention)."""
    model = Custom()
    bare = model.bare = nn.Identity()  # type: ignore[assignment]  # an attribute that the class does not name
    assert ignored_parameters(model, [bare, model.embed]) == {model.embed.weight}
    assert ignored_parameters(model, bare) == set()
    with pytest.raises(ArgumentError, match="a Linear: matches no parameter of the model"):
        ignored_parameters(model, nn.Linear(2, 2))


KEPT = """
import pathlib, sys, warnings
import torch, torch.distributed as dist
warnings.simplefilter("ignore")
import transformers
from transformers import logging as transformers_logging
transformers_logging.set_verbosity_error()
transformers_logging.disable_progress_bar()
from fsdp_cases import compared
from fsdp_sweep import batch_of, bound, step
from safe_loading import meta_model, wrap_fsdp_meta_safe
from tiny_models import saved
dist.init_process_group("gloo")
for name in sys.argv[2].split(","):
    kind, folder = getattr(transformers, name), pathlib.Path(sys.argv[1], name)
    if dist.get_rank() == 0:
        saved(name, folder)
    dist.barrier()
    options = {"dtype": getattr(torch, sys.argv[3]), "attn_implementation": "eager"}
    one = kind.from_pretrained(folder, **options).train()
    for parameter in one.parameters():
        parameter.data = parameter.data.clone()  # from where it lies in the file, with another alignment
    model = wrap_fsdp_meta_safe(meta_model(folder, kind, **options).train(), folder)
    batch = batch_of(one)
    logits = step(model, batch)
    bound(one, [unit.name for unit in model.fsdp_report.units])
    report(**{name: [
        compared(one, model, step(one, batch), logits),
        sum(parameter.dtype == torch.float32 for parameter in model.parameters()),
    ]})
dist.barrier()
dist.destroy_process_group()
"""


@needs("transformers", "5.23")
def test_classes_that_keep_parameters_in_float32_train_in_bfloat16(rank_server: RankServer, tmp_path: Path) -> None:
    """Sinks of heads, gates of experts, and convolutions whose weight the module around them reads."""
    classes = ["FlintForCausalLM", "InklingForCausalLM", "BailingHybridForCausalLM", "Inkling2ForCausalLM"]
    for facts in rank_server.run(KEPT, 2, args=[tmp_path, ",".join(classes), "bfloat16"]).found:
        for name in classes:
            differences, kept = facts[name]
            assert differences == NOTHING
            assert kept


@needs("transformers", "5.23")
def test_tied_embeddings_of_another_dtype_than_the_root_are_a_unit_with_the_head(
    rank_server: RankServer, tmp_path: Path
) -> None:
    """Blip2 keeps its Q-Former in float32 beside a language model in float16.

    On one rank: several halve the gradients before they add them, and these are too small for float16 to be halved.
    """
    name = "Blip2ForConditionalGeneration"
    (facts,) = rank_server.run(KEPT, 1, args=[tmp_path, name, "float16"]).found
    differences, kept = facts[name]
    assert differences == NOTHING
    assert kept


def test_tied_layers_that_peft_wraps_or_that_have_more_are_no_unit_of_their_own() -> None:
    from peft import LoraConfig, get_peft_model

    def tied() -> Any:
        model: Any = reference(lambda: llama(tie_word_embeddings=True), torch.bfloat16)
        for each in (model.model.norm, *model.model.layers):
            each.float()
        model.extra = nn.Linear(200, 200)  # so that most of the root is in float32
        return model

    assert names(tied())[-2:] == ["model.embed_tokens + lm_head", "(root)"]
    with pytest.raises(ArgumentError, match=r"model\.embed_tokens\.weight is torch\.bfloat16"):
        plan_units(tied(), flat=True)
    adapted, mixed = get_peft_model(tied(), LoraConfig(target_modules=["embed_tokens"], bias="all")), tied()
    adapted.requires_grad_(True)
    mixed.lm_head.bias = nn.Parameter(torch.zeros(251))
    for model in (adapted, mixed):
        with pytest.raises(ArgumentError, match=r"embed_tokens\..*weight is torch\.bfloat16"):
            plan_units(model)


def test_a_layer_that_two_modules_share_is_one_unit_of_its_dtype(one_rank: None) -> None:
    """The model has the layer under two names, and a walk of its modules meets it once."""
    model = nn.Sequential(Block(8), Block(8), nn.Linear(8, 64))
    model[1].inner = model[0].inner.bfloat16()
    assert names(model, []) == names(model, [], flat=True) == ["0.inner", "(root)"]
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    wrapped = wrap_fsdp_meta_safe(model, auto_wrap_policy=[])
    assert wrapped[1].inner is wrapped[0].inner
    assert all(torch.equal(whole(tensor), expected[name]) for name, tensor in wrapped.state_dict().items())
