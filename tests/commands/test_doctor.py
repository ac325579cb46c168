from __future__ import annotations

import importlib.metadata
import json
import os
import re
import stat
from pathlib import Path

import pytest
from engines import needs

from safe_loading import __main__ as command_line
from safe_loading._core.gpus import parse_rows
from safe_loading._core.report import GiB, MiB
from safe_loading._doctor import devices as device_facts
from safe_loading._doctor import disks, versions
from safe_loading._doctor.report import examine
from safe_loading._ranks.launcher import Launcher

ROOT = Path(__file__).resolve().parents[2]
# What nvidia-smi prints for --query-compute-apps=gpu_uuid,pid,process_name,used_memory --format=csv,noheader,nounits
STRAY = """\
GPU-aaaa, 4001, python, 20480
GPU-aaaa, 4002, python, 512
GPU-bbbb, 4002, python, 20480
GPU-bbbb, 4003, /usr/bin/x, [N/A]
"""


def codes(findings):
    return [finding.code for finding in findings]


def engine(name="torch", installed="2.13.0", declared=">=2.11", tested="2.13.0"):
    return versions.Engine(name, installed, declared, tested)


def test_the_tested_versions_are_those_of_the_constraints():
    if not (ROOT / "constraints.txt").is_file():
        pytest.skip("the tests run on an installed wheel, without the project's files")
    # Those for Python 3.10, which the newest engines no longer support, are not the tested ones.
    line = r"""^([\w-]+)==([\w.]+)(?!.*python_version < )"""
    pinned = dict(re.findall(line, (ROOT / "constraints.txt").read_text(), re.M))
    assert {name: pinned[name] for name in versions.TESTED} == versions.TESTED


def test_the_installed_engines_are_read_and_declared():
    engines = {engine.name: engine for engine in versions.read_engines()}
    assert engines["torch"].installed is not None
    installed = any(importlib.metadata.distributions(name="safe-loading"))  # a plain checkout declares nothing
    assert engines["huggingface_hub"].declared.startswith(">=" if installed else "")
    assert not [finding for finding in versions.judge_engines(tuple(engines.values())) if finding.severity == "error"]


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, []),
        ({"installed": "2.13.1+cu130"}, []),
        ({"installed": None}, ["engine-missing"]),
        ({"installed": "2.10.0"}, ["engine-too-old"]),
        ({"installed": "2.14.0"}, ["engine-untested"]),
        ({"installed": "2.14.0.dev20270101"}, ["engine-untested"]),
        ({"name": "safetensors", "installed": "0.8.1", "declared": ">=0.8", "tested": "0.8.0"}, ["engine-known"]),
        ({"name": "peft", "installed": "0.20.0", "declared": ">=0.21", "tested": "0.21.2"}, ["engine-too-old"]),
    ],
)
def test_versions_are_judged(changed, expected):
    assert codes(versions.judge_engines((engine(**changed),))) == expected


@needs("safetensors", "0.8")
def test_safetensors_really_writes_for_its_owner_only(tmp_path):
    # The finding about it goes when this does.
    import torch
    from safetensors.torch import save_file

    save_file({"a": torch.zeros(1)}, tmp_path / "a.safetensors")
    assert stat.S_IMODE((tmp_path / "a.safetensors").stat().st_mode) == 0o600


def test_places_are_found_and_the_exchange_is_tried_without_leaving_a_trace(tmp_path):
    places = {place.what: place for place in disks.read_places(tmp_path / "not" / "there")}
    output = places["output"]
    assert output.path == str(tmp_path / "not" / "there")
    assert 0 < output.free <= output.total
    assert output.exchanges is not None
    assert list(tmp_path.iterdir()) == []
    assert places["hub cache"].exchanges is None


def test_the_hub_cache_is_where_the_variables_say(tmp_path, monkeypatch):
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert disks.read_places(tmp_path)[0].path == str(tmp_path / "xdg" / "huggingface" / "hub")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    assert disks.read_places(tmp_path)[0].path == str(tmp_path / "hub")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "x"))
    assert disks.read_places(tmp_path)[0].path == str(tmp_path / "x")


