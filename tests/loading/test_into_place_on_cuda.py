"""A base on its way to a card: through two pinned buffers, the next block read while the last one is copied."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from models import save_adapter, save_llama
from test_into_place import OTHERS, SAMPLE

if TYPE_CHECKING:
    from cuda_runs import CudaRunner

pytestmark = pytest.mark.gpu
HERE = Path(__file__).parent
MiB = 1 << 20
LATE = {"SIMCUDA_LATE_COPIES": "1", "SIMCUDA_VALUES": None}  # who computes values reads a copy before it is done
SIZES: dict[str, Any] = {"hidden_size": 512, "intermediate_size": 2048, "vocab_size": 8000, "num_hidden_layers": 5}

EQUAL = """
    import tempfile, warnings
    from pathlib import Path
    sys.path[:0] = sys.argv[1:3]
    import pytest, transformers
    from test_into_place import assert_equal, both
    from tiny_models import saved, skip_unless_buildable
    from safe_loading._ranks.rank_devices import RankDevices

    warnings.simplefilter("ignore")
    index, found = torch.cuda.device_count() - 1, {}
    for name in sys.argv[3:]:
        with tempfile.TemporaryDirectory() as folder:
            try:
                skip_unless_buildable(name)
                saved(name, Path(folder))
                kind = getattr(transformers, name)
                for dtype in ("auto", torch.bfloat16):
                    method, pair = both(Path(folder), kind, dtype, torch.device("cuda", index))
                    assert_equal(pair)
                    found[name] = method
            except pytest.skip.Exception as reason:
                found[name] = f"skipped: {reason}"
    report(found=found)
"""


def chunks(names: list[str], size: int) -> list[Any]:
    return [pytest.param(names[at : at + size], marks=pytest.mark.slow) for at in range(0, len(names), size)]


@pytest.mark.parametrize("names", [SAMPLE, *chunks([name for name in OTHERS if name not in SAMPLE], 20)])
def test_it_is_the_model_of_from_pretrained_on_the_card(cuda: CudaRunner, names: list[str]) -> None:
    facts = cuda.run(EQUAL, args=[HERE, HERE.parent, *names], env={"SIMCUDA_VALUES": "all"}, timeout=600)
    methods = {method for method in facts["found"].values() if not method.startswith("skipped")}
    assert methods <= {"into place", "from_pretrained"}
    if names is SAMPLE:
        assert facts["found"]["Qwen3MoeForCausalLM"] == facts["found"]["Phi3ForCausalLM"] == "into place"


SMALL = """
    from safe_loading._model.layout import pinned, read_blocks, reading

    pinned.BUFFER_BYTES = reading.BUFFER_BYTES = 4096
    pinned.pinned_buffers.__wrapped__.__defaults__ = (4096,)
"""


@pytest.mark.parametrize("call", [2048, 1 << 20])
def test_blocks_of_a_few_kilobytes_give_the_same_model(cuda: CudaRunner, call: int) -> None:
    """The models of these tests would fit into one block."""
    program = f"{SMALL}    read_blocks._CALL_BYTES = {call}\n{EQUAL}"
    names = ["LlamaForCausalLM", "Qwen3MoeForCausalLM", "GPT2LMHeadModel"]
    facts = cuda.run(program, args=[HERE, HERE.parent, *names], env={"SIMCUDA_VALUES": "all"}, timeout=600)
    assert set(facts["found"].values()) == {"into place"}


LOAD = """
    import ctypes, os, threading, transformers.modeling_utils
    from pathlib import Path
    from safetensors.torch import load_file
    from safe_loading import load_peft_on_rank

    base, adapter, last = *sys.argv[1:3], torch.cuda.device_count() - 1
    device, told = torch.device("cuda", last), []
    read, Event = os.preadv, torch.Event

    class Told(Event):
        def record(self, *arguments):
            told.append("copy")
            return super().record(*arguments)

        def synchronize(self):
            told.append("wait")
            return super().synchronize()

    def preadv(*arguments):
        if told[-1:] != ["read"]:
            told.append("read")
        if told.count("copy") == STOP:
            raise KeyboardInterrupt
        return read(*arguments)

    STOP, os.preadv, torch.Event = -1, preadv, Told
    pinned = lambda: [torch.cuda.host_memory_stats()[f"allocated_bytes.{key}"] for key in ("peak", "current")]
    stored = lambda: (pair for file in Path(base).glob("*.safetensors") for pair in load_file(file).items())
    wrong = lambda model: [
        name for name, value in stored() if not torch.equal(value.to(torch.bfloat16), loaded(model, name).cpu())
    ]

    def loaded(model, name):
        whole = model.get_base_model()
        try:
            return whole.get_parameter(name)
        except AttributeError:
            path, _, own = name.rpartition(".")
            return whole.get_parameter(f"{path}.base_layer.{own}")
