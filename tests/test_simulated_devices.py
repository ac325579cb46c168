"""The simulated accelerator's own tests: what other tests conclude from it is only as good as its rules."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from simulated_devices import build

if TYPE_CHECKING:
    from conftest import Simulated

# Each function below is one rule, run on fresh counters; its facts, or its error, are asserted by the test of its name.
RULES = """
import collections, copy, io, sys, threading
import torch, torch_npu
from pathlib import Path

accelerator = torch.accelerator
functional = torch.nn.functional


def counters(device, *names):
    return [torch_npu.stats()[device][name] for name in names]


def said(error):
    return {"error": type(error).__name__, "text": str(error)}


def rule(function):
    torch_npu.reset()
    try:
        facts = function()
    except Exception as error:
        facts = said(error)
    accelerator.set_device_index(0)
    report({function.__name__: facts})


@rule
def import_touches_nothing():
    return [
        accelerator.current_accelerator().type,
        accelerator.device_count(),
        accelerator.current_device_index(),
        torch.npu.device_count(),
        torch_npu.contexts(),
    ]


@rule
def accelerator_interface():
    with accelerator.device_index(2):
        inside = [accelerator.current_device_index(), torch.ones(3, device="npu").device.index]
    after = accelerator.current_device_index()
    first = torch_npu.contexts()
    accelerator.set_device_index(5)
    held = torch.ones(16, device="npu")
    memory = [accelerator.memory_allocated(5), accelerator.memory_allocated(), accelerator.max_memory_allocated(5)]
    accelerator.empty_cache()
    accelerator.synchronize(5)
    return {
        "inside": inside,
        "after": after,
        "first": first,
        "second": torch_npu.contexts(),
        "memory": memory,
        "free": accelerator.get_memory_info(5)[0] - torch.npu.mem_get_info(5)[1],
    }


@rule
def npu_interface():
    with torch.npu.device(2):
        inside = torch.npu.current_device()
    torch.npu.set_device("npu:4")
    return [inside, torch.npu.current_device(), torch_npu.contexts(), torch_npu.log()]


@rule
def leaving_a_guard_makes_no_context():
    with torch.npu.device(3):
        torch.ones(1, device="npu")
    return torch_npu.contexts()


@rule
def current_device_is_per_thread():
    accelerator.set_device_index(4)
    seen = []
    thread = threading.Thread(target=lambda: seen.append(torch.ones(1, device="npu").device.index))
    thread.start()
    thread.join()
    return [seen, accelerator.current_device_index(), torch_npu.contexts()]


@rule
def pinned_memory():
    accelerator.set_device_index(2)
    torch_npu.reset()
    with torch.npu.device(2):
        torch_npu.reset()
    pinned = torch.ones(3).pin_memory()
    alone = torch_npu.contexts()
    torch_npu.reset()
    owner = torch.ones(1, device="npu:6")
    again = torch.ones(3).pin_memory()
    return {
        "alone": alone,
        "beside": torch_npu.contexts(),
        "pinned": [pinned.is_pinned(), pinned[1:].is_pinned(), torch.ones(3).is_pinned()],
    }


@rule
def factories():
    torch.manual_seed(0)
    made = [
        torch.zeros(4, device="npu:3"),
        torch.full((4,), 2.0, device="npu:3"),
        torch.arange(4, device="npu:3"),
        torch.randn(4, device="npu:3"),
        torch.empty_strided((2, 2), (1, 2), device="npu:3"),
        torch.tensor([1.0], device="npu:3"),
        torch.eye(2, device="npu:3"),
        torch.linspace(0, 1, 3, device="npu:3"),
    ]
    with torch.device("npu:3"):
        made.append(torch.ones(2))
    size = sum(tensor.nbytes for tensor in made)
    return [
        sorted({tensor.device.index for tensor in made}),
        counters(3, "live")[0] - size,
        torch_npu.contexts(),
        made[4].stride(),
    ]


@rule
def an_empty_tensor_makes_a_context():
    nothing = torch.empty(0, device="npu:6")
    return [nothing.device.index, torch_npu.contexts(), counters(6, "allocations", "live")]


