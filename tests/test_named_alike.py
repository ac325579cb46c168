"""What people pass in the place of a folder, against every verb and command: named alike, and the advice works."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from models import save_adapter, save_llama
from safetensors.torch import save_file

import safe_loading as s
from safe_loading import Workload
from safe_loading.__main__ import main

CARD = {0: "1GiB"}
GENERATE, TRAIN = Workload.generate(1, 8), Workload.train(1, 8)


class Folders:
    """A base and its adapter, and other things made of them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.base = save_llama(root / "base")
        self.adapter = save_adapter(root / "adapter", self.base)
        self.run, self.adapter_run = root / "run", root / "adapter run"
        shutil.copytree(self.base, self.run / "checkpoint-123")
        shutil.copytree(self.adapter, self.adapter_run / "checkpoint-123")
        self.gguf = root / "ggufs" / "model.gguf"
        self.gguf.parent.mkdir()
        self.gguf.write_bytes(b"GGUF")
        self.mlx = root / "mlx"
        self.mlx.mkdir()
        factors = {"lora_a": torch.ones(32, 2), "lora_b": torch.ones(2, 32)}
        named = {f"model.layers.0.self_attn.q_proj.{name}": factor for name, factor in factors.items()}
        save_file(named, self.mlx / "adapters.safetensors", metadata={"format": "mlx"})
        self._outputs = 0

    @property
    def output(self) -> Path:
        self._outputs += 1
        return self.root / f"out{self._outputs}"


class Thing(NamedTuple):
    """A thing in the place of a base or an adapter, and what is said of it: its name, and the advice."""

    base: Callable[[Folders], Path | str]
    adapter: Callable[[Folders], Path | str]
    says: str


SAVED = "pass a folder that transformers saved, of the model that"
THINGS = {
    "a run": Thing(
        lambda f: f.run,
        lambda f: f.adapter_run,
        r"holds no checkpoint itself, but 1 of a Trainer in folders of their own\W.*pass '(.+checkpoint-123)', the lat",
    ),
    "one file": Thing(
        lambda f: f.base / "config.json",
        lambda f: f.adapter / "adapter_config.json",
        r"is one file of a checkpoint\W.*pass its folder, '([^']+)'",
    ),
    "a GGUF file": Thing(lambda f: f.gguf, lambda f: f.gguf, rf"is a GGUF file, which llama\.cpp reads\W.*{SAVED} it"),
    "GGUF files": Thing(
        lambda f: f.gguf.parent, lambda f: f.gguf.parent, rf"holds GGUF files, which llama\.cpp reads\W.*{SAVED} they"
    ),
    "MLX": Thing(
        lambda f: f.mlx,
        lambda f: f.mlx,
        r"holds the weights of an adapter of MLX \(adapters\.safetensors\) without their adapter_config\.json"
        r"\W.*copy the adapter_config\.json there that mlx_lm\.lora wrote beside them",
    ),
    "an address": Thing(
        lambda f: "https://huggingface.co/owner/name",
        lambda f: "https://huggingface.co/owner/name",
        r"is the address of a repository of the hub\W.*pass its id, 'owner/name'",
    ),
}


def check(path: Path | str) -> None:
    report = s.check_checkpoint(path, headers=True)
    if not report.ok:
        raise s.CheckpointError("\n".join(map(str, report.findings)))


def wrap(folders: Folders, path: Any) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folders.output}", rank=0, world_size=1)
    try:
        s.wrap_fsdp_meta_safe(s.meta_model(folders.base), path)
    finally:
        dist.destroy_process_group()


Verb = Callable[[Folders, Any], object]
OF_A_BASE: dict[str, Verb] = {
    "check_checkpoint": lambda f, x: check(x),
    "load_peft_on_rank": lambda f, x: s.load_peft_on_rank(x, f.adapter),
    "merge_lora_checkpoint": lambda f, x: s.merge_lora_checkpoint(x, f.adapter, f.output),
    "verify_merge": lambda f, x: s.verify_merge(x, f.adapter, f.base),
    "plan_device_map": lambda f, x: s.plan_device_map(x, CARD),
    "predict_memory": lambda f, x: s.predict_memory(x, GENERATE),
    "largest_micro_batch": lambda f, x: s.largest_micro_batch(x, TRAIN, "40MiB", context_bytes=0),
    "fewest_ranks": lambda f, x: s.fewest_ranks(x, TRAIN, "1GiB", s.Spread.fsdp2(1)),
    "fewest_cards": lambda f, x: s.fewest_cards(x, "1GiB"),
    "largest_workload": lambda f, x: s.largest_workload(x, CARD, most=2),
    "smallest_limits": lambda f, x: s.smallest_limits(x, 1),
    "meta_model": lambda f, x: s.meta_model(x),
    "audit_model": lambda f, x: s.audit_model(x, TRAIN),
    "wrap_fsdp_meta_safe": lambda f, x: wrap(f, x),
}
OF_AN_ADAPTER: dict[str, Verb] = {
    "check_checkpoint": lambda f, x: check(x),
    "load_peft_on_rank": lambda f, x: s.load_peft_on_rank(f.base, x),
    "load_peft_on_rank, alone": lambda f, x: s.load_peft_on_rank(x),
    "load_adapter_on_rank": lambda f, x: s.load_adapter_on_rank(s.load_peft_on_rank(f.base, f.adapter), x, "later"),
    "merge_lora_checkpoint": lambda f, x: s.merge_lora_checkpoint(f.base, x, f.output),
    "verify_merge": lambda f, x: s.verify_merge(f.base, x, f.base),
    "predict_memory": lambda f, x: s.predict_memory(f.base, GENERATE.replace(adapter=x)),
    "plan_device_map": lambda f, x: s.plan_device_map(f.base, CARD, workload=GENERATE.replace(adapter=x)),
    "audit_model": lambda f, x: s.audit_model(f.base, TRAIN.replace(adapter=x)),
}
OF_A_MERGE: dict[str, Verb] = {"verify_merge, merged": lambda f, x: s.verify_merge(f.base, f.adapter, x)}
SEARCHES = {"largest_micro_batch", "fewest_ranks", "fewest_cards", "largest_workload", "smallest_limits"}
TAKES_ADAPTERS = {"check_checkpoint", "predict_memory", "plan_device_map", "audit_model", *SEARCHES}


