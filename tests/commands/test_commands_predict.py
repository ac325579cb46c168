"""``python -m safe_loading predict``: the forecast of a step beside the cards, from a folder with a config alone."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from models import SIZES
from peft import LoraConfig
from transformers import BitsAndBytesConfig, LlamaConfig

from safe_loading import ArgumentError, Spread, Workload, predict_memory
from safe_loading.__main__ import main
from safe_loading._core.cards import CARDS, card_of

GIB = 1 << 30
GRPO = ["--train", "4x48", "--max-completion-length", "32"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("config")
    LlamaConfig(**SIZES, architectures=["LlamaForCausalLM"], dtype="bfloat16").save_pretrained(made)
    return made


def answer(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, Any]:
    status = main(["predict", *map(str, words)])
    said = capsys.readouterr()
    return status, json.loads(said.out) if "--json" in words else said.out + said.err


def test_the_line_that_people_type(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lora = ["--lora", "r=4", "alpha=8", "targets=q_proj,v_proj"]
    words = ["--train", "2x64", *lora, "--quantization", "nf4", "--checkpointing", "--card", "h100"]
    status, found = answer(capsys, folder, *words, "--json")
    assert status == 0
    config = LlamaConfig.from_pretrained(folder)
    config.quantization_config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    adapter = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"])
    expected = predict_memory(config, Workload.train(2, 64, True, adapter=adapter), capability=(9, 0))
    (row,) = found["rows"]
    assert row["forecast"]["allocated_peak_bytes"] == expected.allocated_peak_bytes
    assert row["forecast"]["total_bytes"] == expected.total_bytes
    assert row["fits"] == {"h100": True}
    assert found["cards"] == [{"name": "h100", "memory": CARDS["h100"].memory}]
    assert found["limit"] is None
    _, text = answer(capsys, folder, *words)
    assert "saved activations" in text
    assert re.search(r"h100 \(79.1 GiB\)\n", text)
    assert "fits, " in text


def test_a_word_in_a_field_of_the_adapter_is_a_list_where_the_field_takes_one(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        ("targets=q_proj", "target_modules", ["q_proj"]),
        ("targets=all-linear", "target_modules", "all-linear"),
        ("modules_to_save=lm_head", "modules_to_save", ["lm_head"]),
        ("bias=lora_only", "bias", "lora_only"),
        ("task_type=CAUSAL_LM", "task_type", "CAUSAL_LM"),
        ("init_lora_weights=gaussian", "init_lora_weights", "gaussian"),
        ("layers_to_transform=0", "layers_to_transform", 0),
        ('rank_pattern={"q_proj":4}', "rank_pattern", {"q_proj": 4}),
    ]
    for word, name, value in words:
        status, found = answer(capsys, folder, "--train", "1x16", "--lora", "r=4", word, "--card", "l4", "--json")
        assert status == 0, found
        adapter = LoraConfig(**{"r": 4, name: value})
        expected = predict_memory(str(folder), Workload.train(1, 16, adapter=adapter), capability=(8, 9))
        assert found["rows"][0]["forecast"]["allocated_peak_bytes"] == expected.allocated_peak_bytes, word


def test_a_sweep_ends_with_the_first_size_that_no_card_takes(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "sweep.svg"
    sizes = ("--card", "545MiB", "560MiB", "--sweep", "batch", "--picture", picture)
    status, found = answer(capsys, folder, "--train", "1x64", *sizes, "--json")
    assert status == 0
    assert [row["batch"] for row in found["rows"]] == [1 << place for place in range(len(found["rows"]))]
    fits = [list(row["fits"].values()) for row in found["rows"]]
    assert fits[0][1]
    assert not any(fits[-1])
    assert all(any(row) for row in fits[:-1])
    totals = [row["forecast"]["total_bytes"] for row in found["rows"]]
    assert totals == sorted(totals)
    drawn = picture.read_text(encoding="utf-8")
    assert "545MiB: 545.0 MiB" in drawn  # the line of each card
    assert drawn.count("<path ") == 2
    assert "batch 1" in drawn


def test_a_sweep_over_lengths_that_are_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = (folder, "--generate", "2x8", "--sweep", "length", "--values", "64,16", "--card", "24GB")
    status, found = answer(capsys, *words, "--json")
    assert [row["length"] for row in found["rows"]] == [16, 64]
    expected = predict_memory(str(folder), Workload.generate(2, 64)).allocated_peak_bytes
    assert found["rows"][1]["forecast"]["allocated_peak_bytes"] == expected
    assert status == 0
    assert "length" in answer(capsys, *words)[1]


def test_the_fewest_cards(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = (folder, "--train", "2x64", "--gpus", "fewest")
    status, found = answer(capsys, *words, "--fsdp1", "--card", "h100", "--json")
    assert (status, found["gpus"]) == (0, 1)
    (row,) = found["rows"]
    job = predict_memory(str(folder), Workload.train(2, 64), spread=Spread.fsdp1(1), capability=(9, 0))
    assert row["forecast"]["allocated_peak_bytes"] == job.allocated_peak_bytes
    assert row["forecast"]["ranks"] == {"0": job.ranks[0]}
    assert "The fewest GPUs that take it: 1." in answer(capsys, *words, "--zero", "3", "--card", "h100")[1]
    status, text = answer(capsys, *words, "--card", "500MiB")
    assert (status, "No number of ranks up to 128 does" in text) == (3, True)


def test_the_limit_decides_the_exit_status(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    step = (folder, "--train", "1x16", "--card", "24GB", "--limit")
    assert answer(capsys, *step, "80GB", "--json")[1]["within_limit"] is True
    status, text = answer(capsys, *step, "80GB")
    assert (status, "Within the limit of 80GB." in text) == (0, True)
    status, text = answer(capsys, *step, "100MB")
    assert (status, text.startswith("MORE THAN the limit of 100MB. Fits on 24GB.")) == (3, True)
    status, found = answer(capsys, *step, "100MB", "--json")
    assert (status, found["limit"], found["within_limit"]) == (3, 10**8, False)
    assert found["suggestions"] == [], "the context alone takes more"


def test_several_cards_are_named_by_their_number(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = (folder, "--train", "1x16", "--card")
    status, text = answer(capsys, *words, "2x48GB")
    assert (status, "card '2x48GB' is 2 cards: pass 48GB with --gpus 2" in text) == (2, True)
    status, found = answer(capsys, *words, "48GB", "--gpus", "2", "--json")
    assert (status, found["gpus"]) == (0, 2)


def test_a_limit_without_a_unit_is_told(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    step = (folder, "--train", "1x16", "--card", "24GB", "--limit")
    assert 'A number without a unit is in bytes: write "16GB".' in answer(capsys, *step, "24")[1]
    assert "without a unit" not in answer(capsys, *step, "24GB")[1]


def test_the_verdict_comes_first_and_changes_follow_it(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = (folder, "--train", "64x128", "--lora", "r=4", "targets=q_proj", "--card", "560MiB")
    status, text = answer(capsys, *words)
    assert status == 0
    places = [text.find(part) for part in ("Does NOT fit on 560MiB.", "Changes that take less", "component")]
    assert places[0] == 0
    assert places == sorted(places)
    assert re.search(r"\nbatch_size=\d+, gradient_accumulation_steps=\d+ .* fits ", text)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "--train 4x1024 and --generate"),
        (["--train", "1x8", "--generate", "8"], "with one of"),
        (["--train", "many"], "write ROWSxTOKENS"),
        (["--generate", "many"], "write ROWSxTOKENS"),
        (["--train", "8", "--values", "1,2"], "without --sweep"),
        (["--train", "8", "--gpus", "fewest", "--card", "h100", "--sweep", "batch"], "one card and one size"),
        (["--train", "8", "--gpus", "fewest", "--card", "h100", "--ddp"], "shards nothing"),
        (["--train", "8", "--sweep", "batch", "--values", "1;2"], "whole numbers with commas"),
        (["--train", "8", "--lora", "rank=8"], "no field 'rank'"),
        (["--train", "8", "--lora", "r"], "is not FIELD=VALUE"),
        (["--train", "8", "--lora", "r=8", "--adapter", "x"], "give one of them"),
        (["--train", "8", "--card", "a100"], "a100-40gb or a100-80gb"),
        (["--train", "8", "--card", "h10"], "write h100"),
        (["--train", "8", "--limit", "much"], "is not a size"),
        (["--generate", "8", "--checkpointing"], "without --train"),
        (["--generate", "8", "--max-completion-length", "4"], "--max-completion-length: has no effect without --train"),
        (["--train", "8", "--num-generations", "4", "--beta", "0.1"], "--num-generations, --beta: has no effect"),
        (["--train", "2x8", "--max-completion-length", "8"], "write --train 2x520 for a prompt of 512"),
        (["--train", "8", "--max-completion-length", "0"], "--max-completion-length 0: a number from 1 on"),
        ([*GRPO, "--num_generations", "1"], "--num-generations 1: a number from 2 on"),
        ([*GRPO, "--num-generations", "8"], "4 of --train x 1 micro-batches"),
        ([*GRPO, "--num-generations", "8"], "pass --steps-per-generation 2."),
        ([*GRPO, "--reference", "model", "--beta", "0"], "no reference with --beta 0"),
        ([*GRPO, "--gpus", "2"], "forecast for one GPU; drop --gpus"),
        ([*GRPO, "--packing"], "trl pads the rows of GRPO"),
        ([*GRPO, "--sweep", "length", "--values", "40,8"], "these sizes are none: 8"),
        ([*GRPO, "--num-generations", "6", "--sweep", "batch"], "these sizes are none: 1, 2, 4"),
        (["--train", "8", "--picture", "/no/such/folder/x.svg", "--card", "24GB"], "cannot be written"),
    ],
)
def test_wrong_usage_is_explained(
    words: list[str], said: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, text = answer(capsys, folder, *words)
    assert status == (1 if said == "cannot be written" else 2)
    assert said in text


def test_an_adapter_is_forecast_on_its_base(
    tiny_llama: Path, tiny_adapter: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, found = answer(capsys, tiny_adapter, "--train", "1x16", "--card", "24GB", "--json")
    assert status == 0
    assert found["rows"][0]["forecast"]["components"]["adapters"] > 0
    weights = found["rows"][0]["forecast"]["components"]["weights"]
    status, found = answer(capsys, tiny_adapter, "--train", "1x16", "--quantization", "nf4", "--json")
    assert status == 0
    assert found["rows"][0]["forecast"]["components"]["weights"] < weights


def test_names_of_cards() -> None:
    for text in ("h100", "H100", "NVIDIA H100", "h100-80gb", "H100 SXM"):
        assert card_of(text) is CARDS["h100"]
    assert card_of("GeForce RTX 4090") is card_of("4090") is CARDS["rtx-4090"]
    assert card_of("Tesla T4").capability == (7, 5)
    assert card_of("24GB").memory == 24 * 10**9
    assert card_of("1.5GiB").memory == GIB * 3 // 2
    assert all(card_of(name) is card for name, card in CARDS.items())
    with pytest.raises(ArgumentError, match="known are t4, v100-16gb"):
        card_of("zzz")


def test_the_words_of_a_trainer(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    step = Workload.train(2, 64)
    gptq = {"quant_method": "gptq", "bits": 4, "group_size": 128}
    steps: list[tuple[str, Workload, dict[str, Any]]] = [
        ("--bf16", step.replace(autocast="bfloat16"), {}),
        ("--fp16 --accumulation 4", step.replace(autocast="float16", gradient_accumulation_steps=4), {}),
        ("--eval-batch-size 8 --label-smoothing", step.replace(eval_batch_size=8, label_smoothing=True), {}),
        ("--empties-cache", step, {"empties_cache": True}),
        ("--packing --attention eager", step.replace(padding_free=True), {"attn_implementation": "eager"}),
    ]
    for words, workload, options in steps:
        status, found = answer(capsys, folder, "--train", "2x64", *words.split(), "--card", "h100", "--json")
        assert status == 0
        expected = predict_memory(str(folder), workload, capability=(9, 0), **options)
        (row,) = found["rows"]
        for size in ("allocated_peak_bytes", "reserved_peak_bytes"):
            assert row["forecast"][size] == getattr(expected, size), words
    for name, config in (("gptq", gptq), ("awq", {**gptq, "quant_method": "awq"})):
        words = ("--generate", "8", "--quantization", name, "--card", "h100", "--json")
        (row,) = answer(capsys, folder, *words)[1]["rows"]
        expected = predict_memory(str(folder), Workload.generate(1, 8), capability=(9, 0), quantization_config=config)
        assert row["forecast"]["allocated_peak_bytes"] == expected.allocated_peak_bytes
    status, said = answer(capsys, folder, "--generate", "8", "--bf16", "--packing")
    assert status == 2
    assert "--bf16, --packing: has no effect without --train" in said


def test_the_words_of_grpo(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lora = LoraConfig(r=4, target_modules=["q_proj"])
    adapted, with_adapter = {"adapter": lora}, "--lora r=4 targets=q_proj"
    steps: list[tuple[str, dict[str, Any]]] = [
        ("", {}),
        ("--accumulation 2 --num_generations 8", {"gradient_accumulation_steps": 2}),
        ("--steps_per_generation 2 --num-generations 4", {"steps_per_generation": 2, "old_log_probs": True}),
        ("--accumulation 2 --num_iterations 2", {"gradient_accumulation_steps": 2, "old_log_probs": True}),
        ("--beta 0.04", {"reference": "model"}),
        (f"--beta 0.04 {with_adapter}", {"reference": "adapter_off", **adapted}),
        (f"--beta 0.04 --reference model {with_adapter}", {"reference": "model", **adapted}),
        (f"--beta 0.0 --use_vllm --bf16 {with_adapter}", {"old_log_probs": True, "autocast": "bfloat16", **adapted}),
    ]
    for words, fields in steps:
        status, found = answer(capsys, folder, *GRPO, *words.split(), "--card", "h100", "--json")
        assert status == 0
        vllm = {"steps_per_generation": 0} if "vllm" in words else {}
        step = Workload.grpo(4, 16, 32, **fields, **vllm)
        (row,) = found["rows"]
        assert row["forecast"]["workload"] == json.loads(json.dumps(step.facts())), words
    expected = predict_memory(str(folder), step, capability=(9, 0))
    assert row["forecast"]["allocated_peak_bytes"] == expected.allocated_peak_bytes


def test_an_adapter_that_is_named_alone_is_off_in_the_reference(
    tiny_adapter: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, found = answer(capsys, tiny_adapter, *GRPO, "--beta", "0.1", "--card", "h100", "--json")
    assert (status, found["rows"][0]["forecast"]["workload"]["reference"]) == (0, "adapter_off")


def test_a_sweep_of_grpo_leaves_out_sizes_that_trl_refuses(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = (folder, *GRPO, "--num-generations", "4", "--card", "560MiB", "--json", "--sweep")
    status, found = answer(capsys, *words, "batch")
    assert status == 0
    assert [row["batch"] for row in found["rows"]] == [4 << place for place in range(len(found["rows"]))]
    status, found = answer(capsys, *words, "length", "--values", "40,36")
    assert [row["length"] for row in found["rows"]] == [36, 40]


def test_a_name_that_nobody_knows_is_refused_before_the_engines_are_imported() -> None:
    refused = """
import sys
from safe_loading.__main__ import main
for command in ("predict", "plan"):
    assert main([command, "nowhere", "--train", "8", "--quantization", "nf5"]) == 2
assert not {"torch", "transformers"} & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", refused], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("pass one of nf4, fp4, int8, fp8, mxfp4, gptq, awq") == 2
