from __future__ import annotations

import contextlib
import io
import json
import os
from pathlib import Path

import pytest
import torch
from faults.checkpoints import BAD_FILES, entry, safetensors
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from safe_loading import CheckpointError, CheckpointNotFound, Finding
from safe_loading._checkpoint import header as module
from safe_loading._checkpoint.header import BITS, Header, TensorInfo, read_header, try_header

# Where safetensors 0.8 takes a file that is refused here, and why it is refused.
STRICTER = {
    "duplicate-key",  # the engine keeps the last of two equal tensor names or metadata keys
    "header-start",  # the engine skips white space; the format says the header begins with '{'
    "tensor-entry",  # the engine ignores further keys, and reads an entry that is a plain array
    "metadata",  # the engine takes null; the format says a map of text
    "shape",  # the engine multiplies in 64 unsigned bits and stops at a 0; torch counts in 63 bits
}


def write(folder: Path, data: bytes) -> Path:
    path = folder / "w.safetensors"
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("name", BAD_FILES)
def test_each_fault_has_its_code_and_a_message_that_names_file_both_sides_and_fix(tmp_path, name):
    bad = BAD_FILES[name]
    path = write(tmp_path, bad.data)
    findings = try_header(path)
    assert isinstance(findings, list)
    assert [finding.code for finding in findings] == [bad.code]
    assert all(finding.fix for finding in findings)
    with pytest.raises(CheckpointError) as caught:
        read_header(path)
    for word in (str(path), "Fix:", *bad.words):
        assert word in str(caught.value)


@pytest.mark.parametrize("name", BAD_FILES)
def test_the_engine_refuses_the_same_files_but_for_the_differences_that_are_written_down(tmp_path, name):
    bad = BAD_FILES[name]
    path = write(tmp_path, bad.data)
    try:
        with safe_open(path, "np"):
            pass
    except SafetensorError:
        return
    assert bad.code in STRICTER


def test_all_tensors_that_are_wrong_are_named_in_one_error(tmp_path):
    path = write(tmp_path, safetensors({"a": entry("X"), "b": entry(), "c": entry(shape=[2]), "__metadata__": 1}, b"x"))
    with pytest.raises(CheckpointError) as caught:
        read_header(path)
    assert len(caught.value.problems) == 3
    text = str(caught.value)
    assert "3 problems" in text
    assert "'a'" in text
    assert "'c'" in text
    assert "__metadata__" in text
    assert "'b'" not in text


def test_overlap_hole_and_end_are_named_together(tmp_path):
    header = {"a": entry(shape=[4], stop=4), "b": entry(start=3, stop=4), "c": entry(start=6, stop=7)}
    findings = try_header(write(tmp_path, safetensors(header, bytes(9))))
    assert isinstance(findings, list)
    assert [(finding.code, finding.bytes) for finding in findings] == [
        ("overlap", 1),
        ("hole", 2),
        ("trailing-bytes", 2),
    ]


def test_a_file_that_torch_saved_is_read_as_it_is(tmp_path):
    dtypes = [
        torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64,
        torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64,
        torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz,
    ]  # fmt: skip
    tensors = {f"t.{dtype}": torch.zeros(3, 2, dtype=dtype) for dtype in dtypes}
    tensors |= {"scalar": torch.tensor(1.5), "nothing": torch.empty(0, 7), 'na"me\né': torch.arange(5.0)}
    path = tmp_path / "w.safetensors"
    save_file(tensors, path, metadata={"format": "pt", "k": '{"json": "a:b"}'})
    header = read_header(path)
    assert header.path == path
    assert header.metadata == {"format": "pt", "k": '{"json": "a:b"}'}
    assert header.nbytes == path.stat().st_size
    assert header.tensors.keys() == tensors.keys()
    raw = path.read_bytes()
    for name, tensor in tensors.items():
        info = header.tensors[name]
        assert info.name == name
        assert info.shape == tuple(tensor.shape)
        assert info.nbytes == tensor.nbytes
        stored = torch.frombuffer(bytearray(raw[info.start : info.stop] or b"\0"), dtype=torch.uint8)[: info.nbytes]
        assert torch.equal(stored, tensor.reshape(-1).view(torch.uint8))
    assert min(info.start for info in header.tensors.values()) == header.data_start


