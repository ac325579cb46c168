from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from fake_hub import commit_of, serve
from faults import adapters as faults
from models import save_adapter, save_llama

from safe_loading._checkpoint.hub import adapter_files, base_files, resolve
from safe_loading.errors import ArgumentError, CheckpointNotFound, PickleRefused

SCRIPT = """
    import json, sys
    import torch
    from safe_loading import load_peft_on_rank
    for line in json.loads(sys.argv[1]):
        try:
            model = load_peft_on_rank(**line)
        except Exception as error:
            print("RESULT", json.dumps({"error": type(error).__name__, "text": str(error)}))
            continue
        parts = {p.name: [p.source, p.commit] for p in model.load_report.parts}
        with torch.no_grad():
            out = model(input_ids=torch.arange(1, 9)[None]).logits
        print("RESULT", json.dumps({"parts": parts, "sum": out.double().sum().item(),
                                    "name": [model.get_base_model().name_or_path, model.config._name_or_path]}))
"""


def load_in_a_process(calls: list[dict[str, Any]], cache: Path, endpoint: str | None) -> list[dict[str, Any]]:
    env = {**os.environ, "HF_HUB_CACHE": str(cache), "HF_HUB_OFFLINE": "0" if endpoint else "1", "OMP_NUM_THREADS": "1"}
    env["TRANSFORMERS_OFFLINE"] = env["HF_HUB_OFFLINE"]
    env["HF_ENDPOINT"] = endpoint or "http://127.0.0.1:9"
    command = [sys.executable, "-c", textwrap.dedent(SCRIPT), json.dumps(calls)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    return [json.loads(line.removeprefix("RESULT ")) for line in done.stdout.splitlines() if line.startswith("RESULT ")]


@pytest.fixture(scope="module")
def repositories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    root = tmp_path_factory.mktemp("repositories")
    base, tuned = save_llama(root / "base"), save_llama(root / "tuned", seed=9)
    for extra in ("pytorch_model.bin", "original/consolidated.safetensors", "README.md"):
        (base / extra).parent.mkdir(exist_ok=True)
        (base / extra).write_bytes(b"not to be downloaded")
    adapter = save_adapter(root / "one", base)
    named = faults.edited(adapter, root / "named", config=lambda c: c.update(base_model_name_or_path="org/base"))
    shutil.copytree(named, root / "nested" / "inner")
    return {
        "org/base": {"main": base, "v2": tuned},
        "org/adapter": {"main": named},
        "org/nested": {"main": root / "nested"},
    }


def test_one_request_per_repository_and_none_when_offline(tmp_path: Path, repositories: dict[str, Any]) -> None:
    flat = {"adapter": "org/adapter"}
    inner = {"adapter": "org/nested", "adapter_subfolder": "inner"}
    tuned = {"adapter": "org/adapter", "base_revision": "v2"}
    with serve(repositories) as hub:
        first = load_in_a_process([flat, inner, tuned], tmp_path / "cache", hub.url)
        asked = [request for request in hub.requests if "/revision/" in request and "main" in request]
        assert len(asked) <= 6, asked
        fetched = {request.rpartition("/")[2] for request in hub.requests if request.startswith("GET /org")}
        assert not fetched & {"pytorch_model.bin", "consolidated.safetensors", "README.md"}
        hub.requests.clear()
        again = load_in_a_process([flat], tmp_path / "cache", hub.url)
        assert len(hub.requests) == 2, hub.requests
        assert again == first[:1]
    offline = load_in_a_process([flat, inner, tuned], tmp_path / "cache", None)
    assert offline[:2] == first[:2]
    assert offline[2] == first[2]
    assert first[0]["parts"] == {
        "base": ["org/base", commit_of("org/base")],
        "default": ["org/adapter", commit_of("org/adapter")],
    }
    assert first[0]["name"] == ["org/base", "org/base"]
    assert first[0]["sum"] == first[1]["sum"]
    assert first[2]["sum"] != first[0]["sum"]
    assert first[2]["parts"]["base"][1] == commit_of("org/base", "v2")


def test_what_the_hub_has_not_is_said(tmp_path: Path, repositories: dict[str, Any]) -> None:
    calls = [
        {"adapter": "org/nobody"},
        {"adapter": "org/adapter", "adapter_revision": "gone"},
        {"adapter": "org/nested", "adapter_subfolder": "elsewhere"},
    ]
    with serve(repositories) as hub:
        nobody, revision, subfolder = load_in_a_process(calls, tmp_path / "cache", hub.url)
    assert "org/nobody" in nobody["text"]
    assert "gone" in revision["text"]
    assert "elsewhere" in subfolder["text"]
    (offline,) = load_in_a_process(calls[:1], tmp_path / "empty", None)
    assert offline["error"] == "CheckpointNotFound"
    assert "HF_HUB_OFFLINE" in offline["text"]


def test_a_hub_that_cannot_be_reached_is_said_with_the_way_to_what_is_cached(
    tmp_path: Path, repositories: dict[str, Any]
) -> None:
    with serve(repositories) as hub:
        (first,) = load_in_a_process([{"adapter": "org/adapter"}], tmp_path / "cache", hub.url)
    with socket.socket() as closed:  # bound and not listening: who connects is refused
        closed.bind(("127.0.0.1", 0))
        gone = f"http://127.0.0.1:{closed.getsockname()[1]}"
        (found,) = load_in_a_process([{"adapter": "org/adapter"}], tmp_path / "cache", gone)
    assert found["error"] == "CheckpointNotFound"
    assert "ConnectError" in found["text"]
    assert "HF_HUB_OFFLINE=1" in found["text"]
    assert load_in_a_process([{"adapter": "org/adapter"}], tmp_path / "cache", None) == [first]


@pytest.mark.parametrize("source", ["a/b/c", "../up", "~nobody/x", "/gone/away", "a\\b", "/"])
def test_what_can_be_neither_folder_nor_id_is_refused_without_asking(source: str, tmp_path: Path) -> None:
    if source == "/":
        assert resolve(tmp_path, adapter_files).folder == tmp_path
        return
    with pytest.raises(CheckpointNotFound, match="no folder"):
        resolve(source, adapter_files)


def test_a_revision_of_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="'v2' is for hub ids"):
        resolve(tmp_path, adapter_files, revision="v2")


def test_files_are_chosen_as_transformers_would() -> None:
    def never(name: str) -> Path:
        raise AssertionError(name)

    names = frozenset({"config.json", "model.safetensors", "model.safetensors.index.json", "model.fp16.safetensors"})
    assert base_files({})(names, never) == ["config.json", "model.safetensors.index.json", "model.safetensors"]
    assert base_files({"variant": "fp16"})(names, never)[-1] == "model.fp16.safetensors"
    code = names | {"modeling_x.py"}
    assert "modeling_x.py" not in base_files({})(code, never)
    assert "modeling_x.py" in base_files({"trust_remote_code": True})(code, never)
    pickles = frozenset({"config.json", "pytorch_model.bin", "x.gguf"})
    assert base_files({"use_safetensors": False})(pickles, never) == ["config.json", "pytorch_model.bin"]
    assert base_files({"gguf_file": "x.gguf"})(pickles, never) == ["config.json", "x.gguf"]
    with pytest.raises(PickleRefused, match="use_safetensors=False"):
        base_files({})(pickles, never)
    both = frozenset({"adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"})
    assert adapter_files(both, never) == ["adapter_config.json", "adapter_model.safetensors"]