@rule
def results_stay_on_their_device():
    x = torch.arange(16.0).reshape(4, 4).to("npu:3")
    ids = torch.tensor([1, 2], device="npu:3")
    weight = torch.ones(5, 4, device="npu:3")
    scratch = torch.empty(0, device="npu:3")
    with torch.npu.device(1):  # the current device must not matter
        torch_npu.reset_peak(1)
        results = {
            "clone": x.clone(),
            "contiguous": x.t().contiguous(),
            "add": x + 1,
            "scalar first": torch.tensor(2.0) * x,
            "rsub": 1 - x,
            "mm": x @ x,
            "softmax": x.softmax(-1),
            "index": x[ids],
            "cpu index": x[torch.tensor([0])],
            "mask": x[x > 3],
            "embedding": functional.embedding(ids, weight),
            "linear": functional.linear(x, weight),
            "sdpa": functional.scaled_dot_product_attention(x[None, None], x[None, None], x[None, None]),
            "cat": torch.cat([x, x]),
            "stack": torch.stack([x, x]),
            "sum": x.sum(),
            "max": x.max(0).values,
            "topk": x.topk(2).indices,
            "nonzero": x.nonzero(),
            "where": torch.where(x > 0, torch.tensor(1.0), x),
            "to dtype": x.to(torch.bfloat16),
            "new": x.new_zeros(3),
            "like": torch.ones_like(x),
            "deepcopy": copy.deepcopy(x),
            "out": torch.mm(x, x, out=scratch),
            "unbind": x.unbind()[0],
            "cumsum": x.cumsum(0),
            "sort": x.sort().values,
            "layer_norm": functional.layer_norm(x, (4,)),
            "dropout": functional.dropout(x, 0.5),
            "fft": torch.fft.fft(x),
            "einsum": torch.einsum("ij,jk->ik", x, x),
            "foreach": torch._foreach_add([x], [x])[0],
        }
    host = {
        "mm": x.cpu() @ x.cpu(),
        "softmax": x.cpu().softmax(-1),
        "index": x.cpu()[[1, 2]],
        "rsub": 1 - x.cpu(),
        "scalar first": 2.0 * x.cpu(),
        "contiguous": x.cpu().t(),
        "out": x.cpu() @ x.cpu(),
        "mask": x.cpu()[x.cpu() > 3],
    }
    return {
        "stray": {name: str(tensor.device) for name, tensor in results.items() if tensor.device != x.device},
        "unequal": [name for name, tensor in host.items() if not torch.equal(results[name].cpu(), tensor)],
        "bytes elsewhere": [counters(device, "peak")[0] for device in range(8) if device != 3],
        "item": [x[1, 2].item(), x.sum().item(), bool((x == x).all())],
    }


@rule
def live_bytes_follow_the_tensors():
    x = torch.zeros(100, device="npu:3")
    view = x[10:20].view(2, 5).t()
    first = counters(3, "live", "peak", "allocations")
    y = x.exp()
    second = counters(3, "live", "peak")
    del y
    third = counters(3, "live", "peak")
    torch_npu.reset_peak("npu:3")
    fourth = counters(3, "live", "peak")
    del x
    kept = counters(3, "live")
    del view
    return [first, second, third, fourth, kept, counters(3, "live")]


@rule
def a_kernel_of_the_cpu_is_not_taken_apart():
    x = torch.ones(10, device="npu:3")
    before = counters(3, "allocations")[0]
    y = torch.ops.aten.silu_backward(x, x)
    return counters(3, "allocations")[0] - before, y.device.index


@rule
def in_place_needs_no_memory():
    x = torch.ones(10, device="npu:3")
    y = torch.full((10,), 3.0, device="npu:3")
    before = counters(3, "allocations", "peak")
    x.add_(y, alpha=2).mul_(0.5).copy_(y)
    x[2:4].fill_(7.0)
    x.fill_(1.0).zero_()
    torch.add(y, y, out=x)
    return [before, counters(3, "allocations", "peak"), x.cpu().tolist()]


@rule
def views_and_storages():
    x = torch.arange(6.0, device="npu:3")
    y = torch.empty(0, device="npu:3").set_(x.untyped_storage(), 2, (2, 2), (2, 1))
    z = torch.empty(0, device="npu:3").set_(x.untyped_storage())
    w = torch.empty(0, device="npu:3").set_(x)
    x.unfold(0, 2, 2)[0, 1].fill_(9.0)
    allocated = counters(3, "allocations")
    y.set_()
    return {
        "shared": [
            x.cpu().tolist(),
            x.view(2, 3)[1].data_ptr() - x.data_ptr(),
            w.is_set_to(x),
            z.numel(),
            w[1].item(),
        ],
        "gone": [list(y.shape), y.device.index],
        "allocations": allocated,
    }


