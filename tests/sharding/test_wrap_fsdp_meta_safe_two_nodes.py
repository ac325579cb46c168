"""Two nodes of two ranks, by two torchrun agents on loopback; and what was wrapped is saved and loaded again."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fsdp_cases import NOTHING, llama, reference, save
from torchrun import ENVIRONMENT, OUT, PRELUDE, import_path

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


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder: Path = tmp_path_factory.mktemp("nodes")
    save(reference(llama), folder / "node0" / "llama")
    shutil.copytree(folder / "node0" / "llama", folder / "node1" / "llama")
    for node in (0, 1):
        shutil.copytree(folder / "node0" / "llama", folder / f"node{node}" / "lacking")
    sorted((folder / "node1" / "lacking").glob("*.safetensors"))[-1].unlink()
    (folder / "script.py").write_text(PRELUDE + SCRIPT)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    agents = []
    environment = {**os.environ, **ENVIRONMENT, OUT: str(folder), "PYTHONPATH": import_path()}
    with (folder / "output.txt").open("w+") as output:
        for node in (0, 1):
            command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2"]
            command += [f"--node-rank={node}", "--master-addr=127.0.0.1", f"--master-port={port}"]
            # a node has a /tmp of its own
            (folder / f"tmp{node}").mkdir()
            own = {**environment, "TMPDIR": str(folder / f"tmp{node}")}
            command += [str(folder / "script.py"), str(folder)]
            agents.append(subprocess.Popen(command, env=own, stdout=output, stderr=output, start_new_session=True))
        try:
            codes = [agent.wait(200) for agent in agents]
        finally:
            for agent in agents:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(agent.pid, signal.SIGKILL)
                agent.wait()
        output.seek(0)
        assert codes == [0, 0], output.read()[-6000:]
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
