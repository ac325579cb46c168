"""What only the bytes of the tensors tell: NaN, infinity, and bytes that nobody wrote there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from models import save_adapter, save_llama
from safetensors.torch import load_file, save_file

from safe_loading import CheckpointReport, check_checkpoint, merge_lora_checkpoint
from safe_loading.__main__ import main
from safe_loading._model.layout import tensor_contents as contents

FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e5m2, torch.complex64]


def found(report: CheckpointReport) -> list[tuple[str, str]]:
    return [(finding.code, finding.where.rpartition(": ")[2]) for finding in report.findings]


@pytest.mark.parametrize("dtype", [*FLOATS, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("place", [0, 70, 98])
def test_one_element_in_any_block_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, place: int
) -> None:
    monkeypatch.setattr(contents, "_BLOCK_BYTES", 64)
    bad, large = torch.ones(9, 11), torch.ones(9, 11)
    bad.view(-1)[place] = float("nan")
    large.view(-1)[place] = float("-inf")
    tensors = {"a.bad": bad.to(dtype), "b.good": torch.ones(33).to(dtype), "empty": torch.ones(0).to(dtype)}
    if dtype != torch.float8_e4m3fn:  # it has no infinity
        tensors["c.large"] = large.to(dtype)
    save_file({**tensors, "counts": torch.full((9,), -1)}, tmp_path / "model.safetensors")
    report = check_checkpoint(tmp_path / "model.safetensors", values=True)
    assert not report.ok
    wanted = [("nan", "a.bad"), ("infinity", "c.large")]
    assert found(report) == wanted[: len(tensors) - 2]
    assert check_checkpoint(tmp_path / "model.safetensors").findings == ()


def test_a_merge_is_checked_by_its_own_hashes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = save_llama(tmp_path / "base")
    for name, seed in (("one", 1), ("two", 2)):
        save_adapter(tmp_path / f"adapter-{name}", base, seed=seed)
        merge_lora_checkpoint(base, tmp_path / f"adapter-{name}", tmp_path / name)
    assert main(["check", "--values", str(tmp_path / "one")]) == 0
    shards = [path.name for path in sorted((tmp_path / "one").glob("*.safetensors"))]
    one, two = ({name: load_file(tmp_path / each / name) for name in shards} for each in ("one", "two"))
    changed = {name: [key for key in one[name] if not torch.equal(one[name][key], two[name][key])] for name in shards}
    name, differing = next((name, keys) for name, keys in changed.items() if keys)
    (tmp_path / "one" / name).write_bytes((tmp_path / "two" / name).read_bytes())  # a shard of another run
    report = check_checkpoint(tmp_path / "one", values=True)
    assert sorted(found(report)) == sorted(("hash-differs", name) for name in differing)
    assert check_checkpoint(tmp_path / "one").ok
    assert main(["check", "--values", str(tmp_path / "one")]) == 1
    assert "damaged or from another save" in capsys.readouterr().out


def test_a_record_that_cannot_be_read_is_a_finding_and_one_without_hashes_is_none(tmp_path: Path) -> None:
    folder = save_llama(tmp_path / "base")
    (folder / "merge_report.json").write_text('{"tensors": {"lm_head.weight": {"xxh3_128": null}, "x": 1}}')
    assert check_checkpoint(folder, values=True).ok
    (folder / "merge_report.json").write_text(json.dumps({"tensors": [1]}))
    assert check_checkpoint(folder, values=True).ok
    (folder / "merge_report.json").write_text("{")
    assert [finding.code for finding in check_checkpoint(folder, values=True).findings] == ["json-invalid"]
