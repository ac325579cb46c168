"""The script of the tutorial about SFTTrainer, started by the real `accelerate launch` and by torchrun."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file
from torchrun import environment_of_ranks
from trainer_matrix import save_base

PAGE = Path(__file__).parents[2] / "docs" / "tutorials" / "fsdp_sft.md"
FSDP = ["--use_fsdp", "--fsdp_version", "2", "--fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP"]
FSDP += ["--fsdp_state_dict_type", "FULL_STATE_DICT", "--num_machines", "1", "--mixed_precision", "no"]


def launched(folder: Path, launcher: str, kind: str, *, lean: bool) -> str:
    """Run the script on two ranks; what they printed."""
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    code = (
        code if lean else code.replace("with load_at_prepare():", "if True:").replace("trainer.model.fsdp_report", "0")
    )
    told = "report_to=[], use_cpu=True, seed=3" + (", fsdp=True" if launcher == "torchrun" else "")
    (folder / "train.py").write_text(code.replace("report_to=[]", told))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    if launcher == "torchrun":
        command = ["torch.distributed.run", "--nproc-per-node=2", f"--master-port={port}"]
    else:
        command = ["accelerate.commands.launch", "--num_processes", "2", "--main_process_port", port, *FSDP]
    script = [str(Path(__file__).with_name("as_devices.py")), str(folder / "train.py")]
    output = folder / ("lean" if lean else "plain")
    command = [sys.executable, "-m", *command, *script, str(folder / "base"), str(output), kind]
    path = os.pathsep.join([str(Path(__file__).parent), environment_of_ranks()["PYTHONPATH"]])
    environment = {**environment_of_ranks(), "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(("launcher", "kind"), [("accelerate", "lora"), ("torchrun", "full"), ("accelerate", "qlora")])
def test_the_script_of_the_tutorial_gives_what_it_gives_without_the_line(
    tmp_path: Path, launcher: str, kind: str
) -> None:
    save_base(tmp_path / "base")
    said = launched(tmp_path, launcher, kind, lean=True)
    assert "FSDP2, rank 0 of 2 (2 shards) on cpu" in said
    assert "FSDP2, rank 1 of 2 (2 shards) on cpu" in said
    launched(tmp_path, launcher, kind, lean=False)
    (name,) = [path.name for path in (tmp_path / "lean").glob("*.safetensors")]
    own, plain = load_file(tmp_path / "lean" / name), load_file(tmp_path / "plain" / name)
    assert own.keys() == plain.keys()
    assert [key for key, tensor in own.items() if not tensor.equal(plain[key])] == []
    start = load_file(tmp_path / "base" / "model-00001-of-00006.safetensors") if kind == "full" else {}
    assert not any(own[key].equal(tensor) for key, tensor in start.items() if key in own)