def test_a_cache_that_may_not_be_looked_into_is_no_traceback(tmp_path, monkeypatch):
    closed, exists = tmp_path / "closed" / "hub", Path.exists

    def looked(path, **options):
        if path.is_relative_to(closed):
            raise PermissionError(13, "Permission denied", str(path))
        return exists(path, **options)

    monkeypatch.setattr(Path, "exists", looked)
    monkeypatch.setenv("HF_HUB_CACHE", str(closed))
    assert disks.read_places(tmp_path)[0].path == str(closed)


def test_an_output_that_cannot_be_written_is_told(tmp_path, monkeypatch):
    def refuse(*_, **options):
        raise PermissionError(13, "Permission denied", str(options["dir"]))

    monkeypatch.setattr(disks.tempfile, "TemporaryDirectory", refuse)
    output = disks.read_places(tmp_path / "merged")[1]
    assert output.exchanges is None
    told = [finding for finding in disks.judge_places((output,)) if finding.code == "not-writable"]
    assert [(finding.where, finding.message) for finding in told] == [
        (str(tmp_path / "merged"), "the output cannot be written: Permission denied.")
    ]
    monkeypatch.undo()  # what it advises: a folder that may be written to
    assert "not-writable" not in codes(disks.judge_places(disks.read_places(tmp_path)))


def test_places_are_judged():
    def place(what="output", kind="ext4", total=100 * GiB, exchanges: bool | None = True, free=GiB):
        return disks.Place(what, "/x", kind, total, free, exchanges)

    assert disks.judge_places((place(), place(exchanges=None))) == []
    assert codes(disks.judge_places((place(kind="nfs4", exchanges=False),))) == ["no-exchange", "network-disk"]
    small = disks.judge_places((place("shared memory", "tmpfs", 64 * MiB, None),))
    assert codes(small) == ["small-shared-memory"]
    assert small[0].bytes == 64 * MiB
    assert codes(disks.judge_places((place(free=GiB - 1), place("shared memory", "tmpfs", free=0)))) == ["little-room"]


def read(monkeypatch, count=0, kind="cuda", smi=None, **environ):
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(device_facts, "_count", lambda: (kind if count else "cpu", count))
    answer = None if smi is None else parse_rows(smi, 4)
    monkeypatch.setattr(device_facts, "query_nvidia_smi", lambda subject, fields: answer)
    return device_facts.read_devices()


def test_a_plain_machine_has_nothing_to_say(monkeypatch):
    found, findings = read(monkeypatch)
    assert (found.kind, found.seen, found.launcher, found.contexts) == ("cpu", (), Launcher(), None)
    assert findings == []


def test_renumbered_devices_are_told(monkeypatch):
    found, findings = read(monkeypatch, count=2, CUDA_VISIBLE_DEVICES="4,6")
    assert [device.listed_as for device in found.seen] == ["4", "6"]
    assert codes(findings) == ["devices-renumbered"]
    assert "0 is 4, 1 is 6" in findings[0].message
    assert read(monkeypatch, count=2, CUDA_VISIBLE_DEVICES="0,1")[1] == []


