"""Adapters whose configs want more than their files hold: what is opened and what is allocated by a load."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from faults.folders import INDEX
from safetensors.torch import load_file
from tiny_models import saved, tiny_config
from transformers import AutoModelForCausalLM

from safe_loading import (
    AdapterError,
    ArgumentError,
    CheckpointError,
    SafeLoadingError,
    Workload,
    load_adapter_on_rank,
    load_peft_on_rank,
    merge_lora_checkpoint,
    meta_model,
    predict_memory,
)
from safe_loading._loading.allocation_limit import AllocationLimit
from safe_loading._model.module_limit import MOST_REGISTERED, module_limit
from safe_loading._sharding.buffers import compute_buffers

PROMPT = peft.MultitaskPromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4, num_tasks=2)
TEXT = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
Trained = Callable[..., Path]


@pytest.fixture
def trained(tmp_path: Path, tiny_llama: Path) -> Trained:
    """Save an adapter, with fields of its config replaced."""

    def save(config: peft.PeftConfig, **fields: Any) -> Path:
        folder = tmp_path / f"adapter-{len(list(tmp_path.iterdir()))}"
        peft.get_peft_model(AutoModelForCausalLM.from_pretrained(tiny_llama), config).save_pretrained(folder)
        document = json.loads((folder / "adapter_config.json").read_text())
        (folder / "adapter_config.json").write_text(json.dumps({**document, **fields}))
        return folder

    return save


@pytest.fixture
def opened() -> Iterator[list[str]]:
    """The files that are opened, and the modules that are imported, while the test runs."""
    events: list[str] = []
    listening = True

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if listening and event in ("open", "import", "socket.connect") and arguments:
            events.append(f"{event} {arguments[0]}")

    sys.addaudithook(hook)
    yield events
    listening = False


class Runs:
    """A pickle that would run code."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("exit 1",)


@pytest.mark.parametrize("trainable", [False, True])
@pytest.mark.parametrize("kind", ["FIFO", "pickle", "device", "nothing"])
def test_what_a_prompt_began_with_is_not_opened(
    tmp_path: Path, tiny_llama: Path, trained: Trained, opened: list[str], kind: str, trainable: bool
) -> None:
    path = tmp_path / "began_with.bin"
    if kind == "FIFO":
        os.mkfifo(path)
    elif kind == "pickle":
        path.write_bytes(pickle.dumps(Runs()))
    elif kind == "device":
        path = Path("/dev/zero")
    began = {"prompt_tuning_init": "EXACT_SOURCE_TASK", "prompt_tuning_init_task": 0}
    adapter = trained(PROMPT, **began, prompt_tuning_init_state_dict_path=str(path))
    opened.clear()
    model = load_peft_on_rank(tiny_llama, adapter, is_trainable=trainable)
    held = load_file(adapter / "adapter_model.safetensors")
    assert torch.equal(model.prompt_encoder["default"].embedding.weight, held["prompt_embeddings"])
    assert not [event for event in opened if str(path) in event]
    # the config is as it was: it is saved again with the adapter
    assert model.peft_config["default"].prompt_tuning_init == "EXACT_SOURCE_TASK"
    assert model.peft_config["default"].prompt_tuning_init_state_dict_path == str(path)


@pytest.mark.parametrize("trainable", [False, True])
def test_no_tokenizer_is_fetched_for_the_text_that_a_prompt_began_with(
    tiny_llama: Path, trained: Trained, opened: list[str], trainable: bool
) -> None:
    began = {"prompt_tuning_init": "TEXT", "prompt_tuning_init_text": "x", "tokenizer_name_or_path": "who/tokenizer"}
    adapter = trained(TEXT, **began, tokenizer_kwargs={"trust_remote_code": True})
    model = load_peft_on_rank(tiny_llama, adapter, is_trainable=trainable)
    held = load_file(adapter / "adapter_model.safetensors")
    assert torch.equal(model.prompt_encoder["default"].embedding.weight, held["prompt_embeddings"])
    assert not [event for event in opened if "who" in event or event.startswith("socket")]


