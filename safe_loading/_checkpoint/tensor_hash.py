"""The hash of a tensor's bytes that a merge records: XXH3-128.

It finds damage, not forgery, so a hash that was made for speed does: on one core it reads some ten times the bytes of
SHA-256.
"""

from __future__ import annotations

from typing import Protocol

import xxhash

KEY = "xxh3_128"
"""The entry of the hash in ``merge_report.json``."""


class TensorHash(Protocol):
    """A hash that is fed block by block."""

    def update(self, data: bytes | memoryview, /) -> None:
        """Add bytes."""
        ...

    def hexdigest(self) -> str:
        """Return the hash of all bytes so far, as hexadecimal."""
        ...


def new_hash() -> TensorHash:
    """Return an empty hash."""
    return xxhash.xxh3_128()


def recorded_hash(facts: object) -> str | None:
    """Return the hash in the entry of a tensor in ``merge_report.json``; None where it holds none."""
    found = facts.get(KEY) if isinstance(facts, dict) else None
    return found if isinstance(found, str) else None
