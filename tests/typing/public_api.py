"""What a type checker sees of the public functions; tests/test_typing.py runs mypy and pyright over it."""

from __future__ import annotations

import peft
import torch
from typing_extensions import assert_type

import safe_loading
from safe_loading import (
    CheckpointReport,
    Finding,
    LoadReport,
    check_checkpoint,
    device_for_rank,
    load_adapter_on_rank,
    load_peft_on_rank,
    merge_lora_inplace,
)

assert_type(device_for_rank(), torch.device)
assert_type(device_for_rank(3), torch.device)

model = load_peft_on_rank("adapter", "base", device=0, dtype="auto")
assert_type(model, peft.PeftModel)
assert_type(load_peft_on_rank({"a": "one", "b": "two"}, active="b", dtype=torch.float16), peft.PeftModel)
load_peft_on_rank("adapter", dtype="float16")  # expect-error: dtype is a torch.dtype or "auto"
load_peft_on_rank("adapter", unknown=1)  # expect-error: every option is named

report = load_adapter_on_rank(model, "adapter", "name", hotswap=True)
assert_type(report, LoadReport)
assert_type(report.findings, tuple[Finding, ...])
assert_type(report.bytes, int)
report.device = "cpu"  # expect-error: reports are frozen

merged = merge_lora_inplace(model, adapter_names=["default"], scratch_bytes=1 << 20)
assert_type(merged, torch.nn.Module)

checked = check_checkpoint("folder")
assert_type(checked, CheckpointReport)
assert_type(checked.ok, bool)
try:
    load_peft_on_rank("adapter")
except safe_loading.AdapterError as error:
    assert_type(error.problems, tuple[str, ...])
