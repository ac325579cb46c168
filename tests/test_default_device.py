"""Scripts that call ``torch.set_default_device``, or are in ``with torch.device(...)``, get what others get."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from models import save_adapter, save_llama
from wrapped_models import peft_llama

from safe_loading import (
    Workload,
    audit_model,
    check_checkpoint,
    load_adapter_on_rank,
    load_peft_on_rank,
    merge_lora_checkpoint,
    merge_lora_inplace,
    plan_device_map,
    predict_memory,
    verify_merge,
)


@contextmanager
def default_device() -> Iterator[None]:
    torch.set_default_device("meta")  # a card would do as well: what is made there is no tensor of the host
    try:
        yield
    finally:
        torch.set_default_device(None)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """Return a base, an adapter with a DoRA's magnitudes, and their merge."""
    root = tmp_path_factory.mktemp("default")
    base = save_llama(root / "base", torch.bfloat16)
    adapter = save_adapter(root / "adapter", base, use_dora=True)
    merge_lora_checkpoint(base, adapter, root / "merged")
    return base, adapter, root / "merged"


def _later(base: Path, adapter: Path) -> torch.nn.Module:
    model = load_peft_on_rank(base, adapter)
    load_adapter_on_rank(model, adapter, "later")
    return model


def _bytes(folder: Path) -> str:
    return hashlib.sha256(b"".join(file.read_bytes() for file in sorted(folder.glob("*.safetensors")))).hexdigest()


VERBS: dict[str, Callable[[Path, Path, Path, Path], Any]] = {
    "check": lambda base, adapter, merged, out: [check_checkpoint(each, values=True).ok for each in (base, adapter)],
    "load": lambda base, adapter, merged, out: load_peft_on_rank(base, adapter).state_dict(),
    "load later": lambda base, adapter, merged, out: _later(base, adapter).state_dict(),
    "merge": lambda base, adapter, merged, out: merge_lora_inplace(load_peft_on_rank(base, adapter)).state_dict(),
    "merge on disk": lambda base, adapter, merged, out: (merge_lora_checkpoint(base, adapter, out), _bytes(out))[1],
    "verify": lambda base, adapter, merged, out: [t.verdict for t in verify_merge(base, adapter, merged).tensors],
    "plan": lambda base, adapter, merged, out: (
        plan_device_map(base, {0: "1GB"}, workload=Workload.generate(1, 8)).devices[0].used
    ),
    "predict": lambda base, adapter, merged, out: (
        predict_memory(base, Workload.train(1, 8, adapter=adapter)).allocated_peak_bytes
    ),
    "audit": lambda base, adapter, merged, out: [
        finding.code for finding in audit_model(peft_llama(), Workload.train(1, 8), round_trip=True).findings
    ],
}


@pytest.mark.each_value
@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("context", [default_device, lambda: torch.device("meta")], ids=["default", "with"])
def test_every_verb_does_the_same(
    folders: tuple[Path, Path, Path], tmp_path: Path, context: Callable[[], Any], verb: str
) -> None:
    expected = VERBS[verb](*folders, tmp_path / "plain")
    with context():
        found = VERBS[verb](*folders, tmp_path / "out")
    if not isinstance(expected, dict):
        assert found == expected
        return
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].device.type == "cpu", name
        assert torch.equal(found[name], tensor), name
