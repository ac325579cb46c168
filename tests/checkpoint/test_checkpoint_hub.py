from __future__ import annotations

import json
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from fake_hub import commit_of, serve
from faults import adapters as faults
from models import save_adapter, save_llama
from rank_server import RankServer

from safe_loading._checkpoint import hub
from safe_loading._checkpoint.hub import adapter_files, base_files, resolve
from safe_loading.errors import ArgumentError, CheckpointNotFound, PickleRefused

# In a process in which nothing was loaded before.
SCRIPT = """
import json, sys, warnings
warnings.simplefilter("ignore")
import torch
from fake_hub import ask
from safe_loading import load_peft_on_rank

def load(call):
    try:
        model = load_peft_on_rank(**call)
    except Exception as error:
        return {"error": type(error).__name__, "text": str(error)}
    with torch.no_grad():
        out = model(input_ids=torch.arange(1, 9)[None]).logits
    return {"parts": {p.name: [p.source, p.commit] for p in model.load_report.parts},
            "sum": out.double().sum().item(),
            "name": [model.get_base_model().name_or_path, model.config._name_or_path]}

url, cache, calls = json.loads(sys.argv[1])
ask(url, cache)
report(loads=[load(call) for call in calls])
"""


FLAT = {"adapter": "org/adapter"}
INNER = {"adapter": "org/nested", "adapter_subfolder": "inner"}
TUNED = {"adapter": "org/adapter", "base_revision": "v2"}
NOWHERE = (
    {"adapter": "org/nobody"},
    {"adapter": "org/adapter", "adapter_revision": "gone"},
    {"adapter": "org/nested", "adapter_subfolder": "elsewhere"},
)


