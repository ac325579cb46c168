"""Which device a rank has on CUDA, which are refused, and what is known of them without a context."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from models import save_adapter, save_llama

if TYPE_CHECKING:
    from pathlib import Path

    from cuda_runs import CudaRunner

pytestmark = pytest.mark.gpu

REFUSED = """
    from safe_loading import SafeLoadingError, device_for_rank, limit_device_memory
    from safe_loading._ranks.device_guard import own_device
    count = torch.cuda.device_count()

    def refused(call, *arguments):
        try:
            return str(call(*arguments))
        except SafeLoadingError as error:
            return f"{type(error).__name__}: {error}"

    names = ("cuda", "cpu", "cpu:1", "meta", "xpu:0", True, -1, count)
    named = {str(name): refused(own_device, name) for name in names}
    absent = refused(limit_device_memory, {0: "1GiB", count: "1GiB"})
    os.environ.update(LOCAL_RANK=str(count), LOCAL_WORLD_SIZE=str(count + 1))
    report(named=named, cap=absent, rank=refused(device_for_rank), contexts=contexts(), count=count)
"""


def test_devices_that_are_not_there_are_refused_and_none_is_touched(cuda: CudaRunner) -> None:
    facts = cuda.run(REFUSED)
    named, count = facts["named"], facts["count"]
    assert (named["cuda"], named["cpu"]) == ("cuda:0", "cpu")
    assert "the only CPU device is 'cpu'" in named["cpu:1"]
    assert "holds no values" in named["meta"]
    assert "the accelerator here is 'cuda'" in named["xpu:0"]
    assert "True is not a device" in named["True"]
    for number in ("-1", str(count)):
        assert f"{count} cuda device(s) are visible: 0 to {count - 1}" in named[number]
    assert f"max_memory names [{count}], and this process sees {count} devices" in facts["cap"]
    assert "DeviceError" in facts["rank"]
    assert facts["contexts"] == []


HIDDEN = """
    from safe_loading import device_for_rank
    from safe_loading._doctor.devices import read_devices
    devices, findings = read_devices()
    report(device=str(device_for_rank()), kind=devices.kind, seen=len(devices.seen))
    report(codes=[finding.code for finding in findings])
"""


def test_a_variable_that_names_no_card_is_told(cuda: CudaRunner) -> None:
    facts = cuda.run(HIDDEN, env={"CUDA_VISIBLE_DEVICES": "77"})
    assert (facts["device"], facts["kind"], facts["seen"], facts["codes"]) == ("cpu", "cpu", 0, ["devices-hidden"])


WITHOUT_NVIDIA_SMI = """
    from safe_loading import Workload, plan_device_map
    os.environ["PATH"] = ""
    plan = plan_device_map(sys.argv[1], workload=Workload.generate(1, 16))
    report(limits=[use.limit for use in plan.devices], contexts=contexts())
    report(sizes=[torch.cuda.get_device_properties(use.device).total_memory for use in plan.devices])
"""


def test_without_nvidia_smi_a_card_counts_with_all_its_memory(cuda: CudaRunner, tiny_llama: Any) -> None:
    facts = cuda.run(WITHOUT_NVIDIA_SMI, args=[tiny_llama])
    assert facts["limits"] == facts["sizes"] != []
    assert facts["contexts"] == []


SHARED = """
    import torch.distributed as dist
    from safe_loading import DeviceError, load_peft_on_rank, meta_model, wrap_fsdp_meta_safe
    base, adapter = sys.argv[1:]
    dist.init_process_group("nccl")

    def refused(call, *arguments, **how):
        try:
            return call(*arguments, **how) and None
        except DeviceError as error:
            return str(error)

    report(load=refused(load_peft_on_rank, adapter, base), wrap=refused(wrap_fsdp_meta_safe, meta_model(base), base))
    report(named=refused(load_peft_on_rank, adapter, base, device=0), contexts=contexts())
    dist.destroy_process_group()
"""


def test_ranks_that_see_one_card_between_them_share_it_by_name_alone(
    simulated_cuda: CudaRunner, tmp_path: Path
) -> None:
    """A launcher that lists one card for all: NCCL refuses two ranks on one card, but at the first all-gather only."""
    base = save_llama(tmp_path / "base")
    adapter = save_adapter(tmp_path / "adapter", base)
    for facts in simulated_cuda.run_ranks(SHARED, 2, args=[base, adapter], env={"CUDA_VISIBLE_DEVICES": "1"}):
        for verb in ("load", "wrap"):
            assert facts[verb].startswith("Several ranks have the same device")
            assert "ranks [0, 1] own " in facts[verb]
        assert (facts["named"], facts["contexts"]) == (None, [0])


DEFAULT = """
    from safe_loading import load_peft_on_rank
    torch.set_default_device("cuda:1")
    model = load_peft_on_rank(*sys.argv[1:])
    devices = {str(tensor.device) for tensor in (*model.parameters(), *model.buffers())}
    report(devices=sorted(devices), contexts=contexts())
"""


def test_a_single_process_loads_onto_its_default_device(cuda: CudaRunner, tmp_path: Path) -> None:
    base = save_llama(tmp_path / "base")
    facts = cuda.run(DEFAULT, args=[base, save_adapter(tmp_path / "adapter", base)])
    assert (facts["devices"], facts["contexts"]) == (["cuda:1"], [1])
