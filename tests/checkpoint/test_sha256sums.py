"""Lists of hashes (``SHA256SUMS``) as ``sha256sum`` writes and checks them, beside a model and by a merge."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from faults.checkpoints import write_model
from models import save_adapter, save_llama

from safe_loading import check_checkpoint, merge_lora_checkpoint
from safe_loading.__main__ import main
from safe_loading._checkpoint.published_hashes import compare_hashes
from safe_loading._checkpoint.sha256sums import SUMS, read_sums, sums_of

SHA256SUM = shutil.which("sha256sum")


def listed_model(folder: Path) -> Path:
    model = write_model(folder / "model", {"model-1.safetensors": {"a": 4}, "model-2.safetensors": {"b": 2}})
    (model / SUMS).write_text(sums_of(model))
    return model


def errors(folder: Path) -> list[str]:
    return [finding.code for finding in compare_hashes(folder).findings if finding.severity == "error"]


def is_whole_by_sha256sum(folder: Path) -> bool:
    return not subprocess.run(["sha256sum", "--check", "--strict", SUMS], cwd=folder, capture_output=True).returncode


def test_a_folder_is_compared_with_its_list(tmp_path: Path) -> None:
    model = listed_model(tmp_path)
    assert compare_hashes(model) == (4, [])
    weights = model / "model-2.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert errors(model) == ["hash-differs"]
    weights.unlink()
    assert errors(model) == ["not-found"]
    weights.write_bytes(whole)
    (model / "notes.txt").write_text("mine")
    (finding,) = compare_hashes(model).findings
    assert (finding.code, finding.severity) == ("hash-unknown", "warning")


@pytest.mark.skipif(SHA256SUM is None, reason="there is no sha256sum")
def test_sha256sum_reads_what_is_written_and_its_own_lists_are_read(tmp_path: Path) -> None:
    model = listed_model(tmp_path)
    (model / "inside").mkdir()
    for name in ("two\nlines", " blank ", "inside/ümlaut.txt"):
        (model / name).write_text(name)
    (model / SUMS).write_text(sums_of(model))
    assert is_whole_by_sha256sum(model)
    ours = read_sums(model)
    names = ["./" + name for name in ours]
    for mode in ("--text", "--binary"):
        theirs = subprocess.run(["sha256sum", mode, *names], cwd=model, capture_output=True, check=True).stdout
        (model / SUMS).write_bytes(theirs)
        assert read_sums(model) == ours
    assert not errors(model)


@pytest.mark.parametrize(
    "content",
    [
        b"no list\n",
        b"0" * 64 + b"\n",
        b"0" * 40 + b"  config.json\n",
        b"0" * 64 + b"  /etc/passwd\n",
        b"0" * 64 + b"  ../config.json\n",
        b"\xff\xfe\n",
        b"\n",
    ],
)
def test_a_list_of_another_form_is_an_error_until_it_is_written_again(tmp_path: Path, content: bytes) -> None:
    model = listed_model(tmp_path)
    (model / SUMS).write_bytes(content)
    assert "manifest" in errors(model)
    (model / SUMS).write_text(sums_of(model))
    assert not errors(model)
    (model / SUMS).unlink()
    (model / SUMS).symlink_to("nowhere")
    assert "broken-link" in errors(model)


def test_a_merge_writes_a_list_that_check_compares(tmp_path: Path) -> None:
    base = save_llama(tmp_path / "base")
    (base / "model.sig").write_text("{}")  # of other bytes than those of the output
    (base / SUMS).write_text("")
    adapter = save_adapter(tmp_path / "adapter", base)
    merge_lora_checkpoint(base, adapter, tmp_path / "plain")
    assert not {SUMS, "model.sig"} & {each.name for each in (tmp_path / "plain").iterdir()}
    merged = tmp_path / "merged"
    assert main(["merge", "--quiet", "--manifest", str(base), str(adapter), str(merged)]) == 0
    report = check_checkpoint(merged, headers=True, hashes=True)
    assert report.ok
    assert not report.findings
    assert report.hashed == sum(each.is_file() for each in merged.rglob("*")) - 1
    assert SHA256SUM is None or is_whole_by_sha256sum(merged)
    config = merged / "config.json"
    config.write_text(config.read_text() + " ")
    assert not check_checkpoint(merged, headers=True, hashes=True).ok
