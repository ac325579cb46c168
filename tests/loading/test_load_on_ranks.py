"""load_peft_on_rank in ranks of one job: gloo, simulated devices, a hub that counts its requests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from fake_hub import commit_of, serve
from faults import adapters as faults
from models import save_adapter, save_llama

if TYPE_CHECKING:
    from conftest import Simulated

RANKS = 3
SCRIPT = """
    import contextlib, os, sys, time, torch, torch_npu
    import urllib.error, urllib.request
    import torch.distributed as dist
    from fake_hub import ask
    from safe_loading import load_adapter_on_rank, load_peft_on_rank

    base, adapter, second, broken, cache, other, hub = sys.argv[1:]
    ask(hub, f"{cache} by default")
    rank = int(os.environ["RANK"])
    tokens = torch.arange(1, 25).reshape(2, 12)
    dist.init_process_group("gloo")

    def tried(call):
        torch_npu.reset()
        start = time.monotonic()
        try:
            made = call()
        except Exception as error:
            return {"error": type(error).__name__, "text": str(error), "contexts": torch_npu.contexts(),
                    "seconds": time.monotonic() - start, "bases": [c.__name__ for c in type(error).__mro__]}
        report_of = made.load_report if hasattr(made, "load_report") else made
        return {"contexts": torch_npu.contexts(), "ranks": report_of.ranks, "rank": report_of.rank,
                "parts": [[p.name, p.source, p.commit, p.device] for p in report_of.parts]}

    before = torch.get_rng_state()
    torch_npu.reset()
    model = load_peft_on_rank(base, adapter)
    with torch.no_grad():
        total = model(input_ids=tokens.to(model.device)).logits.double().sum().item()
    report({"load": {"contexts": torch_npu.contexts(), "device": str(model.device), "sum": total,
                     "rng": torch.equal(before, torch.get_rng_state()), "ranks": model.load_report.ranks}})
    report({"second": tried(lambda: load_adapter_on_rank(model, second, "second"))})
    report({"all fail": tried(lambda: load_peft_on_rank(base, broken))})
    report({"one fails": tried(lambda: load_adapter_on_rank(model, second, "second" if rank == 2 else "third"))})
    if rank == 1:
        torch_npu.set_limit(1, torch_npu.stats()[1]["live"] + 20_000)
    report({"one is full": tried(lambda: load_peft_on_rank(base, adapter))})
    torch_npu.set_limit(1, None)
    report({"after": tried(lambda: load_adapter_on_rank(model, second, "fourth"))})
    report({"hub": tried(lambda: load_peft_on_rank("org/adapter", base_kwargs={"cache_dir": cache}))})
    if rank == 0:  # what the hub is asked from here on is asked with everything in the cache
        with contextlib.suppress(urllib.error.HTTPError):
            urllib.request.urlopen(hub + "/everything-is-cached")
    dist.barrier()
    report({"hub again": tried(lambda: load_peft_on_rank("org/adapter", base_kwargs={"cache_dir": cache}))})
    report({"alone": tried(lambda: load_peft_on_rank(base, adapter, ranks="self")) if rank == 0 else {}})
    os.environ["ASCEND_RT_VISIBLE_DEVICES"] = "0"
    own = os.environ["LOCAL_RANK"]
    from safe_loading._ranks import device_for_rank
    seen = device_for_rank._visible_devices
    device_for_rank._visible_devices = lambda: ("npu", 1)
    report({"one device for all": tried(lambda: load_peft_on_rank(base, adapter))})
    report({"shared by name": tried(lambda: load_peft_on_rank(base, adapter, device="npu:0"))})
    device_for_rank._visible_devices = seen
    del os.environ["ASCEND_RT_VISIBLE_DEVICES"]
    report({"two": tried(lambda: load_peft_on_rank(base, adapter, ranks=[0, 2])) if rank != 1 else {}})
    report({"asked differently": tried(lambda: load_peft_on_rank(second if rank == 1 else adapter, base))})

    # as if each rank were a node of its own, with a copy of the adapter that differs on one of them
    from safe_loading._ranks import exchange
    exchange.host_identity = lambda: f"node-{rank}"
    report({"copies differ": tried(lambda: load_peft_on_rank(other if rank == 1 else adapter, base))})
    report({"copies equal": tried(lambda: load_peft_on_rank(base, adapter))})
    home = os.getcwd()
    if rank != 1:
        os.chdir(os.path.dirname(adapter))  # where the names of the folders, which could be hub ids, are folders
    report({"adapter on two": tried(lambda: load_peft_on_rank(base, "adapter"))})
    report({"base on two": tried(lambda: load_peft_on_rank("base", adapter))})
    os.chdir(home)
    options = {"dtype": torch.bfloat16, "strict": False} if rank == 1 else {}
    report({"other arguments": tried(lambda: load_peft_on_rank(base, adapter, **options))})
    report({"one late": tried(lambda: load_peft_on_rank(base, adapter, timeout=1)) if rank != 2 else {}})
    dist.barrier()
    dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def results(simulated: Simulated, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    root = tmp_path_factory.mktemp("ranks")
    base = save_llama(root / "base")
    adapter = save_adapter(root / "adapter", base)
    second = save_adapter(root / "second", base, seed=3)
    broken = faults.edited(adapter, root / "broken", tensors=faults.without("layers.1.self_attn.q_proj.lora_B"))
    other = faults.edited(adapter, root / "other", tensors=faults.filled("layers.0.self_attn.q_proj.lora_B", 0.5))
    named = faults.edited(adapter, root / "named", config=lambda c: c.update(base_model_name_or_path="org/base"))
    arguments = [base, adapter, second, broken, root / "cache", other]
    with serve({"org/base": base, "org/adapter": named}) as hub:
        facts = simulated.fork_ranks(SCRIPT, RANKS, args=[*arguments, hub.url], timeout=300)
    marker = hub.requests.index("GET /everything-is-cached")
    first, cached = ([r for r in part if "org/" in r] for part in (hub.requests[:marker], hub.requests[marker:]))
    return {"ranks": facts, "first": first, "cached": cached}


def each(results: dict[str, Any], case: str) -> list[dict[str, Any]]:
    return [facts[case] for facts in results["ranks"]]


@pytest.mark.parametrize(("case", "name"), [("adapter on two", "adapter 'default'"), ("base on two", "base_model")])
def test_a_folder_that_one_rank_lacks_is_named_on_all_of_them(results: dict[str, Any], case: str, name: str) -> None:
    folder = case.split()[0]
    for rank, facts in enumerate(each(results, case)):
        assert facts["error"] == "CheckpointNotFound"
        assert f"{name}: is not there for rank 1 ({folder}); it is for ranks 0, 2 ({folder})" in facts["text"]
        assert "Copy it to each node" in facts["text"]
        assert set(facts["contexts"]) <= {rank}


def test_each_rank_has_its_own_device_and_no_other(results: dict[str, Any]) -> None:
    for rank, facts in enumerate(each(results, "load")):
        assert facts["contexts"] == [rank]
        assert facts["device"] == f"npu:{rank}"
        assert facts["ranks"] == RANKS
        assert facts["rng"]
    assert len({facts["sum"] for facts in each(results, "load")}) == 1


def test_a_later_adapter_stays_there(results: dict[str, Any]) -> None:
    for rank, facts in enumerate(each(results, "second")):
        assert facts["contexts"] in ([], [rank])
        assert facts["parts"][0][3] == f"npu:{rank}"


@pytest.mark.parametrize(
    ("case", "failing", "kind", "words"),
    [
        ("one fails", 2, "AdapterExists", ["'second'"]),
        ("one is full", 1, "OutOfMemoryError", ["npu:1"]),
    ],
)
def test_if_one_rank_fails_all_raise_with_its_cause(
    results: dict[str, Any], case: str, failing: int, kind: str, words: list[str]
) -> None:
    for rank, facts in enumerate(each(results, case)):
        assert facts["error"] == (kind if rank == failing else "RankError"), facts
        assert all(word in facts["text"] for word in words)
        if rank != failing:
            assert f"Rank {failing} " in facts["text"]
            assert kind in facts["text"]


def test_if_all_fail_each_has_the_cause(results: dict[str, Any]) -> None:
    for facts in each(results, "all fail"):
        assert facts["error"] in ("AdapterError", "RankError")
        assert "layers.1.self_attn.q_proj" in facts["text"]


def test_ranks_that_ask_for_different_things_all_raise(results: dict[str, Any]) -> None:
    for facts in each(results, "asked differently"):
        assert facts["error"] == "RanksDisagree"
        assert "rank 1 asks for" in facts["text"]


def test_after_a_failure_the_next_call_works(results: dict[str, Any]) -> None:
    assert all(facts["parts"][0][0] == "fourth" for facts in each(results, "after"))


def test_one_rank_asks_the_hub(results: dict[str, Any]) -> None:
    for facts in (*each(results, "hub"), *each(results, "hub again")):
        assert [part[:3] for part in facts["parts"]] == [
            ["base", "org/base", commit_of("org/base")],
            ["default", "org/adapter", commit_of("org/adapter")],
        ]
    assert any("/resolve/" in request for request in results["first"])
    assert len(results["cached"]) == 2, results["cached"]


def test_some_ranks_or_one_can_load_without_the_others(results: dict[str, Any]) -> None:
    assert each(results, "alone")[0]["ranks"] == 1
    assert [(facts.get("rank"), facts.get("ranks")) for facts in each(results, "two")] == [(0, 2), (None, None), (1, 2)]


def test_one_device_for_all_ranks_is_refused_unless_it_is_named(results: dict[str, Any]) -> None:
    for facts in each(results, "one device for all"):
        assert facts["error"] == "DeviceError"
        assert "ranks [0, 1, 2] own npu:0" in facts["text"]
    assert all(facts["contexts"] == [0] for facts in each(results, "shared by name"))


def test_ranks_that_ask_for_other_models_all_raise(results: dict[str, Any]) -> None:
    for facts in each(results, "other arguments"):
        assert facts["error"] == "RanksDisagree"
        assert "ranks 0, 2: dtype=auto; rank 1: dtype=torch.bfloat16" in facts["text"]
        assert "ranks 0, 2: strict=True; rank 1: strict=False" in facts["text"]
        assert "ranks='self'" in facts["text"]


def test_a_rank_that_does_not_come_is_named(results: dict[str, Any]) -> None:
    for facts in each(results, "one late")[:2]:
        assert facts["error"] == "RankTimeout"
        assert "TimeoutError" in facts["bases"]
        assert "2" in facts["text"]
        assert "ranks=" in facts["text"]


def test_nodes_with_different_copies_all_raise(results: dict[str, Any]) -> None:
    for facts in each(results, "copies differ"):
        assert facts["error"] == "RanksDisagree"
        assert "SHA-256" in facts["text"]
    assert all("error" not in facts for facts in each(results, "copies equal"))