@rule
def a_storage_of_another_device_is_refused():
    torch.empty(0, device="npu:2").set_(torch.ones(3, device="npu:3").untyped_storage())


@rule
def resize():
    x = torch.arange(4.0, device="npu:3")
    x.resize_(100)
    grown = [list(x.shape), counters(3, "live"), x[:4].tolist()]
    storage = x.untyped_storage()
    storage.resize_(0)
    emptied = [counters(3, "live"), storage.device.index]
    storage.resize_(40)
    return [grown, emptied, counters(3, "live"), torch_npu.contexts()]


@rule
def complex_numbers():
    x = torch.ones(2, dtype=torch.complex64, device="npu:1") * 1j
    expected = torch.full((2,), -1j)
    return {
        "copied": torch.equal(x.conj().cpu(), expected),
        "cloned": torch.equal(x.conj().clone().cpu(), expected),
        "a view": torch.view_as_real(x).data_ptr() == x.data_ptr(),
        "imaginary": x.conj().imag.cpu().tolist(),
    }


@rule
def copies_are_counted_on_their_device():
    names = ("from_host", "to_host", "from_peer", "within")
    x = torch.ones(10, 10).to("npu:1")
    seen = [counters(1, *names)]
    y = x.t().to("npu:2")  # not contiguous
    seen.append(counters(1, *names) + counters(2, *names))
    y.copy_(x)
    y.to("npu:1", torch.bfloat16)
    seen.append(counters(1, *names) + counters(2, *names))
    x.clone()
    x.cpu()
    torch.ones(4, dtype=torch.float64).to("npu:1", torch.float32)
    torch._foreach_copy_([torch.empty(2, device="npu:1")], [torch.ones(2)])
    seen.append(counters(1, *names))
    x.exp().sum()  # an operation is no copy
    seen.append(counters(1, *names))
    return seen


@rule
def two_devices_do_not_mix():
    a, b = torch.ones(2, 2, device="npu:1"), torch.ones(2, 2, device="npu:2")
    attempts = {
        "add": lambda: a + b,
        "mm": lambda: a @ b,
        "cpu": lambda: a + torch.ones(2, 2),
        "cat": lambda: torch.cat([a, b]),
        "embedding": lambda: functional.embedding(torch.tensor([0]), a),
        "index": lambda: a[torch.tensor([0], device="npu:2")],
        "in place": lambda: a.mul_(b),
        "linear": lambda: functional.linear(a, b),
    }
    facts = {}
    for name, attempt in attempts.items():
        try:
            attempt()
            facts[name] = "no error"
        except RuntimeError as error:
            facts[name] = str(error)
    return facts


@rule
def an_unknown_device_is_refused():
    torch.ones(1, device="npu:8")


@rule
def out_of_memory():
    names = ("live", "peak", "allocations", "failures", "from_host")
    torch_npu.set_limit("npu:3", 1000)
    x = torch.zeros(200, device="npu:3")
    facts = {"before": counters(3, *names), "texts": []}
    attempts = [
        lambda: torch.zeros(51, device="npu:3"),
        lambda: x.exp(),
        lambda: x.resize_(400),
        lambda: torch.ones(60).to("npu:3"),
        lambda: x.untyped_storage().resize_(1600),
        lambda: torch.load(saved, map_location="npu:3"),
    ]
    saved = io.BytesIO()
    torch.save(torch.ones(60), saved)
    saved.seek(0)
    for attempt in attempts:
        try:
            attempt()
        except torch.OutOfMemoryError as error:
            facts["texts"].append(str(error))
    facts["after"] = counters(3, *names)
    facts["x"] = [list(x.shape), x.untyped_storage().nbytes(), x.sum().item()]
    filled = torch.zeros(50, device="npu:3")
    facts["full"] = [counters(3, "live")[0], torch.npu.mem_get_info(3)]
    del filled, x
    facts["freed"] = counters(3, "live")
    torch_npu.set_limit(3, None)
    facts["unlimited"] = torch.zeros(1000, device="npu:3").nbytes
    return facts


