"""The advice of errors on the command line, taken: the second line of each pair says what the first was told."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from safe_loading import __main__ as command_line
from safe_loading import _demo

PLAN, PREDICT = ["plan", "BASE", "--max-memory"], ["predict", "BASE"]
GRPO = [*PREDICT, "--train", "2x16", "--max-completion-length", "8"]
PAIRS: dict[str, tuple[list[str], str, list[str]]] = {
    "limits": ([*PLAN, "0:1GB"], "write one limit per device: 0=20GiB cpu=64GiB.", [*PLAN, "0=20GiB", "cpu=64GiB"]),
    "an option alone": (
        [*PLAN, "0=1GB", "--batch", "4"],
        "has no effect without --context or --train; add --context or --train, or drop it.",
        [*PLAN, "0=1GB", "--batch", "4", "--context", "8"],
    ),
    "an option that is dropped": ([*PLAN, "0=1GB", "--batch", "4"], "or drop it.", [*PLAN, "0=1GB"]),
    "a step": (
        [*PREDICT, "--train", "many"],
        "--train many: write ROWSxTOKENS, such as 4x1024, or only TOKENS.",
        [*PREDICT, "--train", "4x8"],
    ),
    "tokens": ([*PREDICT, "--train", "many"], "or only TOKENS.", [*PREDICT, "--train", "8"]),
    "an answer": (
        [*PREDICT, "--generate", "many"],
        "--generate many: write ROWSxTOKENS, such as 1x4096, or only TOKENS.",
        [*PREDICT, "--generate", "1x16"],
    ),
    "values": (
        [*PREDICT, "--train", "8", "--sweep", "batch", "--values", "1;2"],
        "write whole numbers with commas between them: 1,2,4.",
        [*PREDICT, "--train", "8", "--sweep", "batch", "--values", "1,2,4"],
    ),
    "two limits of a card": (
        [*PLAN, "0=1GB", "--card", "h100"],
        "are two limits of one card: drop one of them.",
        ["plan", "BASE", "--card", "h100"],
    ),
    "a number of cards": (
        ["plan", "BASE", "--card", "h100", "--gpus", "few"],
        "write a number of cards from 1 on, or fewest.",
        ["plan", "BASE", "--card", "h100", "--gpus", "fewest"],
    ),
    "the fewest cards of a plan": (
        ["plan", "BASE", "--card", "h100", "--gpus", "fewest", "--offload", "cpu"],
        "drop --offload and --max-memory, or give a number.",
        ["plan", "BASE", "--card", "h100", "--gpus", "2", "--offload", "cpu", "--max-memory", "cpu=1GB"],
    ),
    "the fewest cards": (
        [*PREDICT, "--train", "8", "--gpus", "fewest"],
        "name the card, such as --card h100.",
        [*PREDICT, "--train", "8", "--gpus", "fewest", "--card", "h100"],
    ),
    "two adapters": (
        [*PREDICT, "--train", "8", "--lora", "r=8", "--adapter", "ADAPTER"],
        "give one of them.",
        [*PREDICT, "--train", "8", "--adapter", "ADAPTER"],
    ),
    "fields of a LoRA": (
        [*PREDICT, "--train", "8", "--lora", "rank=8"],
        "write r=16 alpha=32 targets=q_proj,v_proj.",
        [*PREDICT, "--train", "8", "--lora", "r=16", "alpha=32", "targets=q_proj,v_proj"],
    ),
    "a prompt": (
        [*PREDICT, "--train", "2x8", "--max-completion-length", "8"],
        "write --train 2x520 for a prompt of 512.",
        [*PREDICT, "--train", "2x520", "--max-completion-length", "8"],
    ),
    "one GPU": (
        [*GRPO, "--gpus", "2"],
        "drop --gpus.",
        GRPO,
    ),
    "padded rows": ([*GRPO, "--packing"], "drop --packing or --max-completion-length.", GRPO),
    "whole groups": (
        [*GRPO, "--num-generations", "8"],
        "pass --steps-per-generation 4.",
        [*GRPO, "--num-generations", "8", "--steps-per-generation", "4"],
    ),
    "a reference without a weight": (
        [*GRPO, "--reference", "model"],
        "add --beta 0.04, or drop --reference.",
        [*GRPO, "--reference", "model", "--beta", "0.04"],
    ),
    "a card": (
        [*PREDICT, "--train", "8", "--card", "h10"],
        "write h100",
        [*PREDICT, "--train", "8", "--card", "h100"],
    ),
    "the memory of a card": (
        [*PREDICT, "--train", "8", "--card", "mine"],
        "or give its memory, such as 24GB.",
        [*PREDICT, "--train", "8", "--card", "24GB"],
    ),
    "a quantization": (
        [*PLAN, "0=1GB", "--quantization", "int3"],
        "pass one of nf4, fp4, int8, fp8, mxfp4, gptq, awq, or what a config.json has",
        [*PLAN, "0=1GB", "--quantization", "nf4"],
    ),
    "a quantization of config.json": (
        [*PLAN, "0=1GB", "--quantization", "int4"],
        'or what a config.json has: {"quant_method": "gptq", "bits": 4}.',
        [*PLAN, "0=1GB", "--quantization", '{"quant_method": "gptq", "bits": 4}'],
    ),
    "a capability": (
        [*PLAN, "0=1GB", "--quantization", "fp8", "--capability", "hopper"],
        "write major and minor, such as 8.0 for an A100 and 9.0 for an H100.",
        [*PLAN, "0=1GB", "--quantization", "nf4", "--capability", "9.0"],
    ),
    "a folder that is used": (
        ["demo", "--folder", "USED"],
        "is not empty; name a new folder",
        ["demo", "--folder", "NEW"],
    ),
    "a folder that is a file": (
        ["demo", "--folder", "USED/file"],
        "cannot be written",
        ["demo", "--folder", "NEW"],
    ),
}


@pytest.mark.parametrize("kind", PAIRS)
def test_a_line_is_run_once_the_advice_is_taken(
    kind: str,
    tmp_path: Path,
    tiny_llama: Path,
    tiny_adapter: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def chapters(folder: Path) -> Iterator[str]:
        yield f"in {folder}"

    monkeypatch.setattr(_demo, "chapters", chapters)  # the demo itself has its own test
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "file").write_text("mine")
    places = {
        "BASE": tiny_llama,
        "ADAPTER": tiny_adapter,
        "USED": tmp_path / "used",
        "USED/file": tmp_path / "used" / "file",
        "NEW": tmp_path / "new",
    }

    def status(words: list[str]) -> tuple[int, str]:
        code = command_line.main([str(places.get(word, word)) for word in words])
        told = capsys.readouterr()
        return code, told.out + told.err

    refused, advice, taken = PAIRS[kind]
    code, text = status(refused)
    assert (code in (1, 2), advice in text) == (True, True), text
    code, text = status(taken)
    assert code == 0, text