@pytest.mark.parametrize(
    ("config", "fields"),
    [
        (peft.LoHaConfig(target_modules=["q_proj"]), {"rank_pattern": {"q_proj": 16_000}, "r": 16_000}),
        (
            peft.VBLoRAConfig(target_modules=["q_proj"], num_vectors=8, vector_length=8),
            {"num_vectors": 2**13, "vector_length": 2**13},
        ),
    ],
    ids=["LoHa", "VBLoRA"],
)
def test_an_adapter_allocates_in_proportion_to_its_file_and_its_base(
    tiny_llama: Path, trained: Trained, config: peft.PeftConfig, fields: dict[str, Any]
) -> None:
    load_peft_on_rank(tiny_llama, trained(config), is_trainable=True)
    with pytest.raises(AdapterError) as caught:
        load_peft_on_rank(tiny_llama, trained(config, **fields), is_trainable=True)
    assert "adapter_config.json makes peft allocate more than" in str(caught.value) or "16000]" in str(caught.value)


def test_the_limit_counts_what_is_made_of_numbers() -> None:
    with AllocationLimit(1000, "here"):
        torch.zeros(30, 30)
        small = torch.arange(99)
        torch.empty(10**12, device="meta")
        (small[None] * small[:, None]).sum()  # computed from tensors
        for make in (torch.nn.Linear, torch.empty, torch.randn):
            with pytest.raises(AdapterError, match="here makes peft allocate more than 1000 values"):
                make(10**6, 10**6)
        with pytest.raises(AdapterError, match="more than 1000"):
            torch.zeros(2)
    torch.zeros(2000)


def test_numbers_that_torch_cannot_take_are_errors_of_the_adapter(
    tmp_path: Path, tiny_llama: Path, tiny_adapter: Path
) -> None:
    for number, fields in enumerate(({"r": 4.5}, {"lora_dropout": 1e300}, {"r": 10**15})):
        folder = Path(shutil.copytree(tiny_adapter, tmp_path / str(number)))
        document = json.loads((folder / "adapter_config.json").read_text())
        (folder / "adapter_config.json").write_text(json.dumps({**document, **fields}))
        with pytest.raises(SafeLoadingError, match=r"adapter_config\.json"):
            load_peft_on_rank(tiny_llama, folder)


def test_a_kernel_is_taken_from_the_caller_alone(tmp_path: Path, tiny_llama: Path, tiny_adapter: Path) -> None:
    base = Path(shutil.copytree(tiny_llama, tmp_path / "base"))
    document = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**document, "_attn_implementation": "who/attention"}))
    with pytest.raises(ArgumentError, match="who/attention"):
        load_peft_on_rank(base, tiny_adapter)
    with pytest.raises(ArgumentError, match="who/attention"):
        meta_model(base)
    # the fix that the message names
    model = load_peft_on_rank(base, tiny_adapter, base_kwargs={"attn_implementation": "sdpa"})
    assert model.config._attn_implementation == "sdpa"
    assert meta_model(base, attn_implementation="eager").config._attn_implementation == "eager"


@pytest.mark.parametrize(
    "text",
    [
        '{"max_new_tokens": -5}',
        '{"suppress_tokens": [' + "1, " * 400_000 + "1]}",
        '{"pad_token_id": "x"}',
        '{"cache_implementation": "who"}',
        "[1]",
        "{",
    ],
)
def test_a_bad_generation_config_is_named(tmp_path: Path, tiny_llama: Path, tiny_adapter: Path, text: str) -> None:
    base = Path(shutil.copytree(tiny_llama, tmp_path / "base"))
    (base / "generation_config.json").write_text(text)
    for call in (lambda: load_peft_on_rank(base, tiny_adapter), lambda: meta_model(base)):
        with pytest.raises(CheckpointError, match=r"generation_config\.json"):
            call()
    (base / "generation_config.json").unlink()  # the fix that the message names
    load_peft_on_rank(base, tiny_adapter)


@pytest.mark.parametrize("base", [7, ["who/model"], {"a": "who/model"}, True])
def test_a_base_that_no_text_names_is_refused(
    tmp_path: Path, tiny_llama: Path, tiny_adapter: Path, base: object
) -> None:
    folder = Path(shutil.copytree(tiny_adapter, tmp_path / "adapter"))
    document = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**document, "base_model_name_or_path": base}))
    with pytest.raises(AdapterError, match=r"adapter_config\.json: base_model_name_or_path is .*Pass base_model="):
        load_peft_on_rank(folder)
    with pytest.raises(SafeLoadingError, match="names no base model"):
        predict_memory(folder, Workload.generate(1, 16))
    load_peft_on_rank(tiny_llama, folder)  # the fix that the message names


