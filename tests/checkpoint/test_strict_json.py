from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from faults.checkpoints import LFS_POINTER
from hypothesis import given, settings
from hypothesis import strategies as st

from safe_loading import CheckpointError, CheckpointNotFound
from safe_loading._checkpoint import strict_json
from safe_loading._checkpoint.strict_json import read_json_object, try_parse
from safe_loading._core.report import Finding

FAULTS = [
    (b'{"a": 1, "b": 2, "a": 3}', ("same key twice", "'a'")),
    (b'{"x": {"y": [{"deep": 1, "deep": 1}]}}', ("same key twice", "'deep'")),
    (b'{"a": NaN}', ("NaN",)),
    (b'{"a": [Infinity]}', ("Infinity",)),
    (b'{"a": -Infinity}', ("-Infinity",)),
    (b'{"a": "\xff"}', ("UTF-8", "byte 7 is 0xff")),
    ('{"a": 1}'.encode("utf-16"), ("UTF-8",)),
    (b'\xef\xbb\xbf{"a": 1}', ("not valid JSON",)),
    (b"[1, 2]", ("list, not an object",)),
    (b"null", ("not an object",)),
    (b"", ("not valid JSON",)),
    (b'{"a": 1} x', ("Extra data",)),
    (b'{"a": "\\udfff"}', ("surrogate",)),
    (b'{"\\ud800": 1}', ("surrogate",)),
    (b'{"a": ' + b"[" * 200_000, ("nested too deeply",)),
    (LFS_POINTER, ("is a Git LFS pointer, not the file", "run `git lfs pull`")),
]


@pytest.mark.parametrize(("data", "words"), FAULTS)
def test_each_fault_is_named_with_its_place_and_its_fix(data, words):
    found = try_parse(data, "folder/config.json")
    assert isinstance(found, Finding)
    assert found.where == "folder/config.json"
    assert found.fix
    for word in words:
        assert word in f"{found.message} {found.fix}"


@pytest.mark.parametrize(("data", "words"), FAULTS)
def test_a_file_is_read_as_strictly_as_bytes(tmp_path, data, words):
    path = tmp_path / "adapter_config.json"
    path.write_bytes(data)
    with pytest.raises(CheckpointError) as caught:
        read_json_object(path)
    assert str(path) in str(caught.value)
    assert words[0] in str(caught.value)


def test_infinities_are_read_in_the_config_of_a_model_alone(tmp_path):
    path = tmp_path / "config.json"
    path.write_text('{"time_step_limit": [0.0, Infinity], "least": -Infinity, "escaped": "\\n"}')
    assert read_json_object(path) == {"time_step_limit": [0.0, math.inf], "least": -math.inf, "escaped": "\n"}
    path.write_text('{"time_step_limit": [0.0, NaN]}')
    with pytest.raises(CheckpointError, match="NaN is not JSON"):
        read_json_object(path)
    path.write_text('{"hidden_size": 1e400}')
    with pytest.raises(CheckpointError, match="larger than any"):
        read_json_object(path)


KEYS = st.sampled_from(["a", "b", '"', ":", "{"])
LEAVES = st.sampled_from([0, "a", '"', [], ["a"], {}, [{"a": "b"}]])


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(KEYS, LEAVES | st.lists(st.tuples(KEYS, LEAVES), max_size=3).map(tuple)), max_size=4))
def test_a_key_that_stands_twice_is_found_wherever_it_stands(pairs):
    twice = False

    def written(pairs: Any) -> str:
        nonlocal twice
        twice |= len(dict(pairs)) < len(pairs)
        texts = (written(value) if isinstance(value, tuple) else json.dumps(value) for _, value in pairs)
        entries = [f"{json.dumps(key)}: {text}" for (key, _), text in zip(pairs, texts, strict=True)]
        return "{" + ", ".join(entries) + "}"

    found = try_parse(written(pairs).encode(), "x")
    assert isinstance(found, Finding) == twice


def test_every_duplicate_is_named():
    found = try_parse(b'{"a": 1, "a": 2, "b": 1, "c": {}, "c": 0}', "x")
    assert isinstance(found, Finding)
    assert "'a', 'c'" in found.message


def test_what_is_legal_is_read():
    text = '{"a": [1, -2, 1.5e3, true, null, "\\ud83d\\ude00 \\u00e9"], "é": {"a": {}}, "z": -0, "f": -0.5}'
    value: Any = try_parse(text.encode(), "x")
    assert value == json.loads(text)
    assert value["a"][-1] == "😀 é"
    assert math.copysign(1, value["z"]) == -1


def test_a_file_over_the_limit_is_refused_and_one_at_the_limit_is_read(tmp_path, monkeypatch):
    path = tmp_path / "index.json"
    path.write_bytes(b'{"a": 1}')
    monkeypatch.setattr(strict_json, "MAX_BYTES", 8)
    assert read_json_object(path) == {"a": 1}
    monkeypatch.setattr(strict_json, "MAX_BYTES", 7)
    with pytest.raises(CheckpointError, match="larger than 7 B"):
        read_json_object(path)


def test_a_missing_file_is_not_found(tmp_path):
    with pytest.raises(CheckpointNotFound, match="no such file"):
        read_json_object(tmp_path / "config.json")


@settings(max_examples=50, deadline=None)
@given(st.dictionaries(st.text(max_size=5), st.recursive(st.integers() | st.text(max_size=5), st.lists, max_leaves=3)))
def test_whatever_json_writes_is_read_back(value):
    for ascii_only in (True, False):
        text = json.dumps(value, ensure_ascii=ascii_only)
        try:
            data = text.encode()
        except UnicodeEncodeError:
            continue
        assert try_parse(data, "x") == value


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=50) | st.text().map(str.encode))
def test_no_bytes_raise_anything_else(data):
    value = try_parse(data, "x")
    if not isinstance(value, Finding):
        assert value == json.loads(data)


def test_an_unreadable_file_is_a_checkpoint_error(tmp_path):
    with pytest.raises(CheckpointError, match="directory"):
        read_json_object(Path(tmp_path))
