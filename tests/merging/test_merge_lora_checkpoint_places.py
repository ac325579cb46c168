"""Where the merge on disk reads, computes and writes: the hub, a device, a file system, little memory."""

from __future__ import annotations

import fcntl
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from fake_hub import commit_of, serve
from models import save_adapter, save_llama
from test_merge_lora_checkpoint import on_disk

from safe_loading import merge_lora_checkpoint
from safe_loading._checkpoint.header import TensorInfo
from safe_loading._checkpoint.index import read_checkpoint
from safe_loading._merging.disk import find_changes, sources
from safe_loading._merging.disk.changes import Changes, Edit, WeightChange
from safe_loading._merging.disk.place_edits import place_edits
from safe_loading._merging.weights.update import Term, Update, merge_matrix
from safe_loading._model.layout.disk_blocks import concatenate, split, transpose
from safe_loading._model.layout.disk_blocks import on_disk as piece_on_disk
from safe_loading._model.layout.layout import CheckpointLayout

if TYPE_CHECKING:
    from conftest import Simulated
    from rank_server import RankServer


# ------------------------------------------------------------------------------------------------------------ hub

HUB = """
    import sys
    from fake_hub import ask
    from safe_loading import merge_lora_checkpoint
    output, again, url, cache = sys.argv[1:]
    options = {"base_revision": "v1", "adapter_subfolder": "best"}
    ask(url, cache)
    merged = merge_lora_checkpoint("org/base", "org/adapter", output, **options)
    ask(None, cache)
    merge_lora_checkpoint("org/base", "org/adapter", again, **options)
    report(base=merged.base, adapters=list(merged.adapters))
"""


def test_hub_ids_with_their_revisions_and_offline(rank_server: RankServer, tmp_path: Path) -> None:
    base, other = save_llama(tmp_path / "base"), save_llama(tmp_path / "other", seed=9)
    adapter = save_adapter(tmp_path / "adapter", base)
    for name in ("LICENSE", "chat_template.jinja", "modeling_x.py", "pytorch_model.bin"):
        (base / name).write_text(name)
    (adapter / "tokenizer_config.json").write_text("{}")
    (adapter / "tokenizer.json").write_text("{}")
    inner = tmp_path / "nested"
    adapter.rename(tmp_path / "moved")
    inner.mkdir()
    adapter = (tmp_path / "moved").rename(inner / "best")
    served = {"org/base": {"main": other, "v1": base}, "org/adapter": inner}
    with serve(served) as hub:
        arguments = [tmp_path / "out", tmp_path / "again", hub.url, tmp_path / "cache"]
        (facts,) = rank_server.run_alone(HUB, args=arguments).found
        assert not [request for request in hub.requests if "pytorch_model.bin" in request]
    assert facts["base"] == {"source": "org/base", "commit": commit_of("org/base", "v1")}
    assert facts["adapters"][0]["commit"] == commit_of("org/adapter")
    merge_lora_checkpoint(base, adapter, tmp_path / "plain")
    ours, theirs = on_disk(tmp_path / "out"), on_disk(tmp_path / "plain")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"LICENSE", "chat_template.jinja", "modeling_x.py", "tokenizer.json"} <= names
    assert not any((tmp_path / "out" / name).is_symlink() for name in names)
    for path in (tmp_path / "out").iterdir():
        assert (tmp_path / "again" / path.name).read_bytes() == path.read_bytes()


# --------------------------------------------------------------------------------------------------------- memory

