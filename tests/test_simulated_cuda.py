"""The rules of the simulated CUDA: what other tests conclude from it is only as good as these."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from cuda_runs import CudaRunner

pytestmark = pytest.mark.gpu
SOURCES = Path(__file__).parent / "simulated_cuda" / "libraries"
MiB = 1 << 20

# Contexts last as long as their process, so the order counts: each line may only add to what the one before has made.
CONTEXTS = """
    import subprocess, threading
    report(counted=[torch.cuda.device_count(), torch.cuda.is_available(), contexts()])
    report(properties=[torch.cuda.get_device_properties(1).total_memory, contexts()])
    report(named=[torch.device("cuda", 1).index, contexts()])
    held = torch.empty(1000, device="cuda:2")
    report(allocated=contexts(), current=torch.cuda.current_device())
    with torch.cuda.device(3):
        report(guarded=[torch.cuda.current_device(), contexts()])
    report(after_guard=[torch.cuda.current_device(), contexts()])
    torch.cuda.set_device(5)
    report(set_device=contexts())
    seen = []
    thread = threading.Thread(target=lambda: seen.append(torch.empty(1, device="cuda").device.index))
    thread.start(), thread.join()
    report(thread=[seen, torch.cuda.current_device(), contexts()])
    copied = held.to("cuda:6")
    report(peer_copy=contexts())
    smi = subprocess.run(["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"],
                         capture_output=True, text=True, check=True).stdout.split()
    report(smi=[int(smi[0].rstrip(",")) == os.getpid(), len(smi) // 2, int(smi[1])])
"""


def test_what_makes_a_context(simulated_cuda: CudaRunner) -> None:
    facts = simulated_cuda.run(CONTEXTS, env={"SIMCUDA_DEVICES": "8", "SIMCUDA_CONTEXT": "300M"})
    assert facts["counted"] == [8, True, []]
    assert facts["properties"][1] == facts["named"][1] == []
    assert facts["allocated"] == [2]
    assert facts["current"] == 0
    assert facts["guarded"] == [3, [2, 3]]
    assert facts["after_guard"] == [0, [2, 3]]  # going back to a device without a context makes none
    assert facts["set_device"] == [2, 3, 5]
    assert facts["thread"] == [[0], 5, [0, 2, 3, 5]]  # the current device belongs to a thread
    # torch 2.13: the first copy between two devices makes events on every device (aten/src/ATen/native/cuda/Copy.cu)
    assert facts["peer_copy"] == list(range(8))
    assert facts["smi"] == [True, 8, 302]  # the thread's block on cuda:0 besides


MEMORY = """
    def sizes(device):
        return [torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device),
                torch.cuda.mem_get_info(device)[1] - torch.cuda.mem_get_info(device)[0]]
    MiB = 1 << 20
    empty = torch.empty(0, device="cuda:1")
    report(context=sizes(1))
    small = torch.empty(1000, dtype=torch.uint8, device="cuda:1")
    report(small=sizes(1))
    large = torch.empty(3 * MiB, dtype=torch.uint8, device="cuda:1")
    report(large=sizes(1))
    huge = torch.empty(24 * MiB, dtype=torch.uint8, device="cuda:1")
    report(huge=sizes(1))
    del huge, large
    report(freed=sizes(1), peak=[torch.cuda.max_memory_allocated(1), torch.cuda.max_memory_reserved(1)])
    torch.cuda.empty_cache()
    report(emptied=sizes(1))
    def tried(size):
        try:
            return bool(torch.empty(size, dtype=torch.uint8, device="cuda:1").numel())
        except torch.OutOfMemoryError as error:
            return "CUDA out of memory" in str(error) and "GPU 1" in str(error) and "no"
    free = torch.cuda.mem_get_info(1)[0]
    report(full=[tried(free + MiB), tried(free - 2 * MiB)])
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(0.5, 1)
    total = torch.cuda.get_device_properties(1).total_memory
    report(capped=[tried(total // 2), tried(total // 2 - 4 * MiB)])
    segments = torch.cuda.memory._snapshot(1)["segments"]
    report(snapshot=sum(each["total_size"] for each in segments), reserved=torch.cuda.memory_reserved(1))
"""


def test_the_allocator_is_the_real_one(simulated_cuda: CudaRunner) -> None:
    """The rules of torch's c10/cuda/CUDACachingAllocator.cpp: blocks of 512 bytes, segments of 2 and 20 MiB."""
    facts = simulated_cuda.run(MEMORY, env={"SIMCUDA_MEMORY": "1G", "SIMCUDA_CONTEXT": "100M"})
    assert facts["context"] == [0, 0, 100 * MiB]
    assert facts["small"] == [1024, 2 * MiB, 102 * MiB]
    assert facts["large"] == [1024 + 3 * MiB, 22 * MiB, 122 * MiB]
    assert facts["huge"] == [1024 + 27 * MiB, 46 * MiB, 146 * MiB]
    assert facts["freed"] == [1024, 46 * MiB, 146 * MiB]
    assert facts["peak"] == [1024 + 27 * MiB, 46 * MiB]
    assert facts["emptied"] == [1024, 2 * MiB, 102 * MiB]
    assert facts["full"] == facts["capped"] == ["no", True]
    assert facts["snapshot"] == facts["reserved"]


EXPANDABLE = """
    held = torch.empty(30 << 20, dtype=torch.uint8, device="cuda:1")
    more = torch.empty(13 << 20, dtype=torch.uint8, device="cuda:1")
    kinds = {segment["is_expandable"] for segment in torch.cuda.memory._snapshot(1)["segments"]}
    report(expandable=list(kinds), reserved=torch.cuda.memory_reserved(1))
    held.fill_(1), more.fill_(2)
    report(values=[int(held[-1]), int(more[0]), int(more[-1])])
    del held
    torch.cuda.empty_cache()
    report(emptied=torch.cuda.memory_reserved(1))
"""


def test_expandable_segments(simulated_cuda: CudaRunner) -> None:
    env = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    facts = simulated_cuda.run(EXPANDABLE, env=env)
    assert facts["expandable"] == [True]
    assert facts["reserved"] == 60 * MiB  # in pages of 20 MiB
    assert facts["values"] == [1, 2, 2]
    assert facts["emptied"] == 40 * MiB


# The variable is read at the first use, so each case is a fork that has not used a device.
VISIBLE = """
    def last(listed):
        os.environ["CUDA_VISIBLE_DEVICES"] = listed
        names = [str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count())]
        return [int(name[-2:]) for name in names]
    for listed in sys.argv[1:]:
        case(lambda: last(listed), listed or "nothing")
"""
SEEN = {"2,0": [2, 0], "GPU-fa4ec0da-0000-4000-8000-000000000003": [3], "1,7,0": [1], "": []}


def test_visible_devices(simulated_cuda: CudaRunner) -> None:
    facts = simulated_cuda.run(VISIBLE, args=list(SEEN), fresh=True)
    assert {listed: facts[listed or "nothing"] for listed in SEEN} == SEEN


def test_the_host_cannot_read_device_memory(simulated_cuda: CudaRunner) -> None:
    script = 'import ctypes\nctypes.string_at(torch.ones(4, device="cuda:1").data_ptr(), 4)\nreport(read=True)'
    facts = simulated_cuda.run(script, check=False)
    assert facts == {"code": -11}


VALUES = """
    torch.manual_seed(0)
    functional = torch.nn.functional

    def both(function, *tensors):
        results = []
        for device in ("cpu", "cuda:1"):
            own = [t.detach().to(device).requires_grad_(t.is_floating_point()) for t in tensors]
            made = function(*own)
            if made.requires_grad:
                made.float().sum().backward()
            results.append([made.detach().cpu(), *(t.grad.cpu() for t in own if t.grad is not None)])
        return all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(*results, strict=True))

    x, w = torch.randn(4, 8), torch.randn(6, 8)
    q, k = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8)
    sdpa = lambda q, k: functional.scaled_dot_product_attention(q, k, k, is_causal=True, enable_gqa=True)
    report(equal={
        "matmul": both(functional.linear, x, w),
        "norm": both(lambda x: functional.layer_norm(x, (8,)), x),
        "softmax": both(lambda x: x.softmax(-1).square(), x),
        "index": both(lambda x: x[x[:, 0] > 0].cumsum(0), x),
        "sdpa": both(sdpa, q, k),
        "logsigmoid": both(functional.logsigmoid, x),
        "loss": both(lambda x: functional.cross_entropy(x, torch.arange(4, device=x.device)), x),
    })
    on = torch.arange(10, device="cuda:1")
    report(items=[on.sum().item(), on.nonzero().numel(), on.tolist()[-1], bool((on > 3).any())])
    before = torch.get_rng_state()
    drawn = torch.randn(1000, device="cuda:1")
    report(random=[torch.equal(before, torch.get_rng_state()), 0.8 < float(drawn.std()) < 1.2, contexts()])
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit
    back = dequantize_4bit(*quantize_4bit(torch.randn(64, 64, device="cuda:1"), quant_type="nf4"))
    report(four_bits=[bool(back.abs().max() > 1), str(back.device), contexts()])
"""


def test_values(simulated_cuda: CudaRunner) -> None:
    facts = simulated_cuda.run(VALUES, env={"SIMCUDA_VALUES": "all"})
    assert all(facts["equal"].values()), facts["equal"]
    assert facts["items"] == [45, 9, 9, True]
    assert facts["random"] == [True, True, [1]]
    assert facts["four_bits"][:2] == [True, "cuda:1"]


MASKED = """
    rows = torch.randn(64, 256, device="cuda:0", requires_grad=True)  # more bytes than the limit
    mask = torch.zeros(64, 1, dtype=torch.bool, device="cuda:0")
    mask[3:7] = True
    filling = torch.randn(4, 256, device="cuda:0", requires_grad=True)
    filled = rows.masked_scatter(mask, filling)
    filled.sum().backward()  # selects by the mask, in a thread of autograd's
    report(grads=[list(filling.grad.shape), list(rows.grad.shape)], selected=rows[mask[:, 0]].shape[0])
"""


def test_with_a_limit_masks_still_select_what_they_say(simulated_cuda: CudaRunner) -> None:
    facts = simulated_cuda.run(MASKED, env={"SIMCUDA_VALUES": "1024"})
    assert facts["grads"] == [[4, 256], [64, 256]]
    assert facts["selected"] == 4


BUSY = """
    import threading
    from pathlib import Path
    def work():
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text("pt_autograd_0")
        sum(range(20_000_000))
        report(worked=True)
    threading.Thread(target=work, daemon=True).start()
"""


@pytest.mark.parametrize("values", ["all", "1024"])
def test_a_process_ends_after_the_threads_of_autograd(simulated_cuda: CudaRunner, values: str) -> None:
    """One that waits for Python's lock as Python ends aborts the process; a daemon of that name shows the wait."""
    assert simulated_cuda.run(BUSY, env={"SIMCUDA_VALUES": values}, fresh=True).get("worked")


SHARED = """
    import signal, subprocess, time
    def used():
        lines = subprocess.run(["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"],
                               capture_output=True, text=True, check=True).stdout.splitlines()
        return sorted(int(line.split(",")[1]) for line in lines)
    held = torch.empty(300 << 20, dtype=torch.uint8, device="cuda:0")
    holds = "import torch, time; x = torch.empty(500 << 20, dtype=torch.uint8, device='cuda:0'); "
    waits = "print('on', flush=True); time.sleep(600)"
    other = subprocess.Popen([sys.executable, "-c", holds + waits], stdout=subprocess.PIPE)
    other.stdout.readline()
    report(both=used(), free=torch.cuda.mem_get_info(0)[0])
    def fits():
        try:
            return torch.empty(400 << 20, dtype=torch.uint8, device="cuda:0").numel() > 0
        except torch.OutOfMemoryError:
            return False
    report(beside=fits())
    other.kill(), other.wait()
    report(alone=used(), after=fits())
"""


def test_processes_share_the_cards(simulated_cuda: CudaRunner) -> None:
    facts = simulated_cuda.run(SHARED, env={"SIMCUDA_MEMORY": "1200M", "SIMCUDA_CONTEXT": "100M"})
    assert facts["both"] == [400, 600]
    assert facts["free"] == 200 * MiB
    assert not facts["beside"]
    assert facts["alone"] == [400]  # a process that was killed holds nothing
    assert facts["after"]


COLLECTIVES = """
    import time, torch.distributed as dist
    rank, world = int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    wrong = []
    def check(name, got, right):
        if not torch.equal(got.cpu().double(), torch.as_tensor(right).double()):
            wrong.append(name)
    def full(size, value, dtype=torch.float32):
        return torch.full((size,), value, dtype=dtype, device="cuda")
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8):
        x = (torch.arange(900) % 50).to("cuda", dtype) + rank
        dist.all_reduce(x)
        check(f"all_reduce {dtype}", x, (torch.arange(900) % 50) * world + sum(range(world)))
    for op, right in (("MAX", world - 1), ("MIN", 0), ("AVG", (world - 1) / 2)):
        x = full(600_000, float(rank))  # several chunks
        dist.all_reduce(x, op=getattr(dist.ReduceOp, op))
        check(op, x, torch.full((600_000,), float(right)))
    x = full(5, 2.0)
    dist.all_reduce(x, op=dist._make_nccl_premul_sum(0.25))
    check("premultiplied", x, torch.full((5,), 0.5 * world))
    out = torch.empty(world * 500_001, device="cuda")
    dist.all_gather_single(out, full(500_001, float(rank)))
    check("all_gather", out, torch.arange(world).repeat_interleave(500_001))
    out = torch.empty(400_001, device="cuda")
    dist.reduce_scatter_single(out, torch.arange(world * 400_001.0, device="cuda"))
    check("reduce_scatter", out, world * torch.arange(world * 400_001.0)[rank * 400_001 : (rank + 1) * 400_001])
    x = full(7, float(rank))
    dist.broadcast(x, 1)
    check("broadcast", x, torch.ones(7))
    out = torch.empty(world * 2, device="cuda")
    dist.all_to_all_single(out, torch.arange(world * 2.0, device="cuda") + 100 * rank)
    check("all_to_all", out, torch.cat([torch.tensor([2.0 * rank, 2.0 * rank + 1]) + 100 * r for r in range(world)]))
    got = torch.empty(600_000, device="cuda")
    messages = [dist.P2POp(dist.isend, full(600_000, float(rank)), (rank + 1) % world),
                dist.P2POp(dist.irecv, got, (rank - 1) % world)]
    [work.wait() for work in dist.batch_isend_irecv(messages)]
    check("messages", got, torch.full((600_000,), float((rank - 1) % world)))
    pairs = [dist.new_group([0, 1]), dist.new_group([1, 2])]
    if rank < 2:
        x = full(3, float(rank + 1))
        dist.all_reduce(x, group=pairs[0])
        check("group", x, torch.full((3,), 3.0))
    objects = [None] * world
    dist.all_gather_object(objects, {"rank": rank})
    check("objects", torch.tensor([each["rank"] for each in objects]), torch.arange(world))
    # the host goes on while the others have not come
    dist.barrier()
    if rank:
        time.sleep(1)
    x, start = full(4, 1.0), time.monotonic()
    work = dist.all_reduce(x, async_op=True)
    report(asynchronous=[time.monotonic() - start < 0.5, work.is_completed() or rank > 0])
    work.wait()
    check("after waiting", x, torch.full((4,), float(world)))
    report(wrong=wrong, contexts=contexts())
    dist.destroy_process_group()
"""


def test_collectives_between_ranks(simulated_cuda: CudaRunner) -> None:
    for rank, facts in enumerate(simulated_cuda.run_ranks(COLLECTIVES, 3, env={"SIMCUDA_VALUES": "all"})):
        assert facts["wrong"] == []
        assert facts["contexts"] == [rank]
        assert facts["asynchronous"] == [True, rank > 0]


DUPLICATE = """
    import torch.distributed as dist
    torch.cuda.set_device(0)
    try:
        dist.init_process_group("nccl", device_id=torch.device("cuda", 0))
    except Exception as error:
        report(error=str(error))
    os._exit(0)
"""


def test_two_ranks_on_one_device_are_refused(simulated_cuda: CudaRunner) -> None:
    for facts in simulated_cuda.run_ranks(DUPLICATE, 2):
        assert "invalid usage" in facts["error"]
        assert "Duplicate GPU" in facts["error"]


def headers() -> Path | None:
    """The folder of NVIDIA's headers, from the package nvidia-cuda-runtime."""
    spec = importlib.util.find_spec("nvidia")
    folders = [] if spec is None else list(spec.submodule_search_locations or ())
    found = [Path(folder) / "cu13" / "include" for folder in folders]
    return next((path for path in found if (path / "cuda_runtime_api.h").is_file()), None)


@pytest.mark.usefixtures("simulated_cuda")
@pytest.mark.parametrize("change", [None, ("size_t pitch;", "size_t pitch; int more;"), ("MEMORY = 2", "MEMORY = 3")])
def test_sizes_and_offsets_are_those_of_the_headers(change: tuple[str, str] | None, tmp_path: Path) -> None:
    include = headers()
    if include is None:
        pytest.skip("no nvidia-cuda-runtime, whose headers these are (make_venv.py installs it where it can)")
    abi = (SOURCES / "abi.h").read_text()
    if change is not None:  # the check can fail
        assert change[0] in abi
        abi = abi.replace(*change)
    (tmp_path / "abi.h").write_text(abi)
    (tmp_path / "check_abi.c").write_text((SOURCES / "check_abi.c").read_text())
    command = ["gcc", "-c", tmp_path / "check_abi.c", f"-I{tmp_path}", f"-I{include}", "-o", tmp_path / "out.o"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode == 0) == (change is None), done.stderr


TRAIN = """
import os, torch
from transformers import AutoModelForCausalLM
rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(rank)
model = AutoModelForCausalLM.from_pretrained("checkpoint", device_map={"": rank})
model(input_ids=torch.ones(1, 64, dtype=torch.long, device="cuda"), use_cache=False).logits.float().sum().backward()
# in one piece: torchrun runs Python unbuffered, whose print writes the words of two ranks between one another
os.write(1, f"reserved {rank} {torch.cuda.max_memory_reserved()}\\n".encode())
"""


def test_the_commands_that_users_are_told_run(simulated_cuda: CudaRunner, tmp_path: Path) -> None:
    """Those of docs/memory.md, with two ranks in place of eight; .ci/cuda has run the first of them for this venv."""
    root = Path(__file__).resolve().parent.parent
    if not (root / "docs").is_dir():
        pytest.skip("the tests run without the project's pages")
    section = (root / "docs" / "memory.md").read_text(encoding="utf-8").partition("without a GPU\n")[2]
    (block,) = re.findall(r"^```bash\n(.*?)^```$", section.partition("\n## ")[0], re.MULTILINE | re.DOTALL)
    makes, writes, trains = block.replace("\\\n", " ").strip().splitlines()
    script = makes.split()[1]
    assert makes.split()[:3] == ["python", "tests/simulated_cuda/make_venv.py", "simulated"]
    assert (root / script).is_file()
    assert f"{script} " in (root / ".ci" / "cuda").read_text(encoding="utf-8")

    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 4000, **sizes}
    (tmp_path / "CONFIG_FOLDER").mkdir()
    (tmp_path / "CONFIG_FOLDER" / "config.json").write_text(json.dumps(config))
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "tests").symlink_to(root / "tests")
    assert trains.count("=8 ") == 2
    for command in (writes, trains.replace("=8 ", "=2 ")):
        command = command.replace("simulated/bin/python", sys.executable)
        done = subprocess.run(command, shell=True, cwd=tmp_path, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    found = re.findall(r"^reserved (\d) (\d+)$", done.stdout, re.MULTILINE)
    assert sorted(rank for rank, _ in found) == ["0", "1"]
    assert all(int(size) > 8 * MiB for _, size in found)