@pytest.mark.parametrize(
    ("value", "listed", "told"),
    [
        ("1,0", ["1", "0"], "0 is 1, 1 is 0"),
        (" 3 , 5 ", ["3", "5"], "0 is 3, 1 is 5"),
        ("GPU-8f2e,GPU-11aa", ["GPU-8f2e", "GPU-11aa"], "0 is GPU-8f2e, 1 is GPU-11aa"),
        ("MIG-77d0", ["MIG-77d0"], "0 is MIG-77d0"),
        ("4,-1,6", ["4"], "0 is 4"),
        ("0,-1,2", ["0"], None),
        ("0,1,2", ["0", "1", "2"], None),
    ],
)
def test_what_the_variable_lists_stands_beside_each_device(monkeypatch, value, listed, told):
    found, findings = read(monkeypatch, count=len(listed), CUDA_VISIBLE_DEVICES=value)
    assert [(device.index, device.listed_as) for device in found.seen] == list(enumerate(listed))
    assert codes(findings) == ([] if told is None else ["devices-renumbered"])
    if told is not None:
        assert told in findings[0].message
        assert "CUDA_DEVICE_ORDER=PCI_BUS_ID" in findings[0].fix
        ordered = {"CUDA_VISIBLE_DEVICES": value, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
        assert "CUDA_DEVICE_ORDER" not in read(monkeypatch, count=len(listed), **ordered)[1][0].fix


def test_hidden_devices_and_too_many_ranks_are_told(monkeypatch):
    assert codes(read(monkeypatch, CUDA_VISIBLE_DEVICES="9")[1]) == ["devices-hidden"]
    assert read(monkeypatch, CUDA_VISIBLE_DEVICES="")[1] == []
    assert codes(read(monkeypatch, count=2, LOCAL_RANK="0", LOCAL_WORLD_SIZE="4")[1]) == ["too-few-devices"]
    found, findings = read(monkeypatch, LOCAL_RANK="x")
    assert (found.launcher, codes(findings)) == (None, ["launcher"])


def test_a_process_on_two_gpus_is_a_stray(monkeypatch):
    found, findings = read(monkeypatch, count=2, smi=STRAY)
    assert [(context.pid, context.bytes) for context in found.contexts or ()][-1] == (4003, 0)
    assert codes(findings) == ["stray-context"]
    assert findings[0].where == "process 4002 (python)"
    assert findings[0].bytes == 512 * MiB


def test_nvidia_smi_is_asked_where_it_is_there(tmp_path, monkeypatch):
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\ncat <<'END'\n{STRAY}END\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert len(device_facts._contexts() or ()) == 4
    tool.write_text("#!/bin/sh\nexit 9\n")
    assert device_facts._contexts() is None


@pytest.mark.parametrize("kind", [ImportError, OSError, ValueError, RuntimeError], ids=lambda kind: kind.__name__)
def test_a_torch_that_cannot_be_imported_is_told(monkeypatch, kind):
    """A build for CUDA raises OSError or ValueError where it does not find its libraries."""

    def broken():
        raise kind("libtorch.so: no such file")

    monkeypatch.setattr(device_facts, "_count", broken)
    (finding,) = [finding for finding in device_facts.read_devices()[1] if finding.severity == "error"]
    assert (finding.code, finding.where) == ("engine-broken", "torch")
    assert "libtorch.so" in finding.message
    assert codes(read(monkeypatch)[1]) == []  # once it is installed again


def test_the_report_as_text_html_and_json(tmp_path):
    report = examine(tmp_path)
    assert report.ok
    assert str(report).startswith("Python 3.")
    assert "safetensors" in str(report)
    assert report._repr_html_().count("<table>") >= 2
    facts = json.loads(report.to_json())
    assert (facts["ok"], facts["python"]) == (True, report.python)


def test_the_exit_status_is_for_scripts(tmp_path, monkeypatch, capsys):
    assert command_line.main(["doctor", "--json", "--output", str(tmp_path)]) == 0
    assert json.loads(capsys.readouterr().out)["ok"] is True
    monkeypatch.setenv("LOCAL_RANK", "x")
    assert command_line.main(["doctor"]) == 1
    assert "LOCAL_RANK='x' is not an integer" in capsys.readouterr().out


@pytest.mark.parametrize("advisory", versions.ADVISORIES, ids=lambda each: each.source.partition(",")[0])
def test_a_published_fault_is_told_of_every_version_before_the_one_that_mends_it(advisory: versions.Advisory) -> None:
    def told(installed: str) -> list[str]:
        found = versions.judge_engines((engine(advisory.engine, installed, ">=0", "99"),))
        return [each.fix for each in found if each.code == "engine-advisory" and advisory.source in each.message]

    major, minor = map(int, advisory.mended_in.split("."))
    assert told(f"{advisory.mended_in}.0") == told(f"{major}.{minor + 1}.1") == told(f"{major + 1}.0") == []
    assert told(f"{major}.{minor - 1}.9") == [f"pip install '{advisory.engine}>={advisory.mended_in}'"]
    assert len(told(f"{major}.{minor - 1}.0+cpu")) == 1
    row = f"| {advisory.engine} | {advisory.mended_in} | {advisory.source} | {advisory.message} |"
    page = Path(__file__).parents[2] / "docs" / "doctor.md"
    assert not page.is_file() or row in page.read_text(encoding="utf-8")
