"""Mutated indexes, adapter configs and configs: read as what they are, or refused; never a crash or a hang.

Seeded. ``SAFE_LOADING_FUZZ_SECONDS`` gives each test so many seconds more, from a seed of its own; what it finds is
printed with its seed. Headers have their fuzz tests in ``test_checkpoint_header.py``.
"""

from __future__ import annotations

import copy
import json
import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from models import save_adapter, save_llama

from safe_loading import SafeLoadingError, check_checkpoint, meta_model
from safe_loading._checkpoint.index import Checkpoint, read_checkpoint
from safe_loading._loading.peft_config import read_peft_config

INDEX = "model.safetensors.index.json"
ODD: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 0.5, -0.0, 1e308, 2**31, 2**63, -(2**63), 10**40, 10**6),
    *("", "x", "../x", "/dev/zero", "a" * 5000, "\u0000", "float32", "LORA", "nan", "(", "*"),
    *([], {}, [None], [[]], {"": 0}, ["q_proj", 3], {"q_proj": -1}),
)
SECONDS = 60  # a guard against a hang


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every container of a JSON document, with every key or index in it."""
    if isinstance(value, (dict, list)):
        for key in list(value) if isinstance(value, dict) else range(len(value)):
            yield value, key
            yield from places(value[key])


def mutated(data: bytes, chance: random.Random) -> bytes:
    """The bytes of a JSON document with one thing changed, or several."""
    kind = chance.random()
    if kind < 0.6:
        document = json.loads(data)
        for _ in range(chance.choice((1, 1, 1, 2, 5))):
            entries = list(places(document))
            if entries:
                container, key = chance.choice(entries)
                if chance.random() < 0.2:
                    del container[key]
                elif chance.random() < 0.2:
                    container[key] = copy.deepcopy(chance.choice(entries)[0])  # another part of the document
                else:
                    container[key] = copy.deepcopy(chance.choice(ODD))
        return json.dumps(document).encode()
    changed = bytearray(data)
    for _ in range(chance.choice((1, 1, 2, 8))):
        at = chance.randrange(len(changed))
        size = chance.choice((1, 1, 4, 40))
        if kind < 0.75:
            changed[at] = chance.randrange(256)
        elif kind < 0.85:
            del changed[at : at + size]
        elif kind < 0.95:
            changed[at:at] = changed[chance.randrange(len(changed)) :][:size]
        else:
            changed[at:at] = chance.choice((b"[" * 99, b'"', b"{", b"\x00", b"\xff", b"e999", b"\\ud800", b","))
        changed = changed or bytearray(b" ")
    return bytes(changed)


def seeds(count: int) -> Iterator[int]:
    yield from range(count)
    end = time.monotonic() + float(os.environ.get("SAFE_LOADING_FUZZ_SECONDS", "0"))
    seed = time.time_ns()
    while time.monotonic() < end:
        seed += 1
        yield seed


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    base = save_llama(tmp_path_factory.mktemp("sound") / "base")
    return base, save_adapter(base.parent / "adapter", base)


def hang(*_: object) -> None:
    raise AssertionError(f"no answer after {SECONDS} seconds")


def fuzz(folder: Path, name: str, count: int, read: Callable[[], Any], judge: Callable[[Any], None]) -> None:
    """Mutate a file `count` times: `read` must raise a SafeLoadingError, or return what `judge` asserts to be right.

    Both outcomes must occur. `check_checkpoint` must never raise.
    """
    good = (folder / name).read_bytes()
    outcomes = {"read": 0, "refused": 0}
    before = signal.signal(signal.SIGALRM, hang)
    try:
        for seed in seeds(count):
            data = mutated(good, random.Random(seed))
            (folder / name).write_bytes(data)
            signal.alarm(SECONDS)
            try:
                judge(read())
                outcomes["read"] += 1
            except SafeLoadingError:
                outcomes["refused"] += 1
            except Exception as error:
                raise AssertionError(f"seed {seed}: {name} became {data[:3000]!r}") from error
            check_checkpoint(folder)  # raises nothing about what it reads
            signal.alarm(0)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    assert min(outcomes.values()) > 0, outcomes


def test_a_changed_index_is_refused_or_says_the_same(sound: tuple[Path, Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(sound[0], tmp_path / "base"))
    true = {name: (info.shape, info.dtype, info.start) for name, info in read_checkpoint(folder).tensors.items()}

    def judge(checkpoint: Checkpoint) -> None:
        tensors = {name: (info.shape, info.dtype, info.start) for name, info in checkpoint.tensors.items()}
        assert tensors == true
        assert {path.parent for path in checkpoint.files} == {folder}

    fuzz(folder, INDEX, 250, lambda: read_checkpoint(folder), judge)


def test_a_changed_adapter_config_is_refused_or_read_as_peft_reads_it(sound: tuple[Path, Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(sound[1], tmp_path / "adapter"))

    def judge(config: Any) -> None:
        document = json.loads((folder / "adapter_config.json").read_text())
        assert config.peft_type == document["peft_type"]
        if document["peft_type"] == "LORA":
            assert (config.r, config.lora_alpha) == (document["r"], document["lora_alpha"])
            assert config.r >= 1

    fuzz(folder, "adapter_config.json", 250, lambda: read_peft_config(folder)[0], judge)


def test_a_changed_config_is_refused_or_makes_the_model_that_it_says(sound: tuple[Path, Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(sound[0], tmp_path / "base"))

    def judge(model: Any) -> None:
        document = json.loads((folder / "config.json").read_text())
        assert model.config.model_type == document["model_type"]
        assert all(tensor.is_meta for tensor in model.parameters())

    fuzz(folder, "config.json", 60, lambda: meta_model(folder), judge)
