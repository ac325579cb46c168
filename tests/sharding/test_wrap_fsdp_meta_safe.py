"""wrap_fsdp_meta_safe on two real ranks: equal to one process to the last bit, whatever the source and the version."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from fsdp_cases import CASES, NOTHING, last_of_two_losses
from fsdp_sweep import CANNOT_STEP, NOT_COMPARED, OTHER_SUMS
from rank_server import RankServer
from tiny_models import causal_lm_classes, image_text_classes

SCRIPT = """
import io, os, pathlib, sys, warnings
import torch, torch.distributed as dist
warnings.simplefilter("ignore")
from transformers import logging as transformers_logging
transformers_logging.set_verbosity_error()
transformers_logging.disable_progress_bar()
from fsdp_cases import *
from safe_loading import wrap_fsdp_meta_safe
from safe_loading._core import progress

class Screen(io.StringIO):
    isatty = lambda self: True

class Counted(progress.Bar):
    def __init__(self, what, total, **options):
        super().__init__(what, total, **{**options, "after": 0.0})
        self.facts = [what, total, 0]
        bars.append(self.facts)
    def advance(self, count=1):
        super().advance(count)
        self.facts[2] += count

os.environ.pop("HF_HUB_DISABLE_PROGRESS_BARS", None)
progress.Bar, bars = Counted, []
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
names, meshes, folder = [*filter(None, sys.argv[1].split(","))], eval(sys.argv[2]), sys.argv[3]
for name in names:
    make, path = CASES[name], f"{folder}/{name}"
    one = reference(make)
    if rank == 0:
        save(one, path)
    dist.barrier()
    for version in (2, 1):
        for mesh in meshes:
            for source in ("folder", "model", "state"):
                if source == "state" and name != "llama" or source == "model" and world > 2 and mesh is None:
                    continue
                real = source == "model" and rank == 0
                model = reference(make) if real else on_meta(make)
                state = one.state_dict() if rank == 0 else None
                given = {"folder": path, "model": None, "state": state}[source]
                bars, stderr, sys.stderr = [], sys.stderr, Screen()
                verify = "bytes" if version == 2 else "structure"
                model = wrap_fsdp_meta_safe(model, given, version=version, mesh=mesh, verify=verify)
                screen, sys.stderr = sys.stderr.getvalue(), stderr
                facts = model.fsdp_report
                report(**{f"{name} {version} {mesh} {source}": {
                    "differences": differences(one, model, inputs(name)),
                    "read": facts.bytes_read, "sent": facts.bytes_sent, "local": facts.local_bytes,
                    "model": sum(p.nbytes for p in one.parameters()),
                    "own": sum(map(local_bytes, model.parameters())) if version == 2 else facts.local_bytes,
                    "units": [u.name for u in facts.units],
                    "ok": facts.ok, "findings": [f.code for f in facts.findings],
                    "bars": [*bars], "screen": screen,
                }})
                del model
    if world == 4:
        # two micro-batches, of which the replicas sum the gradients once
        model = wrap_fsdp_meta_safe(on_meta(make), path, mesh=(2, 2))
        one.zero_grad()
        for last in (False, True):
            model.set_requires_all_reduce(last)
            for each in (one, model):
                each(**inputs(name)).loss.backward()
        report(accumulated={"differences": compared(one, model, torch.zeros(1), torch.zeros(1))})
        # each half of the ranks wraps a model of its own,
        half = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("halves", "fsdp"))["fsdp"]
        model = wrap_fsdp_meta_safe(on_meta(make), path, mesh=half)
        facts = model.fsdp_report
        report(half={
            "differences": differences(reference(make), model, inputs(name)),
            "place": [facts.rank, facts.ranks, facts.shards],
            "title": str(facts).splitlines()[0],
        })
if len(sys.argv) > 4:
    from fsdp_sweep import sweep
    sweep(pathlib.Path(folder), sys.argv[4].split(","), report)
