"""The files of a folder against the hashes that they were published with. Imports no torch.

A file of a Hugging Face cache lies in a blob that is named by its hash: git's SHA-1 for a small file, SHA-256 for one
that LFS or Xet stores. The manifest of a model signing (`signing_manifest.py`) lists hashes beside the weights, and so
does a list of `sha256sum` (`sha256sums.py`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from safe_loading._core.report import Finding

from .faults import fault, listed, note
from .files import is_blob, try_open
from .sha256sums import GIT, SUMS, digests_of, files_in, read_sums
from .signer import Signer, signature_findings
from .signing_manifest import MANIFEST, Manifest, read_manifest

_BLOB_NAMES = {40: GIT, 64: "sha256"}
_HEX = re.compile("[0-9a-f]+")
_AGAIN = "download the file again (`hf download` with --force-download), or copy it from where it is whole"


class Published(NamedTuple):
    """A hash that a file should have, and who says so."""

    algorithm: str
    digest: str
    by: str


class Comparison(NamedTuple):
    """How many files have been compared with their hashes, and the findings about them."""

    files: int
    findings: list[Finding]


def compare_hashes(folder: Path, names: Iterable[str] | None = None, signer: Signer | None = None) -> Comparison:
    """Read the files of a folder (all of them, or those that are named), and compare each with its published hashes.

    Without any hash there is nothing to compare with, which is an error, because it was asked for. A signer that is
    named must have signed them.
    """
    manifest = read_manifest(folder)
    every = sorted(files_in(folder)) if names is None else [*names]
    listing = manifest.digests if isinstance(manifest, Manifest) else {}
    listed_sums = read_sums(folder)
    sums = {} if isinstance(listed_sums, Finding) else listed_sums
    findings = [each for each in (manifest, listed_sums) if isinstance(each, Finding)]
    if signer is not None and not isinstance(manifest, Finding):
        findings += signature_findings(folder, every, manifest, signer)
    if names is None:
        findings += [*_gone(folder, MANIFEST, listing, every), *_gone(folder, SUMS, sums, every)]
    if names is None and isinstance(manifest, Manifest) and signer is None:
        findings.append(_not_verified(folder))
    compared, unknown = 0, list[str]()
    for name in every:
        expected = [*_by_its_blob(folder / name), *_by_manifest(listing.get(name))]
        expected += [Published("sha256", sums[name], SUMS)] if name in sums else []
        if not expected:
            unknown.append(name)
            continue
        findings += compare_file(folder / name, expected)
        compared += 1
    return Comparison(compared, [*findings, *_unknown(folder, unknown, compared)])


def compare_file(path: Path, expected: Iterable[Published]) -> Iterator[Finding]:
    """Yield an error for each hash that a file does not have; the file is read once."""
    file = try_open(path)
    if isinstance(file, Finding):
        yield file
        return
    wanted = [*expected]
    with file:
        found = digests_of(file, {each.algorithm for each in wanted})
    for algorithm, digest, by in wanted:
        if found[algorithm] != digest:
            message = f"its bytes have the {algorithm} {found[algorithm]}, and {by} says {digest}: damaged, or changed"
            yield fault("hash-differs", path, message, _AGAIN)


def _by_its_blob(path: Path) -> Iterator[Published]:
    try:
        real = path.resolve()
    except (OSError, RuntimeError):  # links that lead in a circle, to no blob
        return
    algorithm = _BLOB_NAMES.get(len(real.name))
    if algorithm is not None and is_blob(real) and _HEX.fullmatch(real.name):
        yield Published(algorithm, real.name, "the name of its blob in the cache")


def _by_manifest(entry: tuple[str, str] | None) -> Iterator[Published]:
    if entry is not None:
        yield Published(*entry, MANIFEST)


def _gone(folder: Path, by: str, listing: Mapping[str, object], names: Iterable[str]) -> Iterator[Finding]:
    if gone := sorted(set(listing).difference(names, (MANIFEST, SUMS))):
        yield fault("not-found", folder, f"{by} lists files that are not there: {listed(gone)}", _AGAIN)


def _not_verified(folder: Path) -> Finding:
    message = f"the hashes in {MANIFEST} were compared, and its signature was not: it may be by anybody"
    fix = (
        "pass the public key or the certificates of who should have signed it: `signed_by=`, or `check --signed-by KEY`"
    )
    return note("info", "signature-not-verified", folder / MANIFEST, message, fix)


def _unknown(folder: Path, names: list[str], compared: int) -> Iterator[Finding]:
    if not compared:
        message = (
            f"no file has a published hash to be compared with: it is in no Hugging Face cache, and has no {MANIFEST} "
            f"and no {SUMS}"
        )
        fix = "check the snapshot in the cache (the folder that `hf download` prints), or leave hashes=True out"
        yield fault("hash-unknown", folder, message, fix)
    elif names:
        message = f"files without a published hash, which were not compared: {listed(names)}"
        yield note("warning", "hash-unknown", folder, message, "look at them, or remove what is not yours")