@rule
def out_of_memory_in_autograd():
    layer = torch.nn.Linear(64, 64, bias=False).to("npu:3")
    out = layer(torch.ones(2, 64, device="npu:3")).sum()
    torch_npu.set_limit(3, counters(3, "live")[0] + 1024)
    error = None
    try:
        out.backward()
    except torch.OutOfMemoryError as failure:
        error = type(failure).__name__
    finally:
        torch_npu.set_limit(3, None)
    del out
    return [error, layer.weight.grad is None, counters(3, "live")[0] - layer.weight.nbytes]


@rule
def training():
    layer = torch.nn.Linear(8, 8)
    twin = copy.deepcopy(layer).to("npu:3")
    seen = []
    twin.weight.register_hook(lambda gradient: seen.append(torch.ones(1, device="npu").device.index))
    x = torch.randn(2, 8)
    for model, data in ((layer, x), (twin, x.to("npu:3"))):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for _ in range(2):
            torch.utils.checkpoint.checkpoint(model, data, use_reentrant=False).pow(2).sum().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return {
        "hook": seen,
        "equal": torch.equal(layer.weight, twin.weight.cpu()),
        "contexts": torch_npu.contexts(),
        "current": accelerator.current_device_index(),
    }


@rule
def attention_has_the_roundings_of_the_cpu():
    torch.manual_seed(0)
    equal = []
    for dtype in (torch.float32, torch.bfloat16):
        for mask in (None, torch.randn(1, 1, 5, 5, dtype=dtype)):
            host = [torch.randn(1, 2, 5, 8, dtype=dtype, requires_grad=True) for _ in range(3)]
            device = [tensor.detach().to("npu:3").requires_grad_() for tensor in host]
            outs = [
                functional.scaled_dot_product_attention(*host, attn_mask=mask, is_causal=mask is None),
                functional.scaled_dot_product_attention(
                    *device, attn_mask=None if mask is None else mask.to("npu:3"), is_causal=mask is None
                ),
            ]
            for out in outs:
                out.square().sum().backward()
            equal += [torch.equal(outs[0], outs[1].cpu())]
            equal += [torch.equal(one.grad, other.grad.cpu()) for one, other in zip(host, device)]
    return equal


@rule
def torch_load():
    saved = io.BytesIO()
    torch.save({"a": torch.ones(3, device="npu:2"), "b": torch.ones(3)}, saved)
    torch_npu.reset()
    places = []
    for target in (None, "cpu", "npu:3", torch.device("npu:4"), {"npu:2": "npu:5"}):
        saved.seek(0)
        loaded = torch.load(saved, map_location=target, weights_only=True)
        places.append([str(loaded["a"].device), str(loaded["b"].device)])
    return [places, torch_npu.contexts()]