def test_the_dtypes_are_those_of_the_engine(tmp_path):
    for dtype, bits in BITS.items():
        path = write(tmp_path, safetensors({"w": entry(dtype, [8], 0, bits)}, bytes(bits)))
        assert read_header(path).tensors["w"].nbytes == bits
        with safe_open(path, "np") as file:
            assert file.get_slice("w").get_dtype() == dtype
    with pytest.raises(SafetensorError) as caught:
        safe_open(write(tmp_path, safetensors({"w": entry("NEW")}, b"x")), "np")
    known = {word for word in str(caught.value).split("`") if word.isupper() or word.startswith("F")}
    assert known - {"NEW"} == set(BITS)


def test_a_file_without_tensors_and_tensors_of_no_bytes_anywhere_are_legal(tmp_path):
    assert read_header(write(tmp_path, safetensors({}))).tensors == {}
    header = {
        "b": entry(start=1, stop=2),
        "z": entry("F32", [0, 5], 1, 1),
        "a": entry(),
        "y": entry("F4", [0], 2, 2),
    }
    assert list(read_header(write(tmp_path, safetensors(header, b"xx"))).tensors) == ["b", "z", "a", "y"]


def test_a_header_of_exactly_the_limit_is_read_and_one_byte_more_is_not(tmp_path, monkeypatch):
    data = safetensors('{"a": ' + json.dumps(entry()) + "}", b"x")
    length = int.from_bytes(data[:8], "little")
    monkeypatch.setattr(module, "MAX_HEADER_BYTES", length)
    assert isinstance(try_header(write(tmp_path, data)), Header)
    monkeypatch.setattr(module, "MAX_HEADER_BYTES", length - 1)
    assert not isinstance(try_header(write(tmp_path, data)), Header)


def test_a_missing_file_is_not_found(tmp_path):
    with pytest.raises(CheckpointNotFound, match="no such file"):
        read_header(tmp_path / "w.safetensors")


def test_a_fifo_is_refused_unopened(tmp_path):
    os.mkfifo(tmp_path / "w.safetensors")
    with pytest.raises(CheckpointError, match="FIFO"):
        read_header(tmp_path / "w.safetensors")


def test_no_tensor_byte_is_read(tmp_path):
    path = write(tmp_path, safetensors({"a": entry(shape=[2**40], stop=2**40)}))
    size = path.stat().st_size + 2**40
    try:
        os.truncate(path, size)  # a sparse file of 1 TiB
    except OSError:
        pytest.skip("this file system holds no sparse file of 1 TiB")
    assert read_header(path).nbytes == size


def test_a_file_that_is_cut_while_it_is_read_is_truncated(tmp_path):
    finding = module._header_bytes(tmp_path, io.BytesIO(safetensors(b"{}" + b" " * 98)[:50]), 1000)
    assert isinstance(finding, Finding)
    assert finding.code == "truncated"
    assert "it has 50 bytes, and 108 are needed" in finding.message