MEMORY = """
    import re, resource, sys, threading
    from pathlib import Path
    from safe_loading import merge_lora_checkpoint, verify_merge
    threading.stack_size(1 << 20)  # the limit counts the whole range of a stack, 8 MiB by default, used or not
    warm, large = Path(sys.argv[1]) / "warm", Path(sys.argv[1]) / "large"
    for kind in ("plain", "dora"):
        merge_lora_checkpoint(warm / "base", warm / kind, warm / f"{kind} out", threads=2)
        verify_merge(warm / "base", warm / kind, warm / "base", threads=2)
    for kind in ("plain", "dora"):
        text = Path("/proc/self/status").read_text()
        adapter = (large / kind / "adapter_model.safetensors").stat().st_size
        limit = (int(re.search(r"VmData:\\s+(\\d+)", text)[1]) << 10) + (64 << 20) + adapter
        resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.RLIM_INFINITY))
        merge_lora_checkpoint(large / "base", large / kind, large / f"{kind} out", threads=2)
        assert verify_merge(large / "base", large / kind, large / f"{kind} out", threads=2).ok
        assert not verify_merge(large / "base", large / kind, large / "base", threads=2).ok  # every block differs
    report(done=True)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="RLIMIT_DATA covers mappings on Linux only")
def test_64_mib_are_enough_for_tensors_that_are_larger(rank_server: RankServer, tmp_path: Path) -> None:
    sizes = {"hidden_size": 512, "intermediate_size": 80_000, "num_hidden_layers": 1}
    for name, config in (("warm", {}), ("large", sizes)):
        base = save_llama(tmp_path / name / "base", torch.bfloat16, **config)
        for kind in ("plain", "dora"):
            targets = {"target_modules": ["down_proj"], "use_dora": kind == "dora"}
            save_adapter(tmp_path / name / kind, base, **targets)
    assert max(info.nbytes for info in read_checkpoint(tmp_path / "large" / "base").tensors.values()) > 76 << 20
    assert rank_server.run_alone(MEMORY, args=[tmp_path], timeout=240).found == [{"done": True}]


def test_an_adapter_is_in_memory_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = save_llama(tmp_path / "base")
    adapter = save_adapter(tmp_path / "adapter", base)
    real_prepare, real_place, memory = sources.prepare, find_changes.place_edits, {}

    def prepare(*args: Any, **options: Any) -> Any:
        made = real_prepare(*args, **options)
        memory["read"] = {tensor.untyped_storage().data_ptr() for tensor in made.tensors.values()}
        return made

    def place(edits: Any, *args: Any, **options: Any) -> Any:
        updates = [update for edit in edits for change in edit.changes.values() for update in change.updates.values()]
        terms = [term for update in updates for term in update.terms]
        memory["used"] = {x.untyped_storage().data_ptr() for term in terms for x in (term.left, term.right)}
        return real_place(edits, *args, **options)

    monkeypatch.setattr(sources, "prepare", prepare)
    monkeypatch.setattr(find_changes, "place_edits", place)
    merge_lora_checkpoint(base, adapter, tmp_path / "out")
    assert memory["used"] == memory["read"]


# ----------------------------------------------------------------------------------------------------- file system


def test_files_in_which_nothing_changes_are_clones_where_that_can_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = save_llama(tmp_path / "base")
    adapter = save_adapter(tmp_path / "adapter", base, target_modules=["q_proj"], layers_to_transform=[0])
    whole = merge_lora_checkpoint(base, adapter, tmp_path / "whole")
    cloned = []

    def share(target: int, request: int, source: int) -> int:
        assert request == 0x40049409
        size = os.fstat(source).st_size
        assert os.copy_file_range(source, target, size, 0, 0) == size
        cloned.append(size)
        return 0

    monkeypatch.setattr(fcntl, "ioctl", share)
    report = merge_lora_checkpoint(base, adapter, tmp_path / "out")
    touched = {tensor.file for tensor in report.of("merged")}
    assert len(cloned) == len({tensor.file for tensor in report.tensors} - touched) > 0
    assert report.tensors == whole.tensors
    for path in (tmp_path / "whole").iterdir():
        assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes()


# ---------------------------------------------------------------------------------------------------------- device

DEVICE = """
    import itertools, sys, torch, torch_npu
    from pathlib import Path
    from safetensors.torch import load_file
    from safe_loading import merge_lora_checkpoint
    root = Path(sys.argv[1])
    def tensors(folder):
        return {n: t for p in folder.glob("*.safetensors") for n, t in load_file(p).items()}
    for kind, dtype in itertools.product(("plain", "dora"), ("float32", "bfloat16")):
        on_npu, on_cpu = root / f"{kind}-{dtype}-npu", root / f"{kind}-{dtype}-cpu"
        torch_npu.reset()
        merge_lora_checkpoint(root / "base", root / kind, on_npu, device="npu:3", dtype=dtype)
        merge_lora_checkpoint(root / "base", root / kind, on_cpu, dtype=dtype)
        ours, theirs = tensors(on_npu), tensors(on_cpu)
        report({f"{kind} {dtype}": [all(torch.equal(t, theirs[n]) for n, t in ours.items()), torch_npu.contexts(),
                       max(s["peak"] for s in torch_npu.stats().values())]})