@rule
def safetensors_file():
    from safetensors.torch import load_file, save_file

    path = str(Path(sys.argv[1]) / "some.safetensors")
    save_file({"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(2, dtype=torch.bfloat16)}, path)
    loaded = load_file(path, device="npu:3")
    back = str(Path(sys.argv[1]) / "back.safetensors")
    save_file(loaded, back)
    same = Path(path).read_bytes() == Path(back).read_bytes()
    return [
        sorted({tensor.device.index for tensor in loaded.values()}),
        counters(3, "live", "from_host"),
        torch_npu.contexts(),
        same,
    ]
"""


@pytest.fixture(scope="module")
def rules(simulated: Simulated, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return simulated.run(RULES, args=[tmp_path_factory.mktemp("rules")])


def test_importing_it_touches_no_device(rules: dict[str, Any]) -> None:
    assert rules["import_touches_nothing"] == ["npu", 8, 0, 8, []]


def test_torch_accelerator_works(rules: dict[str, Any]) -> None:
    facts = rules["accelerator_interface"]
    assert facts["inside"] == [2, 2]
    assert facts["after"] == 0
    assert facts["first"] == [2]
    assert facts["second"] == [2, 5]
    assert facts["memory"] == [64, 64, 64]
    assert facts["free"] == -64


def test_torch_npu_works(rules: dict[str, Any]) -> None:
    assert rules["npu_interface"] == [2, 4, [2, 4], [[2, "device guard"], [4, "set device"]]]


def test_leaving_a_device_guard_makes_no_context_on_the_device_before(rules: dict[str, Any]) -> None:
    assert rules["leaving_a_guard_makes_no_context"] == [3]


def test_a_thread_starts_on_device_0(rules: dict[str, Any]) -> None:
    assert rules["current_device_is_per_thread"] == [[0], 4, [0, 4]]


def test_pinned_memory_makes_a_context_where_none_is(rules: dict[str, Any]) -> None:
    facts = rules["pinned_memory"]
    assert facts["alone"] == [0]  # reset() makes device 0 current
    assert facts["beside"] == [6]
    assert facts["pinned"] == [True, True, False]


def test_factories_count_on_their_device_alone(rules: dict[str, Any]) -> None:
    assert rules["factories"] == [[3], 0, [3], [1, 2]]


def test_an_empty_tensor_makes_a_context_but_no_byte(rules: dict[str, Any]) -> None:
    assert rules["an_empty_tensor_makes_a_context"] == [6, [6], [0, 0]]


def test_results_are_the_cpu_s_and_stay_on_their_inputs_device(rules: dict[str, Any]) -> None:
    facts = rules["results_stay_on_their_device"]
    assert facts["stray"] == {}
    assert facts["unequal"] == []
    assert facts["bytes elsewhere"] == [0] * 7
    assert facts["item"] == [6.0, 120.0, True]


def test_live_and_peak_follow_the_tensors(rules: dict[str, Any]) -> None:
    first, second, third, fourth, kept, gone = rules["live_bytes_follow_the_tensors"]
    assert first == [400, 400, 1]
    assert second == [800, 800]
    assert third == [400, 800]
    assert fourth == [400, 400]
    assert kept == [400]  # a view holds its base's memory
    assert gone == [0]


def test_an_operation_in_place_needs_no_memory(rules: dict[str, Any]) -> None:
    before, after, values = rules["in_place_needs_no_memory"]
    assert before == after
    assert values == [6.0] * 10


def test_what_the_cpu_has_a_kernel_for_is_one_kernel_here(rules: dict[str, Any]) -> None:
    assert rules["a_kernel_of_the_cpu_is_not_taken_apart"] == [1, 3]


def test_views_share_memory(rules: dict[str, Any]) -> None:
    facts = rules["views_and_storages"]
    assert facts["shared"] == [[0.0, 9.0, 2.0, 3.0, 4.0, 5.0], 12, True, 6, 9.0]
    assert facts["gone"] == [[0], 3]
    assert facts["allocations"] == [1]


def test_a_storage_of_another_device_is_refused(rules: dict[str, Any]) -> None:
    facts = rules["a_storage_of_another_device_is_refused"]
    assert facts["error"] == "RuntimeError"
    assert "npu:2" in facts["text"]
    assert "npu:3" in facts["text"]


def test_resize_stays_on_its_device(rules: dict[str, Any]) -> None:
    grown, emptied, live, contexts = rules["resize"]
    assert grown == [[100], [400], [0.0, 1.0, 2.0, 3.0]]
    assert emptied == [[0], 3]
    assert live == [40]
    assert contexts == [3]


def test_conjugate_views_are_copied_resolved(rules: dict[str, Any]) -> None:
    assert rules["complex_numbers"] == {"copied": True, "cloned": True, "a view": True, "imaginary": [-1.0, -1.0]}


def test_copies_are_counted_by_direction(rules: dict[str, Any]) -> None:
    upload, across, more, last, computed = rules["copies_are_counted_on_their_device"]
    assert upload == [400, 0, 0, 0]
    assert across == [400, 0, 0, 0, 0, 0, 400, 0]
    assert more == [400, 0, 200, 0, 0, 0, 800, 0]
    assert last == [400 + 16 + 8, 400, 200, 400]
    assert computed == last


def test_two_devices_in_one_operation_are_refused(rules: dict[str, Any]) -> None:
    facts = rules["two_devices_do_not_mix"]
    wrong = {name: text for name, text in facts.items() if "npu:1" not in text or "device" not in text}
    assert not wrong


def test_an_unknown_device_is_refused(rules: dict[str, Any]) -> None:
    facts = rules["an_unknown_device_is_refused"]
    assert facts["error"] == "RuntimeError"
    assert "8" in facts["text"]


def test_out_of_memory_leaves_everything_as_it_was(rules: dict[str, Any]) -> None:
    facts = rules["out_of_memory"]
    assert facts["before"] == [800, 800, 1, 0, 0]
    assert facts["after"] == [800, 800, 1, 6, 0]
    assert len(facts["texts"]) == 6
    assert facts["texts"][0] == (
        "simulated device npu:3 out of memory: tried to allocate 204 bytes, 800 are in use, the limit is 1000"
    )
    assert facts["x"] == [[200], 800, 0.0]
    assert facts["full"] == [1000, [0, 1000]]
    assert facts["freed"] == [0]
    assert facts["unlimited"] == 4000


def test_out_of_memory_on_an_autograd_thread_reaches_the_caller(rules: dict[str, Any]) -> None:
    assert rules["out_of_memory_in_autograd"] == ["OutOfMemoryError", True, 0]


def test_backward_and_optimizer_run_on_the_tensors_device(rules: dict[str, Any]) -> None:
    facts = rules["training"]
    assert facts == {"hook": [3, 3], "equal": True, "contexts": [3], "current": 0}


def test_attention_is_the_cpu_s_bit_for_bit(rules: dict[str, Any]) -> None:
    assert rules["attention_has_the_roundings_of_the_cpu"] == [True] * 16


def test_torch_load_maps_to_devices(rules: dict[str, Any]) -> None:
    places, contexts = rules["torch_load"]
    assert places == [["npu:2", "cpu"], ["cpu", "cpu"], ["npu:3", "npu:3"], ["npu:4", "npu:4"], ["npu:5", "cpu"]]
    assert contexts == [2, 3, 4, 5]


def test_safetensors_loads_to_one_device(rules: dict[str, Any]) -> None:
    assert rules["safetensors_file"] == [[3], [28, 28], [3], True]


def test_limits_and_counts_come_from_the_environment(simulated: Simulated) -> None:
    facts = simulated.run(
        """
        import torch, torch_npu
        poisoned = bool(torch.empty(9, device="npu:1").isnan().all())
        limits = [counters["limit"] for counters in torch_npu.stats().values()]
        report({"poisoned": poisoned, "limits": limits, "count": torch.npu.device_count()})
        """,
        count=3,
        env={"SIMDEV_LIMIT": "0=1000,2=5000", "SIMDEV_POISON": "1"},
    )
    assert facts == {"poisoned": True, "limits": [1000, 64 << 30, 5000], "count": 3}


ENGINES = """
import sys
import torch, torch_npu
from accelerate import dispatch_model, infer_auto_device_map
from peft import AutoPeftModelForCausalLM, PeftModel
from transformers import AutoModelForCausalLM
from models import save_adapter, save_llama

base = save_llama(sys.argv[1] + "/base")
adapter = save_adapter(sys.argv[1] + "/adapter", base)
ids = torch.arange(1, 13).reshape(2, 6)
shards = len(list(base.glob("model-*.safetensors")))


def live():
    return {str(device): counters["live"] for device, counters in torch_npu.stats().items() if counters["live"]}


def logits(model):
    with torch.no_grad():
        return model(ids.to(next(model.parameters()).device)).logits.cpu()


plain = AutoModelForCausalLM.from_pretrained(base)
plain_logits = logits(plain)
plain_ids = plain.generate(ids, max_new_tokens=4, do_sample=False)
report({"touched by transformers on the CPU": torch_npu.contexts()})
host = PeftModel.from_pretrained(plain, adapter)
adapted = logits(host)
report(
    {
        "touched by peft on the CPU": torch_npu.contexts(),
        "shards": shards,
        "adapter matters": not torch.equal(plain_logits, adapted),
    }
)

torch_npu.reset()
model = AutoModelForCausalLM.from_pretrained(base, device_map={"": 3})
report(
    {
        "base": {
            "equal": torch.equal(logits(model), plain_logits),
            "contexts": torch_npu.contexts(),
            "live": live(),
            "parameters": sum(p.nbytes for p in model.parameters()),
        }
    }
)
generated = model.generate(ids.to("npu:3"), max_new_tokens=4, do_sample=False).cpu()
report({"generate": torch.equal(generated, plain_ids)})
del model

torch_npu.reset()
model = AutoPeftModelForCausalLM.from_pretrained(adapter, device_map={"": 3})
report(
    {
        "stray": {
            "equal": torch.equal(logits(model), adapted),
            "contexts": torch_npu.contexts(),
            "log": torch_npu.log(),
            "peak on 0": torch_npu.stats()[0]["peak"],
            "from_host": torch_npu.stats()[0]["from_host"],
        }
    }
)
adapter_bytes = sum(p.nbytes for name, p in model.named_parameters() if "lora_" in name)
report({"adapter bytes": adapter_bytes})
del model

torch_npu.reset()
model = AutoModelForCausalLM.from_pretrained(base, device_map={"": "npu:3"})
model = PeftModel.from_pretrained(model, adapter, torch_device="npu:3", is_trainable=True)
same = torch.equal(logits(model), adapted)
model(ids.to("npu:3"), labels=ids.to("npu:3")).loss.backward()
gradients = {str(p.grad.device) for p in model.parameters() if p.grad is not None}
merged = model.merge_and_unload()
report(
    {
        "two steps": {
            "equal": same,
            "contexts": torch_npu.contexts(),
            "gradients": sorted(gradients),
            "merged": torch.allclose(logits(merged), adapted, atol=1e-5),
        }
    }
)
del model, merged

torch_npu.reset()
device_map = {
    "model.embed_tokens": 1,
    "model.layers.0": 1,
    "model.layers.1": 2,
    "model.layers.2": 2,
    "model.norm": 2,
    "model.rotary_emb": 1,
    "lm_head": 2,
}
model = AutoModelForCausalLM.from_pretrained(base, device_map=device_map)
report({"split": {"equal": torch.equal(logits(model), plain_logits), "contexts": torch_npu.contexts()}})
del model

torch_npu.reset()
for device in range(8):
    torch_npu.set_limit(device, 1 << 30)
torch_npu.set_limit(0, 60000)
model = AutoModelForCausalLM.from_pretrained(base, device_map="auto", max_memory={0: 60000, 1: 100000, 2: 100000})
report(
    {
        "auto": {
            "equal": torch.equal(logits(model), plain_logits),
            "contexts": torch_npu.contexts(),
            "devices": sorted({str(p.device) for p in model.parameters()}),
        }
    }
)
del model

torch_npu.reset()
torch_npu.set_limit(5, 100000)
try:
    AutoModelForCausalLM.from_pretrained(base, device_map={"": 5})
    report({"out of memory": "no error"})
except torch.OutOfMemoryError as error:
    report({"out of memory": str(error)})
import gc

gc.collect()
report({"after out of memory": live()})
"""


@pytest.fixture(scope="module")
def engines(simulated: Simulated, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return simulated.run_forked(ENGINES, args=[tmp_path_factory.mktemp("engines")])


def test_the_tiny_checkpoint_has_several_shards_and_an_adapter_that_matters(engines: dict[str, Any]) -> None:
    assert engines["shards"] > 2
    assert engines["adapter matters"]


def test_transformers_runs_on_it_unpatched(engines: dict[str, Any]) -> None:
    facts = engines["base"]
    assert facts["equal"]
    assert facts["contexts"] == [3]
    assert list(facts["live"]) == ["3"]
    assert facts["live"]["3"] >= facts["parameters"]
    assert engines["generate"]


def test_peft_puts_an_adapter_on_device_0(engines: dict[str, Any]) -> None:
    """What `load_peft_on_rank` exists for: everything was asked to be on device 3."""
    facts = engines["stray"]
    assert facts["equal"]
    assert facts["contexts"] == [0, 3]
    assert facts["peak on 0"] == facts["from_host"] == engines["adapter bytes"]


def test_peft_in_two_steps_touches_one_device(engines: dict[str, Any]) -> None:
    assert engines["two steps"] == {"equal": True, "contexts": [3], "gradients": ["npu:3"], "merged": True}


def test_accelerate_moves_tensors_between_devices(engines: dict[str, Any]) -> None:
    assert engines["split"] == {"equal": True, "contexts": [1, 2]}
    assert engines["auto"]["equal"]
    assert len(engines["auto"]["devices"]) > 1


def test_a_model_that_does_not_fit_is_out_of_memory(engines: dict[str, Any]) -> None:
    assert engines["out of memory"].startswith("simulated device npu:5 out of memory")
    assert engines["after out of memory"] == {}


def test_peft_touches_device_0_for_a_model_on_the_cpu(engines: dict[str, Any]) -> None:
    """The same stray: the adapter takes the way over device 0."""
    assert engines["touched by transformers on the CPU"] == []
    assert engines["touched by peft on the CPU"] == [0]


def test_each_rank_has_counters_of_its_own(simulated: Simulated) -> None:
    reports = simulated.run_ranks(
        """
        import os, torch, torch_npu
        held = torch.ones(4, device=f"npu:{os.environ['LOCAL_RANK']}")
        report({"rank": int(os.environ["RANK"]), "contexts": torch_npu.contexts()})
        """,
        count=2,
    )
    assert reports == [{"rank": 0, "contexts": [0]}, {"rank": 1, "contexts": [1]}]


def test_a_failing_script_fails_with_all_that_it_said(simulated: Simulated) -> None:
    with pytest.raises(AssertionError, match=r"(?s)code 1.*on the way.*ValueError: 17 is no number"):
        simulated.run("print('on the way')\nraise ValueError('17 is no number')")


def test_a_script_that_does_not_end_is_ended(simulated: Simulated) -> None:
    with pytest.raises(AssertionError, match="not done after 2 s"):
        simulated.run("import time; time.sleep(600)", timeout=2)


# Building it --------------------------------------------------------------------------------------------------------


@pytest.fixture
def false_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A build that takes no time: what it writes is in `builds.txt`, once for each."""
    monkeypatch.setenv("SAFE_LOADING_SIMDEV_CACHE", str(tmp_path / "cache"))
    log = tmp_path / "builds.txt"
    monkeypatch.setattr(build, "_build_environment", lambda: dict(os.environ))
    monkeypatch.setattr(
        build,
        "_BUILD",
        "import sys, time; time.sleep(0.5); open(sys.argv[1] + '/_simdev.so', 'w')\n"
        f"open({str(log)!r}, 'a').write('x')",
    )
    return log


def test_two_builders_build_once(false_compiler: Path) -> None:
    paths: list[Path] = []
    threads = [threading.Thread(target=lambda: paths.append(build.build())) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(paths)) == 1
    assert paths[0].is_file()
    assert false_compiler.read_text() == "x"
    assert build.build() == paths[0]
    assert false_compiler.read_text() == "x"


def test_an_interrupted_build_is_built_again(false_compiler: Path) -> None:
    half = build.cache_folder() / build.digest()
    half.mkdir(parents=True)
    (half / "simdev.o").write_text("half")
    (half.parent / f"{half.name}.lock").write_text("")  # a lock file without a process is no lock
    assert build.build().is_file()
    assert not (half / "simdev.o").exists()


def test_a_failed_build_says_why_and_leaves_nothing(false_compiler: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_BUILD", "import sys; print('simdev.cpp:7: error: no such thing'); sys.exit(1)")
    with pytest.raises(build.CannotBuildError, match="error: no such thing"):
        build.build()
    assert [path.suffix for path in build.cache_folder().iterdir()] == [".lock"]


def test_a_build_ends_at_its_time_limit(false_compiler: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_BUILD", "import time; time.sleep(600)")
    with pytest.raises(build.CannotBuildError, match="not done after"):
        build.build(seconds=1)


def test_a_missing_compiler_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAFE_LOADING_SIMDEV_CACHE", str(tmp_path))
    monkeypatch.setenv("CXX", "a-compiler-that-is-not-here")
    with pytest.raises(build.CannotBuildError, match="a-compiler-that-is-not-here"):
        build.build()


def test_the_cache_folder_can_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SAFE_LOADING_SIMDEV_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert build.cache_folder() == Path("/somewhere/safe_loading/simdev")
    monkeypatch.setenv("SAFE_LOADING_SIMDEV_CACHE", "/elsewhere")
    assert build.cache_folder() == Path("/elsewhere")


def test_torch_npu_without_a_library_says_what_to_do() -> None:
    environment = {key: value for key, value in os.environ.items() if key != "SIMDEV_LIBRARY"}
    environment["PYTHONPATH"] = str(Path(build.__file__).parent)
    done = subprocess.run([sys.executable, "-c", "import torch_npu"], env=environment, capture_output=True, text=True)
    assert done.returncode != 0
    assert "build.py" in done.stderr
