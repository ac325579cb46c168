"""The advice of errors about sharding, taken on one rank: what a message names is done, and every bit is there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from fsdp_cases import NOTHING, differences, inputs, llama, reference, save
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardingStrategy,
)
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel

from safe_loading import (
    SafeLoadingError,
    assert_optimizer_sharded,
    load_peft_on_rank,
    meta_model,
    wrap_fsdp_meta_safe,
)


def any_of(wrong: object) -> Any:
    """Return what a type checker would refuse."""
    return wrong


def on_meta(folder: Path, **options: Any) -> Any:
    return meta_model(folder, **options)


def wrapped(folder: Path, **options: Any) -> Any:
    return wrap_fsdp_meta_safe(on_meta(folder), folder, **options)


def with_buffer(model: Any, value: torch.Tensor) -> Any:
    model.register_buffer("scale", value)
    return model


def with_parameter(model: Any, value: torch.Tensor) -> Any:
    model.value = nn.Parameter(value)
    return model


def with_scale(model: Any, dtype: torch.dtype) -> Any:
    with_parameter(model.model.layers[0], torch.ones(1, dtype=dtype))
    return model


def with_head(model: Any) -> Any:
    with torch.device("meta"):
        model.value = nn.Linear(32, 3)
    return model


def state_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


def on_mesh(value: torch.Tensor) -> DTensor:
    return distribute_tensor(value, init_device_mesh("cpu", (1,)), [Replicate()])


def zero(module: nn.Module) -> None:
    nn.init.zeros_(any_of(module).weight)
    nn.init.zeros_(any_of(module).bias)


def adapted(folder: Path, **options: Any) -> Any:
    """A base in bfloat16 with a LoRA, which peft keeps in float32."""
    base = LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    return get_peft_model(base, LoraConfig(r=2, **{"target_modules": ["q_proj", "v_proj"], **options}))


def fetched_ahead(folder: Path) -> Any:
    """A step whose units are gathered as FSDP1 does when its constructor is told."""
    model = wrapped(folder, version=1)
    for unit in FullyShardedDataParallel.fsdp_modules(model):
        unit.forward_prefetch = True
    ids = torch.arange(3, 9)[None]
    for _ in range(2):  # the first one notes the order
        model(input_ids=ids, labels=ids).loss.backward()
    return model


class Case(NamedTuple):
    """A call that is refused, the advice, and the calls that take it; each gets the folder of a model."""

    refused: Callable[[Path], Any]
    advice: str
    taken: tuple[Callable[[Path], Any], ...]


CASES: dict[str, Case] = {
    "no module": Case(
        lambda f: wrap_fsdp_meta_safe(any_of(f), f), r"pass a torch\.nn\.Module; meta_model makes one", (wrapped,)
    ),
    "no source": Case(
        lambda f: wrap_fsdp_meta_safe(on_meta(f), any_of(3)),
        "pass a folder, a hub id, a state dict or None",
        (wrapped, lambda f: wrap_fsdp_meta_safe(on_meta(f), state_of(f))),
    ),
    "another check": Case(
        lambda f: wrapped(f, verify="all"),
        "pass 'off', 'structure' or 'bytes'",
        tuple(lambda f, verify=verify: wrapped(f, verify=verify) for verify in ("off", "structure", "bytes")),
    ),
    "no function": Case(
        lambda f: wrapped(f, init_new=3),
        "pass a function that initializes a module",
        (lambda f: wrapped(f, init_new=zero),),
    ),
    "DoRA over a base of another dtype under FSDP1": Case(
        lambda f: wrap_fsdp_meta_safe(adapted(f, use_dora=True), version=1),
        r"weights of DoRA past their forward, .* units of their own\. Use version=2 \(Spread\.fsdp2\)\.",
        (
            lambda f: wrap_fsdp_meta_safe(adapted(f, use_dora=True)),
            lambda f: wrap_fsdp_meta_safe(adapted(f), version=1),
        ),
    ),
    "LoRA of parameters under FSDP1": Case(
        lambda f: wrap_fsdp_meta_safe(adapted(f, target_modules=[], target_parameters=["q_proj.weight"]), version=1),
        r"target_parameters replaces a parameter .*\. Use version=2 \(Spread\.fsdp2\)\.",
        (lambda f: wrap_fsdp_meta_safe(adapted(f, target_modules=[], target_parameters=["q_proj.weight"])),),
    ),
    "freed or not": Case(
        lambda f: wrapped(f, reshard_after_forward="yes"),
        "pass a bool, a number of ranks or None",
        tuple(lambda f, free=free: wrapped(f, reshard_after_forward=free) for free in (True, False, None)),
    ),
    "freed to more ranks than there are": Case(
        lambda f: wrapped(f, reshard_after_forward=2),
        "a number of ranks or None. A number must divide 1, ",
        tuple(lambda f, free=free: wrapped(f, reshard_after_forward=free) for free in (1, True, None)),
    ),
    "no mesh": Case(
        lambda f: wrapped(f, mesh="all"),
        r"pass a DeviceMesh, sizes as \(replicas, shards\), or None",
        (
            lambda f: wrapped(f, mesh=init_device_mesh("cpu", (1,), mesh_dim_names=("fsdp",))),
            lambda f: wrapped(f, mesh=(1, 1)),
        ),
    ),
    "another mesh": Case(
        lambda f: wrapped(f, mesh=(3,)),
        r"pass \(shards,\) or \(replicas, shards\)",
        (lambda f: wrapped(f, mesh=(1,)), lambda f: wrapped(f, mesh=(1, 1))),
    ),
    "a filling by FSDP1": Case(
        lambda f: wrapped(f, param_init_fn=print),
        r"param_init_fn=: leave it out: .* use init_new=",
        (wrapped, lambda f: wrapped(f, init_new=lambda module: None)),
    ),
    "a strategy of FSDP1": Case(
        lambda f: wrapped(f, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP),
        r"sharding_strategy=: use reshard_after_forward=False for SHARD_GRAD_OP, and mesh=",
        (
            lambda f: wrapped(f, reshard_after_forward=False),
            lambda f: wrapped(f, mesh=(1, 1)),
            lambda f: wrapped(f, sharding_strategy=ShardingStrategy.FULL_SHARD, sync_module_states=True),
        ),
    ),
    "a policy of FSDP1": Case(
        lambda f: wrapped(f, mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)),
        r"pass MixedPrecisionPolicy\(param_dtype=torch\.bfloat16, reduce_dtype=None\), which .*, or version=1\.",
        (
            lambda f: wrapped(f, mixed_precision=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=None)),
            lambda f: wrapped(f, version=1, mixed_precision=MixedPrecision(param_dtype=torch.bfloat16)),
        ),
    ),
    "units of FSDP1 that are fetched ahead": Case(
        lambda f: wrapped(f, version=1, forward_prefetch=True),
        r"forward_prefetch=: set it on each unit of FSDP1 after the wrap, .*FullyShardedDataParallel\.fsdp_modules",
        (
            fetched_ahead,
            lambda f: wrapped(
                f,
                version=1,
                forward_prefetch=False,
                backward_prefetch=BackwardPrefetch.BACKWARD_PRE,
                limit_all_gathers=True,
            ),
        ),
    ),
    "a group of FSDP1": Case(
        lambda f: wrapped(f, process_group="default"),
        r"process_group=: use mesh=",
        (lambda f: wrapped(f, mesh=(1,)),),
    ),
    "offload of FSDP2": Case(
        lambda f: wrapped(f, offload_policy="yes"),
        r"pass a bool or an OffloadPolicy of torch\.distributed\.fsdp",
        (lambda f: wrapped(f, offload_policy=True), lambda f: wrapped(f, offload_policy=OffloadPolicy())),
    ),
    "offload of FSDP1": Case(
        lambda f: wrapped(f, offload_policy="yes", version=1),
        r"pass a bool or a CPUOffload of torch\.distributed\.fsdp",
        (
            lambda f: wrapped(f, offload_policy=True, version=1),
            lambda f: wrapped(f, offload_policy=CPUOffload(offload_params=False), version=1),
        ),
    ),
    "units of a number": Case(
        lambda f: wrapped(f, auto_wrap_policy=3),
        r"pass classes, names or patterns of modules, or fn\(module\) -> bool",
        (
            lambda f: wrapped(f, auto_wrap_policy="LlamaDecoderLayer"),
            lambda f: wrapped(f, auto_wrap_policy="model.layers.*.mlp"),
            lambda f: wrapped(f, auto_wrap_policy=lambda module: isinstance(module, nn.Linear)),
        ),
    ),
    "a unit of a number": Case(
        lambda f: wrapped(f, auto_wrap_policy=[3]),
        "pass classes, or names of classes or modules",
        (lambda f: wrapped(f, auto_wrap_policy=[nn.Linear, "LlamaMLP", "lm_head"]),),
    ),
    "a list as a unit": Case(
        lambda f: wrapped(f, auto_wrap_policy=["model.layers"]),
        "which have no forward; name the modules in them",
        (lambda f: wrapped(f, auto_wrap_policy=["model.layers.0", "model.layers.1"]),),
    ),
    "ignored numbers": Case(
        lambda f: wrapped(f, ignored_params=any_of(3)),
        "pass modules, parameters, or names or patterns of them",
        (lambda f: wrapped(f, ignored_params=["model.norm"]), lambda f: wrapped(f, ignored_params=["*.o_proj.weight"])),
    ),
    "adapters as a list": Case(
        lambda f: wrapped(f, adapters=["a"]),
        r"pass a folder or hub id, or \{name: folder\} for several",
        (wrapped,),
    ),
    "rows without elements": Case(
        lambda f: wrap_fsdp_meta_safe(with_parameter(LlamaForCausalLM.from_pretrained(f), torch.ones(4, 0))),
        r"value \[4, 0\] has rows without elements: pass it in ignored_params=",
        (
            lambda f: wrap_fsdp_meta_safe(
                with_parameter(LlamaForCausalLM.from_pretrained(f), torch.ones(4, 0)), ignored_params=["value"]
            ),
        ),
    ),
    **{
        f"strides for FSDP{version}": Case(
            lambda f, version=version: wrap_fsdp_meta_safe(
                with_parameter(LlamaForCausalLM.from_pretrained(f), torch.ones(3, 4).T), version=version
            ),
            r"call \.contiguous\(\)",
            (
                lambda f, version=version: wrap_fsdp_meta_safe(
                    with_parameter(LlamaForCausalLM.from_pretrained(f), torch.ones(3, 4).T.contiguous()),
                    version=version,
                ),
            ),
        )
        for version in any_of((2, 1))
    },
    "a DTensor in a state dict": Case(
        lambda f: wrap_fsdp_meta_safe(on_meta(f), {name: on_mesh(value) for name, value in state_of(f).items()}),
        r"pass its full_tensor\(\)",
        (
            lambda f: wrap_fsdp_meta_safe(
                on_meta(f), {name: on_mesh(value).full_tensor() for name, value in state_of(f).items()}
            ),
        ),
    ),
    "another dtype": Case(
        lambda f: wrap_fsdp_meta_safe(with_scale(LlamaForCausalLM.from_pretrained(f), torch.float64)),
        "cast them, or pass auto_wrap_policy= with units of one dtype each",
        (lambda f: wrap_fsdp_meta_safe(with_scale(LlamaForCausalLM.from_pretrained(f), torch.float32)),),
    ),
    "a buffer on meta": Case(
        lambda f: wrap_fsdp_meta_safe(with_buffer(on_meta(f), torch.ones(3, device="meta")), f),
        "a buffer: set it on rank 0",
        (lambda f: wrap_fsdp_meta_safe(with_buffer(on_meta(f), torch.ones(3)), f),),
    ),
    "a new head": Case(
        lambda f: wrap_fsdp_meta_safe(with_head(on_meta(f)), f),
        r"pass init_new=fn\(module\) if they are new",
        (lambda f: wrap_fsdp_meta_safe(with_head(on_meta(f)), f, init_new=zero),),
    ),
    "a head that is left out": Case(
        lambda f: wrap_fsdp_meta_safe(on_meta(f, auto_class=LlamaModel), f),
        r"Build the model with it, or pass init_new=fn\(module\) where the model has a new one of its own, or none",
        (wrapped, lambda f: wrap_fsdp_meta_safe(on_meta(f, auto_class=LlamaModel), f, init_new=zero)),
    ),
}


def test_it_is_said_whose_values_win(one_rank: None, tiny_llama: Path) -> None:
    def scaled() -> Any:
        model: Any = LlamaForCausalLM.from_pretrained(tiny_llama)
        with torch.no_grad():
            model.model.norm.weight.mul_(2)
        return model

    with pytest.raises(SafeLoadingError, match="pass prefer='source', or a model on meta; to train the model's, pass"):
        wrap_fsdp_meta_safe(scaled(), tiny_llama)
    expected = state_of(tiny_llama)["model.norm.weight"]
    for model, factor in (
        (wrap_fsdp_meta_safe(scaled(), tiny_llama, prefer="source"), 1),
        (wrapped(tiny_llama), 1),
        (wrap_fsdp_meta_safe(scaled(), tiny_llama, prefer="model"), 2),
    ):
        assert torch.equal(any_of(model).model.norm.weight.full_tensor(), factor * expected)
    with pytest.raises(SafeLoadingError, match="pass 'source', 'model' or None"):
        wrapped(tiny_llama, prefer="folder")


@pytest.mark.parametrize("kind", CASES)
def test_a_model_is_sharded_once_the_advice_is_taken(one_rank: None, tiny_llama: Path, kind: str) -> None:
    case = CASES[kind]
    with pytest.raises(SafeLoadingError, match=case.advice):
        case.refused(tiny_llama)
    expected = state_of(tiny_llama)
    for take in case.taken:
        model = take(tiny_llama)
        assert model.fsdp_report.ok
        for name, parameter in model.named_parameters():
            bare = name.replace("_fsdp_wrapped_module.", "")
            bare = bare if bare in expected else f"model.{bare}"
            if bare in expected and isinstance(parameter, DTensor):  # FSDP1 shows flat parameters
                assert torch.equal(parameter.full_tensor(), expected[bare]), name


def test_a_process_group_is_made_first(tiny_llama: Path) -> None:
    with pytest.raises(SafeLoadingError, match=r"call torch\.distributed\.init_process_group\(\) first; gloo"):
        wrapped(tiny_llama)
    dist.init_process_group("gloo", store=any_of(dist).HashStore(), rank=0, world_size=1)
    try:
        assert wrapped(tiny_llama).fsdp_report.ok
    finally:
        dist.destroy_process_group()


def test_an_optimizer_is_made_after_the_wrap(one_rank: None, engines_objects: None, tiny_llama: Path) -> None:
    model = on_meta(tiny_llama)
    early = torch.optim.SGD(model.parameters(), lr=0.1)
    model = any_of(wrap_fsdp_meta_safe(model, tiny_llama))
    (finding,) = [finding for finding in model.fsdp_report.findings if finding.code == "optimizer-before-wrap"]
    assert "make the optimizer after wrap_fsdp_meta_safe; assert_optimizer_sharded checks it" in finding.fix
    with pytest.raises(SafeLoadingError, match=r"Make it after wrap_fsdp_meta_safe, from model\.parameters\(\)"):
        assert_optimizer_sharded(early, model)
    with pytest.raises(SafeLoadingError, match=r"pass a torch optimizer"):
        assert_optimizer_sharded(any_of(3), model)
    assert_optimizer_sharded(torch.optim.SGD(model.parameters(), lr=0.1), model)


def test_a_model_that_is_wrapped_is_not_wrapped_again(one_rank: None) -> None:
    one, model = reference(llama), any_of(wrap_fsdp_meta_safe(reference(llama)))
    with pytest.raises(SafeLoadingError, match=r"nothing was attached to it since: leave this call out"):
        wrap_fsdp_meta_safe(model)
    assert differences(one, model, inputs("llama")) == NOTHING


def test_a_model_is_wrapped_with_all_that_shares_its_weights(one_rank: None, engines_objects: None) -> None:
    def findings(wrapped: Any) -> list[Any]:
        return [finding for finding in wrapped.fsdp_report.findings if finding.code == "shared-outside"]

    def tied() -> Any:
        return reference(lambda: llama(tie_word_embeddings=True))

    model = tied()
    (finding,) = findings(wrap_fsdp_meta_safe(model.model))
    assert model.lm_head.weight is not model.model.embed_tokens.weight
    assert finding.where == "embed_tokens.weight"
    assert "lm_head.weight of LlamaForCausalLM" in finding.message
    whole_model, parted = tied(), tied()
    assert not findings(wrap_fsdp_meta_safe(whole_model))
    assert whole_model.lm_head.weight is whole_model.model.embed_tokens.weight
    parted.lm_head.weight = nn.Parameter(parted.lm_head.weight.clone())
    assert not findings(wrap_fsdp_meta_safe(parted.model))
    assert finding.fix == (
        "wrap the LlamaForCausalLM, so that both are in it; if they may differ, give lm_head.weight a copy of the "
        "values before the wrap."
    )


def test_the_rank_that_writes_is_passed_or_left_out(one_rank: None, tiny_llama: Path, tmp_path: Path) -> None:
    model = wrapped(tiny_llama)
    with pytest.raises(SafeLoadingError, match="pass rank == 0, or not at all"):
        model.save_pretrained(tmp_path / "no", is_main_process=False)
    model.save_pretrained(tmp_path / "left out")
    model.save_pretrained(tmp_path / "passed", is_main_process=dist.get_rank() == 0)
    for folder in (tmp_path / "left out", tmp_path / "passed"):
        assert all(torch.equal(value, state_of(tiny_llama)[name]) for name, value in state_of(folder).items())


def test_the_dtype_of_the_checkpoint_rounds_nothing(one_rank: None, tiny_llama: Path) -> None:
    half = any_of(wrap_fsdp_meta_safe(on_meta(tiny_llama, dtype=torch.bfloat16), state_of(tiny_llama)))
    fixes = {finding.fix for finding in half.fsdp_report.findings if finding.code == "dtype-cast"}
    assert fixes == {"none needed; build the model in the dtype of the checkpoint to avoid the rounding."}
    same = any_of(wrap_fsdp_meta_safe(on_meta(tiny_llama), state_of(tiny_llama)))
    assert "dtype-cast" not in {finding.code for finding in same.fsdp_report.findings}


def test_a_folder_or_a_config_unties_two_values(one_rank: None, tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 101}
    config = LlamaConfig(**sizes, num_attention_heads=2, tie_word_embeddings=True)
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    state = {name: value.clone() for name, value in state_of(tmp_path).items()}
    state["lm_head.weight"] = state["model.embed_tokens.weight"] + 1
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    by_the_folder = meta_model(config)
    untied = LlamaConfig(**sizes, num_attention_heads=2, tie_word_embeddings=False)
    with_adapter = get_peft_model(any_of(meta_model(tmp_path)), LoraConfig(target_modules=["lm_head"]))
    for model in (by_the_folder, meta_model(tmp_path), with_adapter, meta_model(untied)):
        model = any_of(wrap_fsdp_meta_safe(model, tmp_path))
        base = model.get_base_model() if model is with_adapter else model
        head = getattr(base.lm_head, "base_layer", base.lm_head)
        assert torch.equal(head.weight.full_tensor(), state["lm_head.weight"])
        assert torch.equal(base.model.embed_tokens.weight.full_tensor(), state["model.embed_tokens.weight"])
        assert not base.all_tied_weights_keys


def test_a_script_ties_two_values_of_a_folder_in_a_model_that_has_them(one_rank: None, tmp_path: Path) -> None:
    def by_script(model: Any) -> Any:
        model.lm_head.weight = model.model.embed_tokens.weight
        return model

    save(reference(llama), tmp_path)
    with pytest.raises(SafeLoadingError, match=r"leave these ties out of the model .*; or tie a model that was loaded"):
        wrap_fsdp_meta_safe(by_script(meta_model(tmp_path)), tmp_path)
    apart = any_of(wrap_fsdp_meta_safe(meta_model(tmp_path), tmp_path))
    assert apart.lm_head.weight is not apart.model.embed_tokens.weight
    one = by_script(LlamaForCausalLM.from_pretrained(tmp_path))
    tied = any_of(wrap_fsdp_meta_safe(by_script(LlamaForCausalLM.from_pretrained(tmp_path))))
    assert tied.lm_head.weight is tied.model.embed_tokens.weight
    assert torch.equal(tied.lm_head.weight.full_tensor(), one.lm_head.weight)


@pytest.mark.parametrize("start", ["pissa", "olora"])
def test_an_adapter_that_changed_its_base_is_wrapped_with_it(
    one_rank: None, tiny_llama: Path, tmp_path: Path, start: Any
) -> None:
    """Its tensors fit a plain LoRA of the same sizes, over a base that is not the one that it was trained on."""
    config = LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=start)
    trained = get_peft_model(LlamaForCausalLM.from_pretrained(tiny_llama), config).eval()
    with torch.no_grad():
        for name, parameter in trained.named_parameters():
            parameter.add_("lora_B" in name)
    trained.save_pretrained(tmp_path)
    plain = LoraConfig(r=4, target_modules=["q_proj"])
    with torch.device("meta"):
        model = get_peft_model(on_meta(tiny_llama), plain)
    with pytest.raises(SafeLoadingError, match=f"init_lora_weights='{start}' changed the base .* load_peft_on_rank"):
        wrap_fsdp_meta_safe(model, tiny_llama, adapters=tmp_path)
    model = wrap_fsdp_meta_safe(load_peft_on_rank(tiny_llama, tmp_path))
    tokens = torch.arange(1, 13).view(1, 12)
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, trained(tokens).logits)
