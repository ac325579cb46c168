"""Run a script with accelerate told that its gloo ranks are devices: ``accelerate launch as_devices.py train.py``."""

from __future__ import annotations

import runpy
import sys

import torch.distributed as dist
from trainer_matrix import tell_accelerate

if __name__ == "__main__":
    tell_accelerate()
    dist.init_process_group("gloo")
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
    dist.barrier()
    dist.destroy_process_group()
