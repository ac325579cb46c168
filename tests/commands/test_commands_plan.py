"""``python -m safe_loading plan``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from models import save_llama
from peft import LoraConfig
from rank_server import RankServer
from transformers import BitsAndBytesConfig, FineGrainedFP8Config

from safe_loading import DeviceMapPlan, Workload, fewest_cards, plan_device_map
from safe_loading import __main__ as command_line
from safe_loading._commands.answer import INFEASIBLE, NOT_OK, USAGE
from safe_loading._memory.plan.device_memory import CUDA_CONTEXT

LIMITS = ["--max-memory", "0=100KB", "1=100KB"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_llama(tmp_path_factory.mktemp("cli") / "llama", torch.float32))


def test_the_table_and_the_map_are_printed(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.main(["plan", folder, *LIMITS]) == 0
    out, plan = capsys.readouterr().out, plan_device_map(folder, {0: "100KB", 1: "100KB"})
    assert plan.table() in out
    for path, device in plan.items():
        assert f"\n{path}: {device}" in out
    assert "verified" in out.splitlines()[0]


def test_json_is_the_plan(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.main(["plan", folder, "--max-memory", "0=120KB", "1=120KB", "--context", "16", "--json"]) == 0
    plan = DeviceMapPlan.from_json(capsys.readouterr().out)
    assert set(plan.values()) == {0, 1}
    assert plan.verified
    assert plan.facts.workload == Workload.generate(1, 16)
    assert sum(use.kv_cache for use in plan.devices) > 0


def test_cards_are_told_by_name_or_size(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    def told(*words: str) -> DeviceMapPlan:
        assert command_line.main(["plan", folder, *words, "--json"]) == 0
        return DeviceMapPlan.from_json(capsys.readouterr().out)

    named = told("--card", "rtx 4090", "--gpus", "2")
    limits = dict.fromkeys(range(2), int(23.52 * 2**30))
    by_hand = plan_device_map(folder, limits, capability=(8, 9), overhead=CUDA_CONTEXT)
    assert named == by_hand
    assert [(use.limit, use.overhead) for use in named.devices] == [
        (use.limit, use.overhead) for use in by_hand.devices
    ]
    assert set(told("--card", "120KB", "--gpus", "2", "--max-memory", "cpu=1GB").values()) == {0, 1}
    fewest = told("--card", "120KB", "--gpus", "fewest")
    assert fewest == fewest_cards(folder, "120KB")
    assert len(fewest.devices) > 1
    assert command_line.main(["plan", folder, "--card", "10KB"]) == INFEASIBLE


def test_the_attention_is_chosen(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", folder, "--card", "24GB", "--context", "2048", "--json", "--attention"]
    told = []
    for name in ("eager", "sdpa"):
        assert command_line.main([*words, name]) == 0
        told.append(DeviceMapPlan.from_json(capsys.readouterr().out))
        options: Any = {"workload": Workload.generate(1, 2048), "attn_implementation": name}
        assert told[-1].devices == plan_device_map(folder, {0: "24GB"}, **options).devices
    assert told[0].devices[0].activations != told[1].devices[0].activations


def test_training_counts_gradients(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", folder, "--max-memory", "0=4MB", "--train", "8", "--gradient-checkpointing", "--json"]
    assert command_line.main(words) == 0
    plan = DeviceMapPlan.from_json(capsys.readouterr().out)
    assert plan.devices[0].gradients > 0
    assert "batch_size=1, sequence_length=8" in str(plan.facts.workload)


@pytest.mark.parametrize("words", [["--train", "2x8"], ["--train", "8", "--batch", "2"]])
def test_rows_are_told_with_the_tokens_or_apart(
    folder: str, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert command_line.main(["plan", folder, "--max-memory", "0=4MB", "--no-verify", "--json", *words]) == 0
    plan = DeviceMapPlan.from_json(capsys.readouterr().out)
    assert "batch_size=2, sequence_length=8" in str(plan.facts.workload)


def test_what_does_not_fit_leaves_with_3(
    folder: str, rank_server: RankServer, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["plan", folder, "--max-memory", "0=10KB"]
    told = rank_server.run_module("safe_loading", args=words, timeout=60, check=False)
    assert told.code == 3
    assert "does not fit" in told.output
    assert "Traceback" not in told.output
    assert command_line.main([*words, "--json"]) == 3
    facts = json.loads(capsys.readouterr().out)
    assert facts["error"] == "DeviceMapInfeasible"
    assert facts["problems"]
    assert all(problem in facts["message"] for problem in facts["problems"])
    assert facts["missing_bytes"] > 0
    assert facts["device"] == 0


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--max-memory", "0=5XB"], "5XB"),
        (["--max-memory", "0=-5GB"], "negative"),
        (["--max-memory", "0"], "is not DEVICE=SIZE"),
        (["--max-memory", "0=1GB", "0=2GB"], "for the second time"),
        (["--max-memory", "0=1GB", "--train", "8", "--context", "8"], "cannot be combined"),
        (["--gpus", "2"], "--gpus: has no effect without --card"),
        (["--card", "h100", "--gpus", "0"], "--gpus 0: write a number of cards from 1 on, or fewest"),
        (["--card", "h1oo"], "write h100"),
        (["--card", "2x24GB"], "pass 24GB with --gpus 2"),
        (["--card", "h100", "--max-memory", "0=1GB"], "two limits of one card"),
        (["--card", "h100", "--gpus", "fewest", "--offload", "cpu"], "drop --offload and --max-memory"),
        (["--max-memory", "0=1GB", "--train", "2x8", "--batch", "4"], "--train 2x8 has 2 rows, but --batch is 4"),
        (["--max-memory", "0=1GB", "--optimizer", "sgd", "--context", "8"], "--optimizer: has no effect"),
        (
            ["--max-memory", "0=1GB", "--batch", "4"],
            "--batch: has no effect",
        ),
        (["--max-memory", "0=1GB", "--train", "x8"], "--train x8: write ROWSxTOKENS, such as 4x1024"),
    ],
)
def test_what_cannot_be_read_is_told_on_stderr(
    folder: str, words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command_line.main(["plan", folder, *words]) == USAGE
    told = capsys.readouterr()
    assert says in told.err
    assert told.out == ""


def test_a_folder_that_is_not_there_leaves_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.main(["plan", str(tmp_path / "none"), *LIMITS]) == USAGE
    assert "none" in capsys.readouterr().err


def test_quantization_has_the_names_of_transformers(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    for words, options in (
        (["int8"], {"quantization_config": BitsAndBytesConfig(load_in_8bit=True)}),
        (["fp8"], {"quantization_config": FineGrainedFP8Config()}),
        (["fp8", "--capability", "8.0"], {"quantization_config": FineGrainedFP8Config(), "capability": (8, 0)}),
        ([json.dumps(fp8)], {"quantization_config": fp8}),
    ):
        assert command_line.main(["plan", folder, *LIMITS, "--json", "--quantization", *words]) == 0
        plan = DeviceMapPlan.from_json(capsys.readouterr().out)
        assert plan.devices == plan_device_map(folder, {0: "100KB", 1: "100KB"}, **options).devices
    for words, message in (
        (["nf5"], "nf4, fp4, int8, fp8, mxfp4"),
        (["{"], "no JSON"),
        (["fp8", "--capability", "9"], "such as 8.0"),
        (["mxfp4"], "gpt-oss alone"),
    ):
        assert command_line.main(["plan", folder, *LIMITS, "--quantization", *words]) == 2
        assert message in capsys.readouterr().err


def test_who_prepares_a_base_in_4_bits_is_a_word(
    folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    adapter = LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM")
    adapter.base_model_name_or_path = folder
    adapter.save_pretrained(str(tmp_path))
    step = ["--quantization", "nf4", "--train", "8", "--adapter", str(tmp_path), "--json"]

    def told(*words: str) -> dict[str, Any]:
        command_line.main([*words, *step])
        facts: dict[str, Any] = json.loads(capsys.readouterr().out)
        return facts

    for word, note in (("trl", "as trl"), ("peft", "by peft's"), ("none", "by nobody"), (None, "as trl")):
        chosen = [] if word is None else ["--kbit", word]
        forecast = json.dumps(told("predict", folder, *chosen))
        assert f"in 4 or 8 bits {note}" in forecast
        plan = told("plan", folder, "--max-memory", "0=1GB", *chosen)
        assert ("kbit-assumed" in json.dumps(plan)) is (word is None)
        audit = told("audit", folder, *chosen)
        assert f"in 4 or 8 bits {note}" in json.dumps(audit)
    assert command_line.main(["predict", folder, "--generate", "8", "--kbit", "trl"]) == USAGE
    assert "--kbit: has no effect" in capsys.readouterr().err


def test_an_audit_takes_it_too(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["audit", folder, "--train", "8", "--format", "json", "--quantization"]
    assert command_line.main([*words, "int8"]) in (0, NOT_OK)
    assert "int8, frozen" in json.loads(capsys.readouterr().out)["dtypes"]
    assert command_line.main([*words, "nf5"]) == USAGE


def test_the_class_is_named_by_its_name(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.main(["plan", folder, *LIMITS, "--auto-class", "LlamaForSequenceClassification"]) == 0
    assert capsys.readouterr().out.startswith("LlamaForSequenceClassification, ")
    for words in (["plan", folder], ["predict", folder, "--generate", "4"]):
        assert command_line.main([*words, "--auto-class", "Lama"]) == USAGE
        assert "'Lama' is not a class of transformers" in capsys.readouterr().err