"""

COUNTS = (
    LOAD
    + """
    runtime = ctypes.CDLL("libcudart.so.13")
    copies = (ctypes.c_uint64 * 4).in_dll(runtime, "sim_copies")
    # transformers takes the size of the model first, in one block, which torch rounds up to 2 MiB
    transformers.modeling_utils.caching_allocator_warmup = lambda *_, **__: None
    model = load_peft_on_rank(adapter, base, device=last, dtype=torch.bfloat16)
    report(
        copies=list(copies), told=told, pinned=pinned(), contexts=contexts(), index=last,
        peak=torch.cuda.max_memory_allocated(last), held=torch.cuda.memory_allocated(last),
        method=model.load_report.parts[0].method,
        tensors=[t.nbytes for t in (*model.parameters(), *model.buffers())],
        base=sum(p.nbytes for name, p in model.named_parameters() if "lora_" not in name),
        wrong=wrong(model), devices=sorted({str(p.device) for p in model.parameters()}),
    )
"""
)


def folders(tmp_path: Path) -> list[Path]:
    base = save_llama(tmp_path / "base", **SIZES)
    return [base, save_adapter(tmp_path / "adapter", base)]


def test_no_byte_of_the_base_is_copied_from_pageable_memory(simulated_cuda: CudaRunner, tmp_path: Path) -> None:
    facts = simulated_cuda.run(COUNTS, args=folders(tmp_path), env=LATE)
    pageable, pageable_bytes, pinned, pinned_bytes = facts["copies"]
    assert facts["method"] == "into place"
    assert pinned_bytes == facts["base"] > 48 * MiB
    assert pinned >= 5 * 9
    # the adapter, and what the model makes itself: small, and from where they are
    assert pageable_bytes == sum(facts["tensors"]) - facts["base"] < MiB
    assert pageable > 0
    assert not facts["wrong"]  # copies came 20 ms late, and no buffer was filled again before
    peak, held = facts["pinned"]
    assert 32 * MiB < peak <= 64 * MiB
    assert held == 0
    assert facts["contexts"] == [facts["index"]]
    assert facts["devices"] == [f"cuda:{facts['index']}"]
    assert sum(facts["tensors"]) <= facts["peak"] <= facts["held"] + 1024


def test_the_next_block_is_read_before_the_copy_of_the_last_is_waited_for(
    simulated_cuda: CudaRunner, tmp_path: Path
) -> None:
    base = save_llama(tmp_path / "base", **SIZES)
    adapter = save_adapter(tmp_path / "adapter", base)
    script = COUNTS.replace("dtype=torch.bfloat16", "dtype=torch.float32").replace("wrong=wrong(model), ", "")
    told = simulated_cuda.run(script, args=[base, adapter])["told"]
    events = told[told.index("copy") - 1 :]
    assert events[:4] == ["read", "copy", "read", "copy"]
    assert events[4:7] == ["wait", "read", "copy"]  # for the first of the two, whose buffer is used again


STOPPED = (
    LOAD
    + """
    STOP = 1
    try:
        load_peft_on_rank(adapter, base, device=last, dtype=torch.bfloat16)
    except KeyboardInterrupt:
        report(stopped=True, pinned=pinned(), pending=ctypes.CDLL("libcudart.so.13").sim_pending())
    report(threads=[thread.name for thread in threading.enumerate()], held=torch.cuda.memory_allocated(last))
    report(files=[link for link in map(os.readlink, links()) if link.endswith("safetensors")])
    STOP = -1
    model = load_peft_on_rank(adapter, base, device=last, dtype=torch.bfloat16)
    report(wrong=wrong(model))
"""
).replace(
    "    def loaded(",
    """    def links():
        return [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")
                if os.path.exists(f"/proc/self/fd/{number}")]

    def loaded(""",
)


def test_ctrl_c_in_the_middle_frees_the_pinned_memory_and_leaves_nothing_running(
    simulated_cuda: CudaRunner, tmp_path: Path
) -> None:
    facts = simulated_cuda.run(STOPPED, args=folders(tmp_path), env=LATE)
    assert facts["stopped"]
    assert facts["pinned"][0] > 0
    assert facts["pinned"][1] == 0
    assert facts["pending"] == 0
    assert set(facts["threads"]) <= {"MainThread", "tqdm_monitor"}
    assert facts["held"] == 0
    assert facts["files"] == []
    assert not facts["wrong"]
