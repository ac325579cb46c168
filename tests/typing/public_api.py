"""What a type checker sees of the public functions; tests/test_typing.py runs mypy and pyright over it."""

from __future__ import annotations

import peft
import torch
import transformers
from typing_extensions import assert_type

import safe_loading
from safe_loading import (
    AuditReport,
    CheckpointReport,
    Finding,
    FsdpReport,
    InplaceMergeReport,
    LoadReport,
    MemoryForecast,
    MemoryGuard,
    MergeCheck,
    Transparent,
    Workload,
    WrapReport,
    attach_head,
    audit_model,
    check_checkpoint,
    device_for_rank,
    fewest_ranks,
    largest_micro_batch,
    load_adapter_on_rank,
    load_at_prepare,
    load_peft_on_rank,
    merge_lora_checkpoint,
    merge_lora_inplace,
    meta_model,
    predict_memory,
    prepare_and_wrap,
    unwrap_transparent,
    verify_merge,
    wrap_fsdp_meta_safe,
    wrap_transparent,
)

assert_type(device_for_rank(), torch.device)
assert_type(device_for_rank(3), torch.device)

model = load_peft_on_rank("base", "adapter", device=0, dtype="auto")
as_peft_knows_it: peft.PeftModel = model
assert_type(model.load_report, LoadReport)
assert_type(load_peft_on_rank({"a": "one", "b": "two"}, active="b", dtype=torch.float16).load_report.ok, bool)
load_peft_on_rank("adapter", dtype=16)  # expect-error: dtype is a torch.dtype or its name
engine_names = load_peft_on_rank("adapter", torch_dtype="auto", device_map={"": 0}, attn_implementation="sdpa")
assert_type(engine_names.load_report.parts[0].bytes, int)
load_peft_on_rank("adapter", revision="main")  # expect-error: of the base, or of the adapter
load_peft_on_rank("adapter", trust_remote_code="yes")  # expect-error: names of the engines have types too
load_peft_on_rank("adapter", unknown=1)  # expect-error: every option is named

report = load_adapter_on_rank(model, "adapter", "name", hotswap=True)
assert_type(report, LoadReport)
assert_type(report.findings, tuple[Finding, ...])
assert_type(report.bytes, int)
report.device = "cpu"  # expect-error: reports are frozen

merged = merge_lora_inplace(model, adapter_names=["default"], scratch_bytes=1 << 20)
as_torch_knows_it: torch.nn.Module = merged
assert_type(merged.merge_report, InplaceMergeReport)

wrapped = wrap_fsdp_meta_safe(model, "folder", version=2, mesh=(2, 2), auto_wrap_policy=["layers.*"])
assert_type(wrapped.fsdp_report, FsdpReport)
assert_type(meta_model("folder", dtype=torch.bfloat16), torch.nn.Module)
with load_at_prepare(verify="bytes", timeout=60) as nothing:
    assert_type(nothing, None)
written = merge_lora_checkpoint("base", ["one", "two"], "output", dtype=torch.bfloat16, max_shard_size="5GB")
assert_type(written.bytes_written, int)
assert_type(written.tensors[0].max_delta, float | None)
merge_lora_checkpoint("base", "adapter", "output", torch_dtype="bfloat16", token=True, trust_remote_code=False)
merge_lora_checkpoint("base", "adapter")  # expect-error: it says where it writes
assert_type(verify_merge("base", ["one", "two"], "merged", adapter_weights=[0.5, 1.0]), MergeCheck)
verify_merge("base", "adapter")  # expect-error: it says which folder is judged


class Mine(Transparent):
    def __call__(self, *args: object, **kwargs: object) -> object:
        assert_type(self.training, bool)  # a mixin sees the model that it goes around
        return super().__call__(*args, **kwargs)


assert_type(wrap_transparent(model, Mine, coefficient=0.1).load_report, LoadReport)
assert_type(unwrap_transparent(model).load_report, LoadReport)
assert_type(attach_head(model, "value_head", torch.nn.Linear(2, 1)).load_report, LoadReport)


def whole_order(base: transformers.PreTrainedModel) -> None:
    assert_type(prepare_and_wrap(base, peft.LoraConfig(), Mine, coefficient=0.1), peft.PeftModel)


assert_type(WrapReport("Model", (), ()).ok, bool)
wrap_transparent(model, torch.nn.Linear)  # expect-error: a mixin derives from Transparent

checked = check_checkpoint("folder", values=True)
assert_type(checked, CheckpointReport)
assert_type(checked.ok, bool)
try:
    load_peft_on_rank("adapter")
except safe_loading.AdapterError as error:
    assert_type(error.problems, tuple[str, ...])

assert_type(Workload.train(4, 1024, gradient_checkpointing=True, optimizer="sgd"), Workload)
Workload.generate(4, 1024, unknown=1)  # expect-error: every option is named

plan = safe_loading.plan_device_map("base", {0: "20GiB"}, workload=Workload.weights_only(), verify=False)
assert_type(plan, safe_loading.DeviceMapPlan)
assert_type(plan.verified, bool)
assert_type(plan.stages()[0].modules, tuple[str, ...])
assert_type(plan.node_crossings, int)
assert_type(safe_loading.fewest_cards("base", "h100"), safe_loading.DeviceMapPlan)
safe_loading.plan_device_map("base", {0: 1, 1: 1}, nodes=[[0], [1]])
assert_type(safe_loading.limit_device_memory({0: "20GiB"}), dict[int, float])
safe_loading.plan_device_map("base", torch_dtype=torch.bfloat16, no_split_module_classes=["LlamaDecoderLayer"])
safe_loading.plan_device_map("base", unknown=1)  # expect-error: every option is named
forecast = predict_memory("folder", Workload.train(4, 1024), inputs={"pixel_values": torch.empty(1)})
assert_type(forecast, MemoryForecast)
predict_memory("folder", Workload.train(4, 1024), spread=safe_loading.Spread.fsdp2(8, param_dtype="bfloat16"))
assert_type(forecast.allocated_peak_bytes, int)
assert_type(forecast.fits(1), bool)
assert_type(largest_micro_batch("folder", Workload.train(1, 8), 1 << 30), MemoryForecast)
assert_type(fewest_ranks("folder", Workload.train(1, 8), "h100", safe_loading.Spread.fsdp2(1)), MemoryForecast)
predict_memory("folder", Workload.train(4, 1024), card="T4")  # expect-error: every option is named
assert_type(audit_model(torch.nn.Linear(2, 2)), AuditReport)
assert_type(audit_model("folder").findings, tuple[Finding, ...])
with MemoryGuard() as guard:
    assert_type(guard.step().growth_bytes, int)
