"""Wrong arguments of every public function: one class of error, at once, and nothing is changed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import save_adapter, save_llama

import safe_loading as s


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("arguments")
    base = save_llama(folder / "base", torch.float32)
    save_adapter(folder / "adapter", base)
    return folder


@pytest.fixture(autouse=True)
def _inside(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)


def load(adapter: Any = "adapter", base: Any = "base", **options: Any) -> Any:
    return s.load_peft_on_rank(adapter, base, **options)


PLAIN = torch.nn.Linear(2, 2)
CALLS: dict[str, Callable[[], Any]] = {
    "device_for_rank text": lambda: s.device_for_rank("0"),
    "device_for_rank negative": lambda: s.device_for_rank(-1),
    "device_for_rank float": lambda: s.device_for_rank(1.0),
    **{f"load adapter {bad!r:.20}": lambda bad=bad: load(bad) for bad in (None, 3, "", {}, [], b"adapter", "a\0")},
    "load adapter long": lambda: load("a" * 5000),
    **{f"load base {bad!r:.20}": lambda bad=bad: load(base=bad) for bad in (3, "", {}, b"base", "b" * 5000, PLAIN)},
    **{f"load device {bad!r}": lambda bad=bad: load(device=bad) for bad in ("gpu", 1.5, "cuda:0")},
    **{f"load dtype {bad!r}": lambda bad=bad: load(dtype=bad) for bad in ("f16", 3, torch.int8)},
    **{f"load timeout {bad!r}": lambda bad=bad: load(timeout=bad) for bad in (-1, "x", float("inf"), True)},
    **{f"load ranks {bad!r}": lambda bad=bad: load(ranks=bad) for bad in ("x", [5], 0, [0, 0], [True])},
    **{f"load active {bad!r}": lambda bad=bad: load(active=bad) for bad in ("other", 3)},
    "load_adapter None": lambda: s.load_adapter_on_rank(None, "adapter", "x"),
    "load_adapter plain": lambda: s.load_adapter_on_rank(PLAIN, "adapter", "x"),
    "merge None": lambda: s.merge_lora_inplace(None),
    "merge plain": lambda: s.merge_lora_inplace(PLAIN),
    **{f"check {bad!r:.20}": lambda bad=bad: s.check_checkpoint(bad) for bad in (None, 3, "", b"base", "no/such")},
    **{f"meta_model {bad!r:.20}": lambda bad=bad: s.meta_model(bad) for bad in (None, 3, "", "./no", b"base")},
    "meta_model class": lambda: s.meta_model("base", 3),
    "meta_model dtype": lambda: s.meta_model("base", dtype=3),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_wrong_argument_is_an_error_of_this_package_and_leaves_no_file(name: str, folder: Path) -> None:
    before = sorted(folder.rglob("*"))
    with pytest.raises(s.SafeLoadingError) as caught:
        CALLS[name]()
    assert len(str(caught.value)) < 1000
    assert sorted(folder.rglob("*")) == before