@pytest.mark.parametrize("mapping", [[], [None, []], "text", {"parent_library": ["transformers"]}])
def test_an_auto_mapping_of_another_type_names_no_class(
    tmp_path: Path, tiny_llama: Path, tiny_adapter: Path, mapping: object
) -> None:
    folder = Path(shutil.copytree(tiny_adapter, tmp_path / "adapter"))
    document = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**document, "task_type": None, "auto_mapping": mapping}))
    model = load_peft_on_rank(tiny_llama, folder)  # by the architecture of the base
    assert type(model.get_base_model()).__name__ == "LlamaForCausalLM"


@pytest.mark.parametrize("revision", ["../../elsewhere", "/etc", "a/../../b", "a\0b", 7, ["main"]])
def test_a_revision_in_an_adapters_config_names_no_path(
    tmp_path: Path, tiny_llama: Path, tiny_adapter: Path, opened: list[str], revision: object
) -> None:
    folder = Path(shutil.copytree(tiny_adapter, tmp_path / "adapter"))
    document = json.loads((folder / "adapter_config.json").read_text())
    named = {"base_model_name_or_path": "who/model", "revision": revision}
    (folder / "adapter_config.json").write_text(json.dumps({**document, **named}))
    opened.clear()
    with pytest.raises(AdapterError, match=r"adapter_config\.json: revision is .*Pass base_model= and base_revision="):
        load_peft_on_rank(folder)
    assert not [event for event in opened if "elsewhere" in event or event.startswith("socket")]
    assert load_peft_on_rank(folder, base_model=tiny_llama).load_report.ok


def test_a_model_of_more_modules_than_any_has_is_refused(
    tmp_path: Path, tiny_llama: Path, tiny_adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert MOST_REGISTERED >= 200_000  # those of Kimi K2, with a module for each expert
    base = Path(shutil.copytree(tiny_llama, tmp_path / "base"))
    monkeypatch.setattr("safe_loading._model.meta_model.module_limit", lambda name: module_limit(name, most=40))
    for call in (lambda: meta_model(base), lambda: load_peft_on_rank(base, tiny_adapter)):
        with pytest.raises(CheckpointError, match="LlamaConfig makes more than 40 modules and parameters"):
            call()
    with module_limit("x", most=3):
        torch.nn.Sequential(torch.nn.ReLU(), torch.nn.ReLU())
        thread = threading.Thread(target=lambda: torch.nn.Sequential(*(torch.nn.ReLU() for _ in range(9))))
        thread.start()
        thread.join()
        torch.nn.Sequential(torch.nn.ReLU())
        with pytest.raises(CheckpointError):
            torch.nn.Linear(2, 2)
    torch.nn.Sequential(*(torch.nn.ReLU() for _ in range(9)))  # no hook is left


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("GPTJForCausalLM", "n_positions"),
        pytest.param("XGLMForCausalLM", "max_position_embeddings", marks=pytest.mark.slow),
        pytest.param("MarianMTModel", "max_position_embeddings", marks=pytest.mark.slow),
    ],
)
def test_tables_that_no_file_holds_are_in_proportion_to_the_files(
    tmp_path: Path, tiny_adapter: Path, name: str, field: str
) -> None:
    base = tmp_path / name
    saved(name, base)
    compute_buffers(meta_model(base))
    document = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**document, field: 10**9}))
    with pytest.raises(CheckpointError, match=r"config\.json makes a model of .* GiB, out of proportion to the .* KiB"):
        load_peft_on_rank(base, tiny_adapter, auto_class=getattr(transformers, name), strict=False)
    model = meta_model(base)
    if name != "MarianMTModel":  # whose tables are parameters, which a wrap asks the folder for
        with pytest.raises(CheckpointError, match=r"out of proportion.*"):
            compute_buffers(model)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "fields"),
    [("vits", {"prior_encoder_num_flows": 10**9}), ("dac", {"n_codebooks": 10**9})],
)
def test_counts_that_become_loops_end(tmp_path: Path, model: str, fields: dict[str, Any]) -> None:
    folder = tmp_path / model
    tiny_config(model).save_pretrained(folder)
    document = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**document, **fields}))
    with pytest.raises(CheckpointError, match=r"modules and parameters|cannot be built"):
        meta_model(folder)


