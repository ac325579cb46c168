"""merge_lora_inplace on models that FSDP2 has spread over real ranks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from models import save_llama
from rank_server import RankServer

SCRIPT = """
    import copy, sys, torch
    import torch.distributed as dist
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
    from torch.distributed.tensor import DTensor, Shard
    from peft import AdaLoraConfig, LoHaConfig, LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM
    from safe_loading import MergeError, merge_lora_inplace

    dist.init_process_group("gloo")
    TOKENS = torch.arange(1, 25).reshape(2, 12)
    EVERY = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "embed_tokens"]
    CASES = {
        "plain": ({}, torch.bfloat16, 0),
        "uneven": ({"r": 5, "use_rslora": True}, torch.float32, 0),
        "columns": ({"target_modules": EVERY[:-1]}, torch.bfloat16, 1),
        "dora": ({"use_dora": True, "target_modules": EVERY[:-1]}, torch.bfloat16, 0),
    }

    def make(config, dtype):
        torch.manual_seed(0)
        base = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=dtype)
        model = get_peft_model(base, LoraConfig(**{"r": 4, "target_modules": EVERY, **config}))
        with torch.no_grad():
            for name, parameter in sorted(model.named_parameters()):
                if "lora_" in name and "magnitude" not in name:
                    parameter.copy_(torch.randn(parameter.shape) * 0.1)
        return model.eval()

    def spread(model, dim):
        place = (lambda p: Shard(dim) if p.dim() > dim else Shard(0))
        for layer in model.base_model.model.model.layers:
            fully_shard(layer, shard_placement_fn=place)
        fully_shard(model.base_model.model, shard_placement_fn=place)

    def full(tensor):
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    found = {}
    for name, (config, dtype, dim) in CASES.items():
        wanted = merge_lora_inplace(make(config, dtype))
        expected = wanted.state_dict()
        model = make(config, dtype)
        spread(model, dim)
        model(TOKENS)  # leaves the root's weights whole
        weight = model.base_model.model.model.layers[0].self_attn.q_proj.base_layer.weight
        where = weight.to_local().data_ptr()
        merged = merge_lora_inplace(model)
        now = merged.state_dict()
        kept = merged.model.layers[0].self_attn.q_proj.weight.to_local().data_ptr() == where
        wrong = [key for key in expected if not torch.equal(full(now[key]), expected[key])]
        logits = torch.equal(merged(TOKENS).logits, wanted(TOKENS).logits)
        found[name] = [sorted(now) == sorted(expected), kept, wrong, logits]
    report(found=found)

    config, dtype, dim = CASES["plain"]
    model = make(config, dtype)
    spread(model, dim)
    inner = model.base_model.model.model.layers[1].mlp.down_proj
    if dist.get_rank() == 1:
        inner.base_layer.weight.to_local()[-1, -1] = torch.nan
    before = {key: full(value).clone() for key, value in model.state_dict().items()}
    try:
        merge_lora_inplace(model)
        report(refused="")
    except MergeError as error:
        report(refused=str(error))
    same = all(torch.equal(full(v).nan_to_num(7), before[k].nan_to_num(7)) for k, v in model.state_dict().items())
    report(untouched=same)

    model = make({"target_modules": ["lm_head"]}, torch.bfloat16)
    wanted = merge_lora_inplace(make({"target_modules": ["lm_head"]}, torch.bfloat16))
    inner = model.base_model.model
    fully_shard([inner.model.norm, inner.lm_head])  # as torchtitan shards them: the LoRA layer is itself a unit's
    fully_shard(inner)
    merged = merge_lora_inplace(model)
    same = torch.equal(full(merged.lm_head.weight), wanted.lm_head.weight)
    report(unit=[same, *(torch.equal(merged(TOKENS).logits, wanted(TOKENS).logits) for _ in range(2))])

    def refused(config):
        model = get_peft_model(AutoModelForCausalLM.from_pretrained(sys.argv[1]), config).eval()
        spread(model, 0)
        try:
            merge_lora_inplace(model)
            return ""
        except MergeError as error:
            return str(error)

    report(other=refused(LoHaConfig(target_modules=["v_proj"], init_weights=False)))
    report(in_memory_alone=refused(AdaLoraConfig(target_modules=["v_proj"], init_r=4, total_step=10)))

    model = make({"use_dora": True, "target_modules": EVERY[:-1]}, torch.float32)
    spread(model, 1)
    try:
        merge_lora_inplace(model)
    except MergeError as error:
        report(dora=str(error))
    tied = AutoModelForCausalLM.from_pretrained(sys.argv[2])
    model = get_peft_model(tied, LoraConfig(target_modules=["lm_head"], init_lora_weights=False)).eval()
    spread(model, 0)
    try:
        merge_lora_inplace(model)
    except MergeError as error:
        report(tied=str(error))
    model = make({}, torch.float32)
    layers = model.base_model.model.model.layers
    layers[0] = FullyShardedDataParallel(layers[0], use_orig_params=True, device_id=torch.device("cpu"))
    try:
        merge_lora_inplace(model)
    except MergeError as error:
        report(fsdp1=str(error))
    dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def ranks(rank_server: RankServer, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    base: Path = save_llama(tmp_path_factory.mktemp("base"))
    tied: Path = save_llama(tmp_path_factory.mktemp("tied"), tie_word_embeddings=True)
    return rank_server.run(SCRIPT, 2, args=[base, tied], timeout=240).found


@pytest.mark.parametrize("case", ["plain", "uneven", "columns", "dora"])
def test_a_shard_becomes_what_one_process_makes(ranks: list[dict[str, Any]], case: str) -> None:
    for rank in ranks:
        names, kept, wrong, logits = rank["found"][case]
        assert names
        assert kept
        assert wrong == []
        assert logits


def test_a_layer_that_is_a_unit_itself_is_merged(ranks: list[dict[str, Any]]) -> None:
    """FSDP2 gives a unit a class of its own, which was left to peft, and peft's sum was lost."""
    assert all(rank["unit"] == [True, True, True] for rank in ranks)


def test_another_method_is_refused_with_what_to_do_instead(ranks: list[dict[str, Any]]) -> None:
    text = r"v_proj: its weight is a DTensor .*Merge before the model is sharded, or save the adapter"
    assert all(re.search(text, rank["other"]) for rank in ranks)


def test_the_merge_on_disk_is_no_advice_for_a_method_that_it_refuses(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert "Merge before the model is sharded." in rank["in_memory_alone"]
        assert "merge_lora_checkpoint" not in rank["in_memory_alone"]


def test_a_nan_on_one_rank_is_refused_on_all_and_nothing_is_written(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert "model.layers.1.mlp.down_proj.weight: the base weight itself holds NaN" in rank["refused"]
        assert rank["untouched"]


def test_norms_that_cross_ranks_are_refused(ranks: list[dict[str, Any]]) -> None:
    assert all("along which DoRA takes norms" in rank["dora"] for rank in ranks)


def test_one_of_two_tied_shards_is_refused_with_what_to_do_instead(ranks: list[dict[str, Any]]) -> None:
    # test_an_adapter_of_one_of_two_tied_weights_unties_them does so
    text = r"lm_head\.weight shares its memory.*Save the adapter, and merge it with merge_lora_checkpoint"
    assert all(re.search(text, rank["tied"]) for rank in ranks)


def test_fsdp1_is_refused_with_what_to_do_instead(ranks: list[dict[str, Any]]) -> None:
    text = r"layers\.0 is wrapped by FSDP1.*Save the adapter, and merge it into the unsharded base"
    assert all(re.search(text, rank["fsdp1"]) for rank in ranks)
