"""Two nodes of two ranks, by two agents of torchrun on loopback; and what was wrapped is saved and loaded again."""

from __future__ import annotations

import json
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest
from fsdp_cases import NOTHING, llama, reference, save
from rank_server import RankServer
from torchrun import OUT, PRELUDE

SCRIPT = """
import os, pathlib, sys, warnings
import torch, torch.distributed as dist
warnings.simplefilter("ignore")
from transformers import logging as transformers_logging
transformers_logging.set_verbosity_error()
transformers_logging.disable_progress_bar()
from fsdp_cases import *
from safe_loading import SafeLoadingError, wrap_fsdp_meta_safe

dist.init_process_group("gloo")
rank = dist.get_rank()
node = int(os.environ["GROUP_RANK"])
folder = pathlib.Path(sys.argv[1]) / f"node{node}"
one = reference(llama)
found = {}
for mesh in (None, (2, 2)):
    model = wrap_fsdp_meta_safe(on_meta(llama), folder / "llama", mesh=mesh)
    found[str(mesh)] = [differences(one, model, inputs("llama")), model.fsdp_report.bytes_read]
try:
    wrap_fsdp_meta_safe(on_meta(llama), folder / "lacking")
    error = None
except SafeLoadingError as refused:
    error = str(refused)
report(node=node, local=os.environ["LOCAL_RANK"], found=found, error=error)

# saved and loaded again: by torch.distributed.checkpoint into a model of another mesh, and by save_pretrained
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
shared = sys.argv[1] + "/shared"
model = wrap_fsdp_meta_safe(on_meta(llama), folder / "llama")
with torch.no_grad():
    for parameter in model.parameters():
        parameter.mul_(2)
dcp.save(get_model_state_dict(model), checkpoint_id=f"{shared}/dcp")
other = wrap_fsdp_meta_safe(on_meta(llama), folder / "llama", mesh=(2, 2))
state = get_model_state_dict(other)
dcp.load(state, checkpoint_id=f"{shared}/dcp")
set_model_state_dict(other, state)
doubled = {name: 2 * parameter for name, parameter in one.named_parameters()}
equal = all(torch.equal(whole(p), doubled[n]) for n, p in other.named_parameters())
other.save_pretrained(f"{shared}/saved")
dist.barrier()
again = type(one).from_pretrained(f"{shared}/saved", attn_implementation="eager")
saved = all(torch.equal(p, doubled[n]) for n, p in again.named_parameters())
third = wrap_fsdp_meta_safe(on_meta(llama), f"{shared}/saved", version=1)
report(round=[equal, saved, step(third, inputs("llama")).equal(step(again.train(), inputs("llama")))])
dist.destroy_process_group()
"""


# What torchrun does on each node, with ranks that are forked and not started: an agent of torch's own, which gives them
# their places. Run in one process for each node.
AGENT = """
import os, runpy, sys
from torch.distributed.launcher.api import LaunchConfig, launch_agent

node, (script, folder, port) = int(os.environ["RANK"]), sys.argv[1:]
for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"):
    del os.environ[name]
os.environ["TMPDIR"] = f"{folder}/tmp{node}"  # a node has a /tmp of its own

def rank_main():
    sys.argv = [script, folder]
    runpy.run_path(script, run_name="__main__")

launch_agent(
    LaunchConfig(
        min_nodes=2, max_nodes=2, nproc_per_node=2, run_id="two nodes",
        rdzv_backend="static", rdzv_endpoint=f"127.0.0.1:{port}",
        rdzv_configs={"rank": node}, start_method="fork", monitor_interval=0.05,
    ),
    rank_main,
    [],
)
"""


@pytest.fixture(scope="module")
def found(rank_server: RankServer, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder: Path = tmp_path_factory.mktemp("nodes")
    save(reference(llama), folder / "node0" / "llama")
    shutil.copytree(folder / "node0" / "llama", folder / "node1" / "llama")
    for node in (0, 1):
        shutil.copytree(folder / "node0" / "llama", folder / f"node{node}" / "lacking")
        (folder / f"tmp{node}").mkdir()
    sorted((folder / "node1" / "lacking").glob("*.safetensors"))[-1].unlink()
    (folder / "script.py").write_text(PRELUDE + SCRIPT)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    rank_server.run(AGENT, 2, args=[folder / "script.py", folder, str(port)], env={OUT: str(folder)}, timeout=200)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(4)]


def test_two_nodes_equal_one_process_and_read_once_a_group(found: list[dict[str, Any]]) -> None:
    assert [(facts["node"], facts["local"]) for facts in found] == [(0, "0"), (0, "1"), (1, "0"), (1, "1")]
    size = sum(parameter.nbytes for parameter in reference(llama).parameters())
    for mesh, groups in (("None", 1), ("(2, 2)", 2)):
        assert all(facts["found"][mesh][0] == NOTHING for facts in found)
        assert sum(facts["found"][mesh][1] for facts in found) == groups * size


def test_a_node_whose_folder_lacks_a_shard_makes_every_rank_raise(found: list[dict[str, Any]]) -> None:
    for facts in found:
        assert facts["error"] is not None
        assert "node1/lacking" in facts["error"]


def test_what_was_wrapped_is_saved_and_loaded_again(found: list[dict[str, Any]]) -> None:
    assert [facts["round"] for facts in found] == [[True, True, True]] * 4
