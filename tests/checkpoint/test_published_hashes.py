"""Files against the hashes that they were published with: names of blobs in a cache, and manifests of model signing."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import random
import subprocess
from pathlib import Path

import pytest
from faults.checkpoints import write_model

from safe_loading import check_checkpoint
from safe_loading.__main__ import main
from safe_loading._checkpoint.published_hashes import compare_hashes
from safe_loading._core.report import Finding


def write_cache(folder: Path) -> Path:
    """A snapshot as huggingface_hub lays it out: small files by git's hash, those of LFS by SHA-256."""
    made = write_model(folder / "made", {"model-1.safetensors": {"a": 4}, "model-2.safetensors": {"b": 2}})
    (made / "1_Pooling").mkdir()
    (made / "1_Pooling" / "config.json").write_text("{}")
    repository = folder / "models--org--name"
    blobs, snapshot = repository / "blobs", repository / "snapshots" / ("0" * 40)
    blobs.mkdir(parents=True)
    for file in (each for each in made.rglob("*") if each.is_file()):
        data = file.read_bytes()
        small = file.suffix == ".json"
        name = hashlib.sha1(b"blob %d\0" % len(data) + data) if small else hashlib.sha256(data)
        (blobs / name.hexdigest()).write_bytes(data)
        link = snapshot / file.relative_to(made)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(blobs / name.hexdigest(), link.parent))
    return snapshot


def write_manifest(folder: Path, **changes: object) -> None:
    """A manifest as model-signing 1.0 writes it, with a signature of nothing."""
    names = sorted(each.relative_to(folder).as_posix() for each in folder.rglob("*") if each.is_file())
    digests = {name: hashlib.sha256((folder / name).read_bytes()) for name in names if name != "model.sig"}
    root = hashlib.sha256(b"".join(digest.digest() for digest in digests.values())).hexdigest()
    resources = [{"name": n, "algorithm": "sha256", "digest": d.hexdigest()} for n, d in digests.items()]
    serialization = {"method": "files", "hash_type": "sha256", "allow_symlinks": False, "ignore_paths": ["model.sig"]}
    statement = {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [{"name": folder.name, "digest": {"sha256": root}}],
        "predicateType": "https://model_signing/signature/v1.0",
        "predicate": {"serialization": serialization, "resources": resources},
        **changes,
    }
    envelope = {
        "payload": base64.b64encode(json.dumps(statement).encode()).decode(),
        "payloadType": "application/vnd.in-toto+json",
        "signatures": [{"sig": "AA=="}],
    }
    bundle = {"mediaType": "application/vnd.dev.sigstore.bundle.v0.3+json", "dsseEnvelope": envelope}
    (folder / "model.sig").write_text(json.dumps(bundle))


def errors(folder: Path) -> list[Finding]:
    return [finding for finding in compare_hashes(folder).findings if finding.severity == "error"]


def test_a_small_file_has_the_hash_of_git(tmp_path: Path) -> None:
    snapshot = write_cache(tmp_path)
    config = (snapshot / "config.json").resolve()
    git = subprocess.run(["git", "hash-object", config], capture_output=True, text=True, check=False)
    assert git.stdout.strip() in ("", config.name)  # empty where git is not installed
    assert compare_hashes(snapshot) == (5, [])


def test_one_flipped_bit_is_found_in_1000_of_1000_tries(tmp_path: Path) -> None:
    snapshot, draw = write_cache(tmp_path), random.Random(0)
    files = sorted(each.resolve() for each in snapshot.rglob("*") if each.is_file())
    found = 0
    for _ in range(1000):
        file = draw.choice(files)
        data = bytearray(file.read_bytes())
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        whole = file.read_bytes()
        file.write_bytes(data)
        (finding,) = errors(snapshot)
        found += finding.code == "hash-differs" and file.name in finding.message
        file.write_bytes(whole)
    assert found == 1000
    assert not errors(snapshot)


def test_check_says_how_many_files_were_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    snapshot = write_cache(tmp_path)
    report = check_checkpoint(snapshot, headers=True, hashes=True)
    assert report.ok
    assert report.hashed == 5
    assert main(["check", "--headers", "--hashes", str(snapshot)]) == 0
    assert "5 files compared by hash" in capsys.readouterr().out
    weights = snapshot / "model-2.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.resolve().write_bytes(data)
    assert check_checkpoint(snapshot, headers=True).ok  # nothing else sees it
    assert not check_checkpoint(snapshot, headers=True, hashes=True).ok
    (alone,) = check_checkpoint(weights, hashes=True).findings
    assert alone.code == "hash-differs"
    data[-1] ^= 1
    weights.resolve().write_bytes(data)  # what a download again does
    assert check_checkpoint(weights, hashes=True).ok


def test_a_folder_without_hashes_is_not_called_whole(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "plain", {"model-1.safetensors": {"a": 4}})
    (finding,) = errors(folder)
    assert finding.code == "hash-unknown"
    write_manifest(folder)
    assert not errors(folder)


def test_files_that_nobody_published_are_named(tmp_path: Path) -> None:
    snapshot = write_cache(tmp_path)
    (snapshot / "mine.txt").write_text("notes")
    compared = compare_hashes(snapshot)
    assert compared.files == 5
    assert [(each.code, each.severity) for each in compared.findings] == [("hash-unknown", "warning")]
    assert "mine.txt" in compared.findings[0].message
    (snapshot / "mine.txt").unlink()
    assert not compare_hashes(snapshot).findings


def test_a_manifest_is_compared_and_said_to_be_unverified(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "signed", {"model-1.safetensors": {"a": 4}, "model-2.safetensors": {"b": 2}})
    write_manifest(folder)
    compared = compare_hashes(folder)
    assert compared.files == 4
    assert [finding.code for finding in compared.findings] == ["signature-not-verified"]
    (folder / "config.json").write_text((folder / "config.json").read_text() + " ")
    assert [finding.code for finding in errors(folder)] == ["hash-differs"]
    (folder / "model-1.safetensors").unlink()
    assert sorted(finding.code for finding in errors(folder)) == ["hash-differs", "not-found"]


@pytest.mark.parametrize(
    "changes",
    [
        {"_type": "https://in-toto.io/Statement/v0.1"},
        {"predicateType": "https://slsa.dev/provenance/v1"},
        {"subject": [{"name": "x", "digest": {"sha256": "00"}}]},
        {"subject": []},
        {"predicate": {}},
        {"predicate": {"serialization": {"method": "shards"}, "resources": []}},
        {
            "predicate": {
                "serialization": {"method": "files"},
                "resources": [{"name": "../../etc/passwd", "algorithm": "sha256", "digest": "00"}],
            }
        },
        {
            "predicate": {
                "serialization": {"method": "files"},
                "resources": [{"name": "config.json", "algorithm": "md5", "digest": "00"}],
            }
        },
    ],
)
def test_a_manifest_of_another_kind_is_an_error(tmp_path: Path, changes: dict[str, object]) -> None:
    folder = write_model(tmp_path / "signed", {"model-1.safetensors": {"a": 4}})
    write_manifest(folder, **changes)
    assert "manifest" in [finding.code for finding in errors(folder)]
    (folder / "model.sig").write_text("{}")
    assert "manifest" in [finding.code for finding in errors(folder)]
    write_manifest(folder)
    assert not errors(folder)


def test_links_in_a_circle_have_no_hash(tmp_path: Path) -> None:
    snapshot = write_cache(tmp_path)
    (snapshot / "circle.bin").symlink_to("circle.bin")
    assert compare_hashes(snapshot, ["circle.bin", "config.json"]).files == 1