def test_an_error_of_the_disk_is_a_checkpoint_error(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(5, "Input/output error")

    path = write(tmp_path, safetensors({}))
    monkeypatch.setattr(module, "_header_bytes", fail)
    with pytest.raises(CheckpointError, match="Input/output error"):
        read_header(path)


# --- against the engine -------------------------------------------------------------------------------------------


def compare_with_engine(path: Path) -> None:
    """Read a file with both readers; they agree, or differ in one of the ways that STRICTER holds."""
    ours = try_header(path)
    theirs: dict[str, tuple[str, list[int]]] | None = None
    with contextlib.suppress(SafetensorError), safe_open(path, "np") as file:
        names = file.keys()
        theirs = {name: (file.get_slice(name).get_dtype(), file.get_slice(name).get_shape()) for name in names}
        metadata = file.metadata() or {}
    if isinstance(ours, Header):
        assert theirs == {name: (info.dtype, list(info.shape)) for name, info in ours.tensors.items()}
        assert metadata == ours.metadata
    else:
        assert ours
        assert theirs is None or {finding.code for finding in ours} & STRICTER


SOUND = safetensors(
    {
        "__metadata__": {"format": "pt"},
        "a": entry("F32", [2, 1], 0, 8),
        "b": entry("F4", [2], 8, 9),
        "é": entry(start=9, stop=10),
    },
    bytes(range(10)),
)
FEW = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@FEW
@given(st.binary(max_size=200))
def test_no_bytes_raise_anything_else(tmp_path, data):
    compare_with_engine(write(tmp_path, data))


@FEW
@given(
    st.lists(
        st.tuples(
            st.integers(0, len(SOUND)),
            st.integers(0, 3),
            st.binary(max_size=3)
            | st.sampled_from([b'"', b"{", b"}", b"[", b"]", b",", b":", b"0", b"-0", b" ", b"1e1"]),
        ),
        min_size=1,
        max_size=3,
    ),
    st.booleans(),
)
def test_a_file_with_some_bytes_changed_reads_as_the_engine_reads_it(tmp_path, changes, mend_length):
    data = SOUND
    for at, removed, inserted in changes:
        data = data[:at] + inserted + data[at + removed :]
    if mend_length:
        # Else most changes only show that the length is checked.
        data = (len(data) - 8 - 10).to_bytes(8, "little", signed=False) + data[8:] if len(data) > 18 else data
    compare_with_engine(write(tmp_path, data))


NUMBERS = st.integers(0, 12) | st.sampled_from([-1, 2**31, 2**32, 2**62, 2**63, 2**64 - 1, 2**64, 1.0, True, None, "1"])
ENTRIES = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from([*BITS, "F12", 8]),
        "shape": st.lists(NUMBERS, max_size=3) | st.just(4),
        "data_offsets": st.lists(NUMBERS, min_size=2, max_size=2) | st.lists(NUMBERS, max_size=3),
    },
)
LOOSE_HEADERS = st.dictionaries(st.sampled_from(["a", "b", "", "é", "__metadata__"]), ENTRIES | st.none(), max_size=3)


@FEW
@given(LOOSE_HEADERS, st.integers(0, 12))
def test_a_header_with_any_numbers_reads_as_the_engine_reads_it(tmp_path, header, size):
    compare_with_engine(write(tmp_path, safetensors(header, bytes(size))))


@st.composite
def laid_out(draw) -> tuple[dict[str, object], int]:
    """Draw a header in which all is right but perhaps one offset or the size of the file."""
    header: dict[str, object] = {}
    end = 0
    for name in draw(st.lists(st.text(max_size=4), max_size=5, unique=True)):
        dtype = draw(st.sampled_from(sorted(BITS)))
        shape = draw(st.lists(st.integers(0, 4), max_size=3))
        count = 1
        for n in shape:
            count *= n
        start = end + draw(st.sampled_from([0] * 12 + [-1, 1]))
        end = start + -(-count * BITS[dtype] // 8)
        header[name] = entry(dtype, shape, start, end)
    names = draw(st.permutations(list(header)))
    return {name: header[name] for name in names}, max(0, end + draw(st.sampled_from([0] * 12 + [-1, 1])))


@FEW
@given(laid_out())
def test_a_header_that_is_nearly_right_reads_as_the_engine_reads_it(tmp_path, drawn):
    header, size = drawn
    compare_with_engine(write(tmp_path, safetensors(header, bytes(size))))


def test_the_facts_are_frozen():
    info = TensorInfo("a", "U8", (1,), 8, 9)
    with pytest.raises(AttributeError):
        info.start = 3  # type: ignore[misc]
    assert hash(info) == hash(TensorInfo("a", "U8", (1,), 8, 9))
