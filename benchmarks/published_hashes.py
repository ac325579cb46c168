"""What comparing files with their published hashes costs, beside hashing the same bytes with hashlib alone.

A snapshot of a Hugging Face cache with one large file is made, and is in the page cache for both: so it is the time of
SHA-256, and the reading around it, that is measured.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from _common import MIB, headline, options, promise, table, write_json

from safe_loading._checkpoint.published_hashes import compare_hashes

MOST = 1.1  # times hashlib alone


def snapshot_of(size: int, folder: Path) -> Path:
    """Return a snapshot with one file of random bytes, in a blob that is named by its SHA-256."""
    data = os.urandom(MIB) * (size // MIB)
    blob = folder / "models--a--b" / "blobs" / hashlib.sha256(data).hexdigest()
    snapshot = folder / "models--a--b" / "snapshots" / "1"
    for needed in (blob.parent, snapshot):
        needed.mkdir(parents=True)
    blob.write_bytes(data)
    (snapshot / "model.safetensors").symlink_to(blob)
    return snapshot


def alone(snapshot: Path) -> None:
    """Hash the file in chunks of 1 MiB with hashlib, as a user's own script does."""
    digest = hashlib.sha256()
    with (snapshot / "model.safetensors").open("rb") as file:
        while chunk := file.read(MIB):
            digest.update(chunk)
    assert digest.hexdigest()


def seconds(call: Callable[[Path], object], snapshot: Path) -> float:
    """Return the CPU seconds of a call."""
    began = time.process_time()
    call(snapshot)
    return time.process_time() - began


def main() -> None:
    """Measure both in turns, and print the table."""
    parser = options(__doc__, quick="one file of 32 MiB", repeats=7)
    arguments = parser.parse_args()
    size = (32 if arguments.quick else 1024) * MIB
    with tempfile.TemporaryDirectory() as folder:
        snapshot = snapshot_of(size, Path(folder))
        runs = [(seconds(alone, snapshot), seconds(compare_hashes, snapshot)) for _ in range(arguments.repeats)]
    by_hand, ours = (min(each) for each in zip(*runs, strict=True))
    rows = [("hashlib alone", f"{by_hand:.3f}", ""), ("compare_hashes", f"{ours:.3f}", f"{ours / by_hand:.3f}")]
    print(headline())
    print(table(f"{size // MIB} MiB, the least of {len(runs)} runs", ("", "CPU s", "ratio"), rows))
    print(f"\npromise: at most {MOST} times: {promise(ours <= MOST * by_hand, quick=arguments.quick)}")
    write_json(arguments.json, {"alone": by_hand, "compared": ours})


if __name__ == "__main__":
    main()