def commands(f: Folders, base: object, adapter: object) -> dict[str, list[object]]:
    return {
        "check": ["check", base],
        "plan": ["plan", base, "--max-memory", "0=1GiB"],
        "predict": ["predict", base, "--train", "1x8"],
        "predict --adapter": ["predict", f.base, "--train", "1x8", "--adapter", adapter],
        "audit": ["audit", base, "--train", "1x8"],
        "merge": ["merge", base, f.adapter, f.output],
        "merge, adapter": ["merge", f.base, adapter, f.output],
        "verify": ["verify", base, f.adapter, f.base],
        "verify, merged": ["verify", f.base, f.adapter, base],
    }


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return Folders(tmp_path_factory.mktemp("alike"))


def refused(call: Callable[[], object]) -> str:
    with pytest.raises(s.CheckpointError) as caught:
        call()
    return str(caught.value)


@pytest.mark.parametrize("name", THINGS)
def test_what_is_no_folder_of_the_kind_is_named_alike(
    made: Folders, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    thing = THINGS[name]
    base, adapter = thing.base(made), thing.adapter(made)
    said = {verb: refused(lambda call=call: call(made, base)) for verb, call in {**OF_A_BASE, **OF_A_MERGE}.items()}
    said |= {f"{verb}, adapter": refused(lambda call=call: call(made, adapter)) for verb, call in OF_AN_ADAPTER.items()}
    for command, words in commands(made, base, adapter).items():
        assert main([*map(str, words)]) in (1, 2), command
        said[command] = "".join(capsys.readouterr())
    assert {where: text for where, text in said.items() if not re.search(thing.says, text, re.DOTALL)} == {}


def test_every_verb_takes_the_folder_that_the_advice_names(made: Folders) -> None:
    def named(name: str, passed: Path) -> Path:
        found = re.search(THINGS[name].says, refused(lambda: s.verify_merge(made.base, made.adapter, passed)))
        assert found is not None
        return Path(found[1])

    assert named("one file", made.base / "config.json") == made.base
    for passed, verbs in ((made.run, OF_A_BASE), (made.adapter_run, OF_AN_ADAPTER)):
        for verb in verbs.keys() - SEARCHES:  # which make plans and forecasts, too
            verbs[verb](made, named("a run", passed))


def test_the_weights_of_mlx_are_read_beside_their_config(made: Folders, tmp_path: Path) -> None:
    folder = shutil.copytree(made.mlx, tmp_path / "mlx")
    (folder / "adapter_config.json").write_text('{"lora_parameters": {"rank": 2, "scale": 2.0, "dropout": 0.0}}')
    for call in (OF_AN_ADAPTER[verb] for verb in ("check_checkpoint", "load_peft_on_rank", "merge_lora_checkpoint")):
        call(made, folder)


def test_the_folder_of_an_adapter_is_taken_or_named(made: Folders) -> None:
    said = {}
    for verb, call in {**OF_A_BASE, **OF_A_MERGE}.items():
        if verb in TAKES_ADAPTERS:
            if verb not in SEARCHES:
                call(made, made.adapter)
            continue
        with pytest.raises((s.CheckpointNotFound, s.ArgumentError)) as caught:
            call(made, made.adapter)
        said[verb] = str(caught.value)
    alike = r"(is the folder of|holds) an adapter"
    assert {verb: text for verb, text in said.items() if not re.search(alike, text)} == {}
    written = s.merge_lora_checkpoint(made.base, made.adapter, made.output).output
    assert "Pass the one that the merge wrote" in said["verify_merge, merged"]
    assert s.verify_merge(made.base, made.adapter, written).ok


def test_an_adapter_beside_the_config_of_its_base_is_told_from_a_merged_model(made: Folders, tmp_path: Path) -> None:
    adapter = shutil.copytree(made.adapter, tmp_path / "adapter")
    shutil.copy(made.base / "config.json", adapter)  # as trainers write it
    assert "Pass the one that the merge wrote" in refused(lambda: s.verify_merge(made.base, made.adapter, adapter))
    for call in (OF_AN_ADAPTER[verb] for verb in ("check_checkpoint", "load_peft_on_rank", "merge_lora_checkpoint")):
        call(made, adapter)
