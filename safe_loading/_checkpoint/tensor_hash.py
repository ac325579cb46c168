"""The hash of a tensor's bytes that a merge records: XXH3-128, and SHA-256 in the records of earlier releases.

It finds damage, not forgery, so a hash that was made for speed does: on one core it reads some ten times the bytes.
"""

from __future__ import annotations

import hashlib
from typing import Protocol

import xxhash

KEY = "xxh3_128"
"""The entry of the hash in ``merge_report.json``."""
_SHA256 = "sha256"
_SHA256_DIGITS = 64


class TensorHash(Protocol):
    """A hash that is fed block by block."""

    def update(self, data: bytes | memoryview, /) -> None:
        """Add bytes."""
        ...

    def hexdigest(self) -> str:
        """Return the hash of all bytes so far, as hexadecimal."""
        ...


def new_hash(recorded: str | None = None) -> TensorHash:
    """Return an empty hash, of the kind that a record holds, if there is one."""
    return hashlib.sha256() if recorded is not None and len(recorded) == _SHA256_DIGITS else xxhash.xxh3_128()


def recorded_hash(facts: object) -> str | None:
    """Return the hash in the entry of a tensor in ``merge_report.json``, of whichever kind."""
    if not isinstance(facts, dict):
        return None
    found = facts.get(KEY) or facts.get(_SHA256)
    return found if isinstance(found, str) else None


def named(digest: str | None) -> dict[str, str | None]:
    """Return the entry of a hash for a record: its value by its kind."""
    return {_SHA256 if digest is not None and len(digest) == _SHA256_DIGITS else KEY: digest}
