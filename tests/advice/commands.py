"""The advice on the command line and of the doctor, and the test that takes each."""

from __future__ import annotations

from .reasons import HELP, OUTSIDE

_RUN = "commands/test_command_advice.py::test_a_line_is_run_once_the_advice_is_taken"
_DOCTOR = "commands/test_doctor.py::"
_CHECKED = "commands/test_main.py::test_check_of_a_bad_folder_lists_the_faults_and_leaves_with_1"

TAKEN: dict[str, dict[str, str]] = {
    "_commands/verify.py": {"run the base's own code": HELP},
    "_commands/audit.py": {"run the repository's own code": HELP, "save the adapter with random values": HELP},
    "_commands/check.py": {
        "check that a checkpoint is complete": HELP,
        "check runs/adapter": HELP,
        "read every tensor": HELP,
        "read every file": HELP,
    },
    "_commands/demo.py": {"keep the checkpoints": HELP, "name a new folder": _RUN},
    "_commands/merge.py": {
        "merge LoRA adapters into their base": HELP,
        "merge meta-llama/Llama-3-8B": HELP,
        "write a quantized base as a plain one": HELP,
        "write a SHA256SUMS": HELP,
        "read adapters that were saved as .bin": HELP,
        "make the repository of --push-to-hub": HELP,
        "rename the adapters' keys": HELP,
        "run the base's own code": HELP,
    },
    "_commands/plan.py": {
        "plan a device map": HELP,
        "plan meta-llama/Llama-3-8B": HELP,
        "load evenly": HELP,
        "run the repository's own code": HELP,
        "write one limit per device": _RUN,
        "plan for cards": HELP,
        "drop one of them": _RUN,
        "write a number of cards": _RUN,
        "drop --offload and --max-memory": _RUN,
    },
    "_commands/predict.py": {
        "train a LoRA": HELP,
        "keep FSDP's shards": HELP,
        "keep what is saved": HELP,
        "write the bars": HELP,
        "run the repository's own code": HELP,
        "write whole numbers": _RUN,
        "name the card": _RUN,
        "give one of them": _RUN,
        "write ROWSxTOKENS": _RUN,
        "write r=16": _RUN,
    },
    "_commands/grpo.py": {
        "write --train": _RUN,
        "drop --gpus": _RUN,
        "drop --packing": _RUN,
        "pass --steps-per-generation": _RUN,
        "add --beta 0.04": _RUN,
    },
    "_commands/quantization.py": {
        "quantize the base": HELP,
        "write major and minor": _RUN,
        "pass one of {}": _RUN,
    },
    "_commands/training.py": {"write ROWSxTOKENS": _RUN, "add {}, or drop it": _RUN},
    "_commands/doctor.py": {"check this machine": HELP},
    "_doctor/devices.py": {
        "correct the variable": f"{_DOCTOR}test_hidden_devices_and_too_many_ranks_are_told",
        "start at most {} ranks": "ranks/test_rank_advice.py::test_more_ranks_than_devices",
        "install it again": OUTSIDE,
    },
    "_doctor/disks.py": {
        "name a folder": f"{_DOCTOR}test_an_output_that_cannot_be_written_is_told",
        "load from a local disk": OUTSIDE,
        "free some space": OUTSIDE,
    },
    "_doctor/versions.py": {"run `python -m safe_loading check DIR`": _CHECKED},
}
