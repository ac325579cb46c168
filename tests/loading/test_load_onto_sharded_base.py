"""Adapters on a base that FSDP or tensor parallelism has split: what is trained alone is told, and can be mended."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engines import needs
from models import save_adapter, save_llama
from rank_server import RankServer

pytestmark = needs("transformers", "5.23")

SCRIPT = """
    import sys, torch, torch.distributed as dist
    from peft import LoraConfig, PeftModel, get_peft_model
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig
    from safe_loading import AdapterError, Workload, audit_model, load_adapter_on_rank, load_peft_on_rank
    from safe_loading import wrap_fsdp_meta_safe

    base, adapter, dora = sys.argv[1:]
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    tokens = torch.arange(1, 25).reshape(2, 12)
    sharded = {"distributed_config": DistributedConfig(fsdp_size=2)}
    split = {"distributed_config": DistributedConfig(tp_size=2)}

    def loaded(model=base, *, trained=True, **options):
        return load_peft_on_rank(model, adapter, is_trainable=trained, base_kwargs=options or None)

    def gradients(model, batch):
        model.zero_grad()
        model(input_ids=batch, labels=batch).loss.backward()
        grads = {n: p.grad for n, p in model.named_parameters() if "lora_" in n}
        return {n: grad.full_tensor() if hasattr(grad, "full_tensor") else grad.clone() for n, grad in grads.items()}

    def said(report):
        return [[f.code, f.severity, f.fix] for f in report.findings if f.code != "SL108"]

    whole = loaded()
    with torch.no_grad():
        exact = whole(input_ids=tokens).logits
    each = [gradients(whole, tokens + number) for number in range(2)]
    mean = {name: (each[0][name] + each[1][name]) / 2 for name in each[0]}

    def near(grads, other):
        return all(torch.allclose(grad, other[name], atol=1e-5) for name, grad in grads.items())

    model = loaded(**sharded)
    with torch.no_grad():
        report(**{"same": torch.equal(model(input_ids=tokens).logits, exact)})
    report(**{"load": said(model.load_report), "audit": said(audit_model(model)),
            "bytes": [part.bytes for part in model.load_report.parts],
            "whole": [part.bytes for part in whole.load_report.parts]})
    own = gradients(model, tokens + rank)
    report(**{"alone": near(own, each[rank]), "reduced": near(own, mean)})
    model.zero_grad()
    model = wrap_fsdp_meta_safe(model)
    report(**{"again": near(gradients(model, tokens + rank), mean), "audit again": said(audit_model(model))})

    try:
        load_peft_on_rank(base, dora, base_kwargs=sharded)
    except AdapterError as error:
        report(dora=str(error))
    both = wrap_fsdp_meta_safe(load_peft_on_rank(base, dora))
    with torch.no_grad():
        outputs = [model(input_ids=tokens).logits for model in (both, load_peft_on_rank(base, dora))]
    report(**{"dora sharded": torch.equal(*outputs)})

    model = loaded(trained=False, **sharded)
    report(**{"frozen": said(model.load_report)})
    later = load_adapter_on_rank(model, adapter, "later", is_trainable=True)
    report(**{"later": said(later), "later frozen": said(load_adapter_on_rank(model, adapter, "third"))})

    model = AutoModelForCausalLM.from_pretrained(base)
    for layer in model.model.layers:
        fully_shard(layer)
    model = get_peft_model(fully_shard(model), LoraConfig(target_modules=["q_proj"]))
    report(**{"by hand": said(audit_model(model))})
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda each: dist.all_reduce(each.grad))
    report(**{"with hooks": said(audit_model(model))})

    for originals in (True, False):
        model = AutoModelForCausalLM.from_pretrained(base)
        model = FullyShardedDataParallel(model, use_orig_params=originals, device_id=torch.device("cpu"))
        before = said(audit_model(model))
        model.head = torch.nn.Linear(4, 4)
        report(**{f"fsdp1 {originals}": [before, said(audit_model(model))]})

    alone = get_peft_model(fully_shard(AutoModelForCausalLM.from_pretrained(base), mesh=init_device_mesh("cpu", (2, 1),
        mesh_dim_names=("replicate", "fsdp"))), LoraConfig(target_modules=["q_proj"]))
    report(**{"replicated": said(audit_model(alone))})

    model = loaded(**split)
    with torch.no_grad():
        report(**{"split same": torch.allclose(model(input_ids=tokens).logits, exact, atol=1e-5)})
    report(**{"split": said(model.load_report)})
    if rank == 0:  # no other rank need be doing the same
        audit = audit_model(model, Workload.train(2, 12), forecast=False)
        report(**{"split audit": said(audit), "skipped": list(audit.skipped)})
    dist.barrier()
"""
OUTSIDE, TOLD = "SL148", "adapter-not-sharded"


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, rank_server: RankServer) -> Any:
    folder: Path = tmp_path_factory.mktemp("sharded")
    base = save_llama(folder / "base")
    adapters = [save_adapter(folder / "lora", base), save_adapter(folder / "dora", base, use_dora=True)]
    return rank_server.run(SCRIPT, 2, args=[base, *adapters], timeout=240).found


def codes(findings: list[list[str]]) -> list[str]:
    return [code for code, _, _ in findings]


def test_an_adapter_on_a_base_that_fsdp_has_sharded_is_trained_alone_and_told(found: Any) -> None:
    for rank in found:
        assert rank["same"]
        assert rank["alone"]
        assert not rank["reduced"]
        assert (codes(rank["load"]), codes(rank["audit"])) == ([TOLD], [OUTSIDE])
        assert "call wrap_fsdp_meta_safe(model)" in rank["load"][0][2]
        assert (codes(rank["frozen"]), codes(rank["later"]), codes(rank["later frozen"])) == ([], [TOLD], [])


def test_the_advice_shards_it_and_its_gradients_are_those_of_all_rows(found: Any) -> None:
    for rank in found:
        assert rank["again"]
        assert rank["audit again"] == []


def test_an_adapter_that_reads_the_weights_is_refused_and_loads_before_they_are_sharded(found: Any) -> None:
    for rank in found:
        assert "its weights are DTensors" in rank["dora"]
        assert "Load it onto the whole base, and let wrap_fsdp_meta_safe(model) shard both" in rank["dora"]
        assert rank["dora sharded"]


def test_a_report_says_the_bytes_of_the_rank(found: Any) -> None:
    whole = found[0]["whole"][0]
    assert whole <= sum(rank["bytes"][0] for rank in found) <= whole * 1.01  # and padding of odd rows


def test_what_was_attached_after_any_fsdp_is_told_unless_a_hook_may_reduce_it(found: Any) -> None:
    for rank in found:
        assert codes(rank["by hand"]) == [OUTSIDE]
        assert rank["with hooks"] == []
        assert OUTSIDE in codes(rank["replicated"])
        for originals in (True, False):
            before, after = rank[f"fsdp1 {originals}"]
            assert OUTSIDE not in codes(before)
            assert "wrap_fsdp_meta_safe" not in {code: fix for code, _, fix in after}[OUTSIDE]


def test_an_audit_of_tensor_parallel_layers_needs_no_other_rank_and_says_what_it_left_out(found: Any) -> None:
    assert all(rank["split same"] and rank["split"] == [] for rank in found)
    assert found[0]["split audit"] == []
    assert found[0]["skipped"][0].startswith("step: tensor parallelism has split the layers")