dist.destroy_process_group()
"""
# What each of the fixed ones stands for is a trap of its own: multipliers in buffers, rotary permutations, an encoder
# whose output every layer of the decoder reads, images that go through a second tower.
EVERY = sorted({*causal_lm_classes(), *image_text_classes()})
FIXED = ["FalconH1ForCausalLM:2", "MistralLarge4ForConditionalGeneration:2", "T5Gemma2ForConditionalGeneration:2"]
FIXED += ["Qwen2VLForConditionalGeneration:1"]
FIXED = [case for case in FIXED if case.split(":")[0] in EVERY]  # transformers 5.17 lacks MistralLarge4
SAMPLE = sorted({*FIXED, *(f"{name}:2" for name in random.Random(20261121).sample(EVERY, 2))})
TWO = [f"{name} {version} None {source}" for name in CASES for version in (2, 1) for source in ("folder", "model")]
TWO += ["llama 2 None state", "llama 1 None state"]


@pytest.fixture(scope="module")
def two_ranks(rank_server: RankServer, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("two")
    return rank_server.run(SCRIPT, 2, args=[",".join(CASES), "[None]", folder, ",".join(SAMPLE)], timeout=240).found


@pytest.mark.parametrize("case", TWO)
def test_everything_equals_one_process(two_ranks: list[dict[str, Any]], case: str) -> None:
    for found in two_ranks:
        assert found[case]["differences"] == NOTHING
        assert found[case]["ok"]
        assert found[case]["findings"] == []


def check_cases(found: list[dict[str, Any]], cases: list[str]) -> None:
    for facts in found:
        assert [case for case in cases if case not in facts] == []
        errors = {case: facts[case]["error"] for case in cases if "error" in facts[case]}
        assert errors.keys() == {case for case in cases if case.partition(":")[0] in NOT_COMPARED}, errors
        rest = {case: facts[case] for case in cases if case not in errors}
        assert {case: each["differences"] for case, each in rest.items() if each["differences"] != NOTHING} == {}
        assert {case for case, each in rest.items() if "no step" in each} == {
            case for case in rest if case.partition(":")[0] in CANNOT_STEP
        }
        assert {case for case, each in rest.items() if each.get("other sums")} == {
            case for case in rest if case in OTHER_SUMS
        }
        assert all(each["units"] > 1 for each in rest.values())


def test_a_sample_of_classes_equals_one_process(two_ranks: list[dict[str, Any]]) -> None:
    check_cases(two_ranks, SAMPLE)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "version", "part"), [(2, 2, n) for n in range(8)] + [(2, 1, n) for n in range(8)] + [(4, 2, 0)]
)
def test_every_class_equals_one_process(
    rank_server: RankServer, ranks: int, version: int, part: int, tmp_path: Path
) -> None:
    cases = [f"{name}:{version}" for name in EVERY[part::8]]
    check_cases(rank_server.run(SCRIPT, ranks, args=["", "[]", tmp_path, ",".join(cases)], timeout=1200).found, cases)


@pytest.mark.parametrize("name", CASES)
def test_from_a_folder_each_byte_is_read_once_and_none_travels(two_ranks: list[dict[str, Any]], name: str) -> None:
    for version in (2, 1):
        facts = [found[f"{name} {version} None folder"] for found in two_ranks]
        assert sum(each["read"] for each in facts) == facts[0]["model"]
        assert [each["sent"] for each in facts] == [0, 0]


@pytest.mark.parametrize("name", CASES)
def test_rank_0_sends_the_others_their_part_and_not_the_whole(two_ranks: list[dict[str, Any]], name: str) -> None:
    for version in (2, 1):
        facts = [found[f"{name} {version} None model"] for found in two_ranks]
        assert facts[1]["sent"] == 0
        # rank 1's parameters, and the buffers where the model has some that are real
        assert 0 <= facts[0]["sent"] - (facts[0]["model"] - facts[0]["own"]) < 0.01 * facts[0]["model"]


def test_the_units_are_the_layers_and_the_head_with_its_norm(two_ranks: list[dict[str, Any]]) -> None:
    units = two_ranks[0]["llama 2 None folder"]["units"]
    layers = ["model.layers.0", "model.layers.1", "model.layers.2"]
    assert units == [*layers, "model.embed_tokens", "model.norm + lm_head", "(root)"]
    tied = two_ranks[0]["gpt2 2 None folder"]["units"]
    assert tied == ["transformer.h.0", "transformer.h.1", "(root)"]


@pytest.fixture(scope="module")
def four_ranks(rank_server: RankServer, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder: Path = tmp_path_factory.mktemp("four")
    return rank_server.run(SCRIPT, 4, args=["mixtral", "[None, (2, 2)]", folder], timeout=240).found


def test_four_ranks_and_replicas_equal_one_process(four_ranks: list[dict[str, Any]]) -> None:
    assert len(four_ranks[0]) == 2 * (1 + 2) + 2
    for found in four_ranks:
        assert {case: facts["differences"] for case, facts in found.items() if facts["differences"] != NOTHING} == {}


def test_of_ranks_that_wrap_apart_the_report_counts_those_that_wrapped_together(
    four_ranks: list[dict[str, Any]],
) -> None:
    for rank, found in enumerate(four_ranks):
        assert found["half"]["place"] == [rank % 2, 2, 2]
        assert found["half"]["title"].startswith(f"FSDP2, rank {rank % 2} of 2 (2 shards) on cpu")


def test_a_checkpoint_is_read_once_a_group_and_a_rank_may_own_nothing(four_ranks: list[dict[str, Any]]) -> None:
    for version, (mesh, groups) in itertools.product((2, 1), ((None, 1), ((2, 2), 2))):
        facts = [found[f"mixtral {version} {mesh} folder"] for found in four_ranks]
        assert sum(each["read"] for each in facts) == groups * facts[0]["model"]
    # three experts on four ranks: the last one has none of them
    reads = [found["mixtral 2 None folder"]["read"] for found in four_ranks]
    assert reads[3] < 0.6 * reads[0]


def check_bars(found: list[dict[str, Any]], case: str, whats: list[str]) -> None:
    for rank, facts in enumerate(each[case] for each in found):
        for what, total, moved in facts["bars"]:
            assert moved == total <= facts["local"], (what, rank)
            assert (f"{what}: 100%" in facts["screen"]) is (rank == 0 and total > 0)
        assert [what for what, _, _ in facts["bars"]] == whats
        assert facts["bars"][0][1] > 0.98 * facts["local"]  # all but the buffers that are computed again
    assert all(each[case]["screen"] == "" for each in found[1:])


@pytest.mark.parametrize("name", CASES)
def test_a_bar_on_rank_0_goes_to_the_end_of_what_it_reads_checks_and_is_sent(
    two_ranks: list[dict[str, Any]], name: str
) -> None:
    check_bars(two_ranks, f"{name} 2 None folder", ["reading", "verifying"])
    check_bars(two_ranks, f"{name} 1 None folder", ["reading"])
    for version in (2, 1):
        check_bars(two_ranks, f"{name} {version} None model", ["scattering"])


def test_a_bar_counts_what_replicas_are_sent_once(four_ranks: list[dict[str, Any]]) -> None:
    for version in (2, 1):
        check_bars(four_ranks, f"mixtral {version} (2, 2) model", ["scattering"])


def test_replicas_are_sent_their_part_once(four_ranks: list[dict[str, Any]]) -> None:
    facts = [found["mixtral 2 (2, 2) model"] for found in four_ranks]
    total = sum(each["sent"] for each in facts)
    # its part to the other rank of the first group, then each part to its copy
    wanted = facts[0]["model"] + facts[1]["own"]
    assert 0 <= total - wanted < 0.01 * facts[0]["model"]
    assert facts[2]["sent"] == facts[3]["sent"] == 0


EMPTY = """
import sys, torch, torch.distributed as dist
from safe_loading import meta_model, wrap_fsdp_meta_safe
from fsdp_cases import last_of_two_losses
dist.init_process_group("gloo")
def with_empty(model, device):
    for module in (model, model.model.layers[0]):
        for number, shape in enumerate([(0,), (0, 4)]):
            module.register_parameter(f"empty_{number}", torch.nn.Parameter(torch.empty(shape, device=device)))
    return model
losses = {}
for version in (2, 1):
    model = with_empty(meta_model(sys.argv[1]), "meta")
    wrapped = wrap_fsdp_meta_safe(model, sys.argv[1], version=version, init_new=lambda module: None)
    losses[version] = last_of_two_losses(wrapped)
report(losses=losses)
dist.destroy_process_group()
"""


def test_parameters_without_rows_are_sharded_as_torch_does(rank_server: RankServer, tmp_path: Path) -> None:
    kind, config = CASES["llama"]()
    torch.manual_seed(0)
    model = kind(config)
    model.save_pretrained(tmp_path)
    loss = last_of_two_losses(model)
    for found in rank_server.run(EMPTY, 2, args=[tmp_path]).found:
        assert found["losses"] == {"2": loss, "1": loss}
