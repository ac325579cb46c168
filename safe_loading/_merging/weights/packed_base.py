"""The finding of an adapter that was trained on a packed base, and is merged into one that is not. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Mapping

from safe_loading._core.report import Finding

# How repositories of packed bases are called; the config of an adapter says no more of its base, and is not followed.
_PACKED = re.compile(r"[-_.](?:bnb[-_.])?[48][-_.]?bits?(?:[-_.]|$)", re.IGNORECASE)


def packed_base_findings(named: Mapping[str, object]) -> list[Finding]:
    """Return the finding of adapters whose bases were packed by their names; ``named`` are those by adapter."""
    packed = {name: str(base) for name, base in named.items() if _PACKED.search(str(base).rstrip("/").split("/")[-1])}
    if not packed:
        return []
    name, base = next(iter(packed.items()))
    message = (
        f"adapter {name!r} names {base!r} as its base, packed by its name, and this base is not. It has learned to "
        f"make up for the rounding of that base: merged into this one, the model is as far from the one that was "
        f"trained as the rounding is large; merged into the values of the packed base, it is the trained one but for "
        f"one rounding to the dtype."
    )
    fix = (
        "merge it into the base that it names with dequantize=True for the model that was trained; keep this merge "
        "where the precision of the original base counts for more."
    )
    return [Finding("trained-on-packed", "warning", base, message, fix)]