"""


def test_blocks_are_merged_on_the_device_that_is_named(tmp_path: Path, simulated: Simulated) -> None:
    base = save_llama(tmp_path / "base")
    for kind, config in (("plain", {"target_modules": "all-linear"}), ("dora", {"use_dora": True})):
        save_adapter(tmp_path / kind, base, **config)
    facts = simulated.run_forked(DEVICE, args=[tmp_path])
    assert len(facts) == 4
    for case, (equal, contexts, peak) in facts.items():
        assert equal, case
        assert contexts == [3]
        assert peak > 0


# -------------------------------------------------------------------------------------- layouts that no model has


def placed(weight: torch.Tensor, update: Update, whole: Any, tensors: dict[str, TensorInfo]) -> Changes:
    edit = Edit(("w",), tuple(weight.shape), {"w": WeightChange(updates={(): update})})
    return place_edits([edit], CheckpointLayout({"w": whole}, {}, ()), tensors)


def test_a_dora_on_a_weight_that_the_disk_holds_transposed() -> None:
    generator = torch.Generator().manual_seed(0)
    weight, left, right, magnitude = (
        torch.randn(shape, generator=generator) for shape in ((24, 40), (24, 4), (4, 40), (24,))
    )
    update = Update((24, 40), (Term(left, right, 0.5, magnitude.abs()),))
    info = TensorInfo("t", "F32", (40, 24), 0, 40 * 24 * 4)
    changes = placed(weight, update, transpose(piece_on_disk("t", (40, 24)), 0, 1), {"t": info})
    assert not changes.problems
    ((part,), columns) = changes.merges["t"]
    assert (columns, part.update.needs_norms) == (24, True)
    turned, expected = weight.T.contiguous(), weight.clone()
    merge_matrix(part.update, turned)
    merge_matrix(update, expected)
    assert torch.equal(turned.T, expected)


def test_a_dora_whose_norms_lie_in_several_tensors_is_refused() -> None:
    update = Update((24, 40), (Term(torch.ones(24, 4), torch.ones(4, 40), 1.0, torch.ones(40)),), axis=1)
    half = TensorInfo("a", "F32", (12, 40), 0, 12 * 40 * 4)
    tensors = {"a": half, "b": TensorInfo("b", "F32", (12, 40), 0, 12 * 40 * 4)}
    whole = concatenate([piece_on_disk(name, (12, 40)) for name in tensors], 0)
    changes = placed(torch.ones(24, 40), update, whole, tensors)
    assert "needs the norms of columns that the disk holds in parts" in changes.problems[0]
    by_rows = Update((24, 40), (Term(torch.ones(24, 4), torch.ones(4, 40), 1.0, torch.ones(24)),))
    assert not placed(torch.ones(24, 40), by_rows, whole, tensors).problems
    apart = split(piece_on_disk("c", (24, 80)), [40, 40], 1)[0]
    wide = {"c": TensorInfo("c", "F32", (24, 80), 0, 24 * 80 * 4)}
    assert placed(torch.ones(24, 40), by_rows, apart, wide).problems