def test_an_index_without_metadata_is_named(tmp_path: Path, tiny_llama: Path, tiny_adapter: Path) -> None:
    base = Path(shutil.copytree(tiny_llama, tmp_path / "base"))
    document = json.loads((base / INDEX).read_text())
    metadata = document.pop("metadata")
    (base / INDEX).write_text(json.dumps(document))
    with pytest.raises(CheckpointError, match=r"model\.safetensors\.index\.json: metadata is missing.*Fix: add"):
        load_peft_on_rank(base, tiny_adapter)
    (base / INDEX).write_text(json.dumps({**document, "metadata": metadata}))
    load_peft_on_rank(base, tiny_adapter)


def test_code_of_another_name_is_named_and_not_run(
    tmp_path: Path, tiny_llama: Path, caplog: pytest.LogCaptureFixture
) -> None:
    base = Path(shutil.copytree(tiny_llama, tmp_path / "base"))
    document = json.loads((base / "config.json").read_text())
    code = {"architectures": ["Own"], "auto_map": {"AutoModelForCausalLM": "own.Other"}}
    (base / "config.json").write_text(json.dumps({**document, **code}))
    assert type(meta_model(base)).__name__ == "LlamaForCausalLM"  # as for the auto classes, which are not told to trust
    assert "no Own, which the config names; LlamaForCausalLM is taken" in caplog.text
    caplog.clear()
    assert type(meta_model(base, AutoModelForCausalLM)).__name__ == "LlamaForCausalLM"
    assert "which the config names" not in caplog.text


def test_an_output_of_a_long_name_is_refused(tmp_path: Path, tiny_llama: Path, tiny_adapter: Path) -> None:
    with pytest.raises(ArgumentError, match=r"300 bytes.*at most 240"):
        merge_lora_checkpoint(tiny_llama, tiny_adapter, tmp_path / ("x" * 300))
    merge_lora_checkpoint(tiny_llama, tiny_adapter, tmp_path / ("x" * 240))


def interrupted(call: Callable[[], Any], function: str, before_end: int | None) -> int:
    """Call, with Ctrl-C so many lines before the end of a function; return how many lines it ran."""
    lines = 0
    total = None if before_end is None else interrupted(call, function, None)

    def local(frame: Any, event: str, _: Any) -> Any:
        nonlocal lines
        if event == "line":
            lines += 1
            if total is not None and lines == total - before_end:
                raise KeyboardInterrupt
        return local

    sys.settrace(lambda frame, *_: local if frame.f_code.co_name == function else None)
    try:
        call()
    finally:
        sys.settrace(None)
    return lines


@pytest.mark.parametrize("before_end", range(12))
def test_ctrl_c_in_the_last_lines_leaves_no_adapter(tiny_llama: Path, tiny_adapter: Path, before_end: int) -> None:
    def load() -> None:
        load_peft_on_rank(bases.pop(), tiny_adapter)

    bases = [AutoModelForCausalLM.from_pretrained(tiny_llama) for _ in range(2)]
    base: Any = bases[0]  # the second call is the one that is interrupted
    before = {name: id(parameter) for name, parameter in base.named_parameters()}
    with pytest.raises(KeyboardInterrupt):
        interrupted(load, "load_peft_on_rank", before_end)
    assert {name: id(parameter) for name, parameter in base.named_parameters()} == before
    assert "load_report" not in vars(base)


@pytest.mark.parametrize("before_end", range(8))
def test_ctrl_c_in_the_last_lines_leaves_no_second_adapter(
    tiny_llama: Path, tiny_adapter: Path, before_end: int
) -> None:
    def load() -> None:
        load_adapter_on_rank(models.pop(), tiny_adapter, "second")

    models = [load_peft_on_rank(tiny_llama, tiny_adapter) for _ in range(2)]
    model: Any = models[0]
    before = {name: id(parameter) for name, parameter in model.named_parameters()}
    with pytest.raises(KeyboardInterrupt):
        interrupted(load, "load_adapter_on_rank", before_end)
    assert {name: id(parameter) for name, parameter in model.named_parameters()} == before
    assert list(model.peft_config) == ["default"]
