"""wrap_fsdp_meta_safe with hub ids: one rank of two asks a hub on loopback, and what it learns reaches the other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fake_hub import serve
from fsdp_cases import NOTHING, llama, reference, save
from rank_server import RankServer

SCRIPT = """
import sys, time, warnings
import torch, torch.distributed as dist
warnings.simplefilter("ignore")
from transformers import logging as transformers_logging
transformers_logging.set_verbosity_error()
transformers_logging.disable_progress_bar()
from peft import PeftModel
from fake_hub import ask
from fsdp_cases import *
from safe_loading import meta_model, wrap_fsdp_meta_safe

dist.init_process_group("gloo")
base, adapter, cache, *url = sys.argv[1:]
ask(url[0] if url else None, cache)
kind, _ = llama()

def attached(model):
    return PeftModel.from_pretrained(model, adapter, is_trainable=True).train()

def skeleton():
    return attached(meta_model(base, attn_implementation="eager"))

one = attached(kind.from_pretrained(base, dtype="auto", attn_implementation="eager"))
model = wrap_fsdp_meta_safe(skeleton(), "org/base", adapters="org/adapter")
report(differences=differences(one, model, inputs("llama")))
for label, given in {"nobody": "org/nobody", "nowhere": "/no/such/folder"}.items():
    started = time.monotonic()
    try:
        wrap_fsdp_meta_safe(skeleton(), base, adapters=given)
        error = None
    except Exception as caught:
        error = [type(caught).__name__, str(caught), time.monotonic() - started]
    report(**{label: error})
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def found(rank_server: RankServer, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    from peft import LoraConfig, get_peft_model

    root: Path = tmp_path_factory.mktemp("hub")
    save(reference(llama), root / "base")
    one = get_peft_model(reference(llama), LoraConfig(target_modules=["q_proj", "down_proj"], init_lora_weights=False))
    one.save_pretrained(root / "adapter")
    folders = [root / "base", root / "adapter"]
    with serve({"org/base": folders[0], "org/adapter": folders[1]}) as hub:
        online = rank_server.run(SCRIPT, 2, args=[*folders, root / "cache", hub.url]).found
        requests = [request for request in hub.requests if "/api/models/" in request]
    offline = rank_server.run(SCRIPT, 2, args=[*folders, root / "cache"]).found
    return {"online": online, "offline": offline, "requests": requests}


@pytest.mark.parametrize("where", ["online", "offline"])
def test_a_base_and_an_adapter_of_the_hub_equal_one_process(found: dict[str, Any], where: str) -> None:
    assert [facts["differences"] for facts in found[where]] == [NOTHING] * 2


@pytest.mark.parametrize("repository", ["base", "adapter", "nobody"])
def test_one_rank_asks_which_commit_it_is(found: dict[str, Any], repository: str) -> None:
    asked = [request for request in found["requests"] if f"org/{repository}" in request and "/tree/" not in request]
    assert len(asked) == 1, asked


@pytest.mark.parametrize("where", ["online", "offline"])
@pytest.mark.parametrize(("case", "words"), [("nobody", "org/nobody"), ("nowhere", "/no/such/folder")])
def test_what_the_first_rank_cannot_find_all_ranks_say(
    found: dict[str, Any], where: str, case: str, words: str
) -> None:
    (first, text, _), (second, told, seconds) = (facts[case] for facts in found[where])
    assert (first, second) == ("CheckpointNotFound", "RankError")
    assert words in text
    assert words in told
    assert "base_model" not in text
    assert "Rank 0 " in told
    assert seconds < 60
