"""The advice of errors about sizes, devices, paths and engines, taken: what a message names is read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from safe_loading import ArgumentError
from safe_loading._core.arguments import compute_capability, model_source, whole_number
from safe_loading._core.cards import CARDS, card_of
from safe_loading._core.parse_size import mixed_types, parse_device, parse_limits, parse_size
from safe_loading._core.paths import path_text

GIB = 2**30


# What is passed, the advice, and what it names, with what that is read as.
PAIRS: dict[str, tuple[Callable[..., Any], object, str, list[tuple[object, object]]]] = {
    "a size": (
        lambda value: parse_size(value, "card"),
        "much",
        'pass a number of bytes, or text such as "20GiB" (2^30 bytes each) or "20GB" (10^9 bytes each)',
        [(20, 20), ("20GiB", 20 * GIB), ("20GB", 20 * 10**9)],
    ),
    "bytes or bits": (
        lambda value: parse_size(value, "card"),
        "20Gb",
        'pass "20GB" for 20000000000 bytes, or 2500000000 for the bytes of so many bits, as accelerate reads Gb.',
        [("20GB", 20 * 10**9), (2500000000, 2500000000)],
    ),
    "limits": (
        parse_limits,
        ["20GiB"],
        'pass {0: "20GiB", 1: "20GiB", "cpu": "64GiB"}.',
        [({0: "20GiB", 1: "20GiB", "cpu": "64GiB"}, {0: 20 * GIB, 1: 20 * GIB, "cpu": 64 * GIB})],
    ),
    "no limit": (parse_limits, {}, 'pass {0: "20GiB"}, or None for what is free now.', [({0: "20GiB"}, {0: 20 * GIB})]),
    "a device twice": (parse_limits, {0: "1GiB", "cuda:0": "1GiB"}, "name it once.", [({0: "1GiB"}, {0: GIB})]),
    "a device": (
        parse_device,
        "gpu",
        'use the index of an accelerator (0, 1, ... or "cuda:0"), "cpu" or "disk".',
        [(0, 0), ("1", 1), ("cuda:0", 0), ("cpu", "cpu"), ("disk", "disk")],
    ),
    "a path": (
        lambda value: path_text(value, "source"),
        "",
        "pass a path, as text that is not empty or a pathlib.Path.",
        [("base", "base"), (Path("base"), "base")],
    ),
    "a path of a model": (
        lambda value: path_text(value, "source"),
        LlamaConfig(),
        "pass the folder that its save_pretrained writes.",
        [("base", "base")],
    ),
    "a count": (
        lambda value: whole_number(value, "ranks", least=2),
        1,
        "pass a number, 2 or more.",
        [(2, 2), (3, 3)],
    ),
    "a model": (
        lambda value: model_source(value, "model", LlamaConfig),
        3,
        "pass a folder, a hub id or one of LlamaConfig.",
        [("base", None), ("owner/name", None), (LlamaConfig(), None)],
    ),
    "a capability": (compute_capability, 8.0, "pass major and minor, for example (8, 0).", [((8, 0), None)]),
    "a card": (card_of, "h10", "write h100", [("h100", CARDS["h100"])]),
    "a card of several sizes": (
        card_of,
        "a100",
        "write a100-40gb or a100-80gb, or give its memory, such as 24GB.",
        [("a100-40gb", CARDS["a100-40gb"]), ("a100-80gb", CARDS["a100-80gb"])],
    ),
}


@pytest.mark.parametrize("kind", PAIRS)
def test_an_argument_is_read_once_the_advice_is_taken(kind: str) -> None:
    read, wrong, advice, right = PAIRS[kind]
    with pytest.raises(ArgumentError) as refused:
        read(wrong)
    assert advice in str(refused.value)
    for value, expected in right:
        assert read(value) == expected


def test_the_memory_of_a_card_and_one_type_of_accelerators() -> None:
    with pytest.raises(ArgumentError, match="or give its memory, such as 24GB"):
        card_of("mine")
    assert card_of("24GB").memory == 24 * 10**9
    (problem,) = mixed_types(["cuda:0", "npu:1"], "max_memory")
    assert problem.endswith("name one type.")
    assert mixed_types(["cuda:0", "cuda:1"], "max_memory") == []
