"""Parameters that every rank keeps whole, scalars among them: trained on all ranks alike, as in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rank_server import RankServer

SCRIPT = """
import sys, torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import CLIPModel
from fsdp_cases import plain, whole
from tiny_models import saved, tiny_config
from safe_loading import assert_optimizer_sharded, meta_model, wrap_fsdp_meta_safe

dist.init_process_group("gloo")
rank, folder = dist.get_rank(), sys.argv[1]
if rank == 0:
    saved("CLIPModel", folder)
dist.barrier()

def loss_of(model, rank):  # of the rank's own two pairs
    torch.manual_seed(rank)
    size = tiny_config("CLIPModel").vision_config.image_size
    batch = {"input_ids": torch.randint(3, 200, (2, 8)), "pixel_values": torch.randn(2, 3, size, size)}
    return model(**batch, return_loss=True).loss

def trained(model, ranks):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        for part in range(2):  # two batches before a step
            (sum(loss_of(model, 2 * part + rank) for rank in ranks) / len(ranks)).backward()
        optimizer.step()
    return optimizer

one = CLIPModel.from_pretrained(folder)
trained(one, [0, 1])
meshes = {"1": (1, None), "2": (2, None)}
meshes["replicas"] = (2, init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp_replicate", "fsdp")))
for name, (version, mesh) in meshes.items():
    for how in ("a scalar", "a weight", "unfrozen after the wrap"):
        kept = None if how == "a scalar" else ["text_projection"]
        model = meta_model(folder, CLIPModel)
        whole_ones = ("logit_scale", "text_projection.weight") if how == "unfrozen after the wrap" else ()
        for each in whole_ones:
            model.get_parameter(each).requires_grad_(False)
        model = wrap_fsdp_meta_safe(model, folder, version=version, mesh=mesh, ignored_params=kept)
        for each_name, each in model.named_parameters():
            if plain(each_name) in whole_ones:
                each.requires_grad_(True)
        optimizer = trained(model, [rank])
        if version == 2:
            assert_optimizer_sharded(optimizer, model)
        model.save_pretrained(f"{folder} {name} {how}")
        again = CLIPModel.from_pretrained(f"{folder} {name} {how}")
        mine = {plain(name): each for name, each in model.named_parameters()}
        report(**{f"{name} {how}": {
            "ignored": list(model.fsdp_report.ignored),
            "equal": {each: torch.equal(whole(mine[each]), one.get_parameter(each))
                      for each in ("logit_scale", "text_projection.weight")
                      if version == 2 or kept is not None or each == "logit_scale"},
            "trained": float(mine["logit_scale"]) != 2.6592,
            "saved": torch.equal(again.logit_scale, mine["logit_scale"]),
        }})
"""


@pytest.fixture(scope="module")
def found(rank_server: RankServer, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder: Path = tmp_path_factory.mktemp("whole") / "clip"
    return rank_server.run(SCRIPT, 2, args=[folder], timeout=300).found


@pytest.mark.parametrize("kept", ["a scalar", "a weight", "unfrozen after the wrap"])
@pytest.mark.parametrize("how", ["1", "2", "replicas"])
def test_what_every_rank_keeps_whole_is_trained_alike(found: list[dict[str, Any]], how: str, kept: str) -> None:
    for rank in found:
        facts = rank[f"{how} {kept}"]
        assert facts["ignored"] == ["logit_scale"] + ([] if kept == "a scalar" else ["text_projection.weight"])
        assert facts["trained"]
        assert facts["saved"]
        assert all(facts["equal"].values()), facts