@pytest.fixture(scope="module")
def loads(rank_server: RankServer, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The results of all loads, and the requests that the hub got for some of them."""
    root = tmp_path_factory.mktemp("hub")
    base, tuned = save_llama(root / "base"), save_llama(root / "tuned", seed=9)
    for extra in ("pytorch_model.bin", "original/consolidated.safetensors", "README.md"):
        (base / extra).parent.mkdir(exist_ok=True)
        (base / extra).write_bytes(b"not to be downloaded")
    adapter = save_adapter(root / "one", base)
    named = faults.edited(adapter, root / "named", config=lambda c: c.update(base_model_name_or_path="org/base"))
    shutil.copytree(named, root / "nested" / "inner")
    repositories = {
        "org/base": {"main": base, "v2": tuned},
        "org/adapter": {"main": named},
        "org/nested": {"main": root / "nested"},
    }
    loads: dict[str, Any] = {}
    cache = root / "cache"

    def load(url: str | None, cache: Path, *calls: dict[str, Any]) -> list[dict[str, Any]]:
        """What ``load_peft_on_rank`` makes of the arguments of each call, with this folder as the hub's cache."""
        found: list[dict[str, Any]] = rank_server.run_alone(SCRIPT, args=[json.dumps([url, str(cache), calls])]).found
        return found[0]["loads"]

    with serve(repositories) as hub:
        loads["first"] = load(hub.url, cache, FLAT, INNER, TUNED)
        loads["first requests"] = list(hub.requests)
        hub.requests.clear()
        loads["again"] = load(hub.url, cache, FLAT)
        loads["again requests"] = list(hub.requests)
        loads["nowhere"] = load(hub.url, root / "other cache", *NOWHERE)
    # The server is closed: who connects is refused.
    loads["unreachable"] = load(hub.url, cache, FLAT)
    loads["offline"] = load(None, cache, FLAT, INNER, TUNED)
    loads["offline nowhere"] = load(None, root / "empty cache", NOWHERE[0])
    return loads


def test_one_request_per_repository_and_none_when_offline(loads: dict[str, Any]) -> None:
    asked = [request for request in loads["first requests"] if "/revision/" in request and "main" in request]
    assert len(asked) <= 6, asked
    fetched = {request.rpartition("/")[2] for request in loads["first requests"] if request.startswith("GET /org")}
    assert "config.json" in fetched
    assert not fetched & {"pytorch_model.bin", "consolidated.safetensors", "README.md"}
    assert len(loads["again requests"]) == 2, loads["again requests"]
    first = loads["first"]
    assert loads["again"] == first[:1]
    assert loads["offline"] == first
    assert first[0]["parts"] == {
        "base": ["org/base", commit_of("org/base")],
        "default": ["org/adapter", commit_of("org/adapter")],
    }
    assert first[0]["name"] == ["org/base", "org/base"]
    assert first[0]["sum"] == first[1]["sum"]
    assert first[2]["sum"] != first[0]["sum"]
    assert first[2]["parts"]["base"][1] == commit_of("org/base", "v2")


def test_what_the_hub_has_not_is_said(loads: dict[str, Any]) -> None:
    nobody, revision, subfolder = loads["nowhere"]
    assert "org/nobody" in nobody["text"]
    assert "gone" in revision["text"]
    assert "elsewhere" in subfolder["text"]
    (offline,) = loads["offline nowhere"]
    assert offline["error"] == "CheckpointNotFound"
    assert "HF_HUB_OFFLINE" in offline["text"]


def test_a_hub_that_cannot_be_reached_is_said_with_the_way_to_what_is_cached(loads: dict[str, Any]) -> None:
    (refused,) = loads["unreachable"]
    assert refused["error"] == "CheckpointNotFound"
    assert "ConnectError" in refused["text"]
    assert "HF_HUB_OFFLINE=1" in refused["text"]
    assert loads["offline"][0] == loads["first"][0]  # and that way leads to it


@pytest.mark.parametrize("source", ["a/b/c", "../up", "~nobody/x", "/gone/away", "a\\b", "/"])
def test_what_can_be_neither_folder_nor_id_is_refused_without_asking(source: str, tmp_path: Path) -> None:
    if source == "/":
        assert resolve(tmp_path, adapter_files).folder == tmp_path
        return
    with pytest.raises(CheckpointNotFound, match="not a folder"):
        resolve(source, adapter_files)


def test_a_misspelt_folder_is_told_with_those_that_are_like_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "try" / "adapter").mkdir(parents=True)
    (tmp_path / "try" / "adaptor.txt").touch()
    monkeypatch.chdir(tmp_path)
    for wrong in ("try/adaptor", str(tmp_path / "try" / "adaptor")):
        right = wrong.replace("adaptor", "adapter")
        with pytest.raises(CheckpointNotFound, match=rf"\. Did you mean '{right}'\?$"):
            resolve(wrong, adapter_files, hub={"local_files_only": True})
    with pytest.raises(CheckpointNotFound, match=r"local folder\.$"):
        resolve("gone/elsewhere", adapter_files, hub={"local_files_only": True})


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


def test_weights_that_the_config_names_are_chosen(tmp_path: Path) -> None:
    for named, files in (("own.safetensors", ["own.safetensors"]), ("own.safetensors.index.json", ["b.safetensors"])):
        (tmp_path / "config.json").write_text(json.dumps({"transformers_weights": named}))
        (tmp_path / "own.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": "b.safetensors"}}))
        names = frozenset({"config.json", named, *files})
        assert base_files({})(names, tmp_path.joinpath) == [*sorted({"config.json", named} - {*files}), *files]


def test_threads_may_write_a_reference_at_the_same_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    both, write = threading.Barrier(2, timeout=30), Path.write_text

    def written_by_both(path: Path, text: str) -> int:
        count = write(path, text)
        both.wait()
        return count

    monkeypatch.setattr(Path, "write_text", written_by_both)
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda _: hub._write_reference("me/model", "main", "c" * 40, tmp_path), range(2)))
    refs = tmp_path / "models--me--model" / "refs"
    assert {file.name: file.read_text() for file in refs.iterdir()} == {"main": "c" * 40}
