"""Options of a merge on disk: weights of adapters, tokenizers, classes, pickles; what is refused says what works."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from faults.adapters import edited, trained_further
from models import Made, save_adapter, save_llama, save_tokenizer, tokenizer
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file
from test_merge_lora_checkpoint import TOKENS, loaded, on_disk
from transformers import AutoModelForCausalLM, AutoTokenizer

from safe_loading import (
    AdapterError,
    ArgumentError,
    CheckpointError,
    MergeError,
    PickleRefused,
    load_peft_on_rank,
    merge_lora_checkpoint,
)
from safe_loading import __main__ as command_line
from safe_loading._checkpoint.hub import http_error
from safe_loading._commands import merge as command


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("base"))


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=TOKENS).logits


def findings(report: Any) -> list[str]:
    return [finding.code for finding in report.findings]


# ----------------------------------------------------------------------------------------------------------- weights


def test_weights_multiply_what_adapters_add_as_set_scale_of_peft_does(tmp_path: Path, base: Path) -> None:
    one = save_adapter(tmp_path / "one", base, target_modules="all-linear")
    two = save_adapter(tmp_path / "two", base, seed=1, r=2)
    report = merge_lora_checkpoint(base, [one, two], tmp_path / "out", adapter_weights=[0.7, -2])
    assert report.weights == (0.7, -2.0)
    noted = json.loads((tmp_path / "out" / "merge_report.json").read_text())["adapters"]
    assert [adapter["weight"] for adapter in noted] == [0.7, -2.0]
    model = load_peft_on_rank(base, {"one": one, "two": two})
    model.base_model.set_adapter(["one", "two"])
    for module in model.modules():
        if isinstance(module, LoraLayer):
            for name, weight in (("one", 0.7), ("two", -2)):
                module.set_scale(name, weight)
    assert torch.allclose(logits(loaded(tmp_path / "out")), logits(model), atol=1e-5)


@pytest.mark.parametrize(
    "config", [{"use_dora": True}, {"modules_to_save": ["lm_head"]}, {"init_lora_weights": "pissa"}]
)
def test_what_cannot_be_multiplied_is_refused(tmp_path: Path, base: Path, made: Made, config: dict[str, Any]) -> None:
    adapter = made.adapter(base, **config)
    with pytest.raises(MergeError, match=r"its weight is 0\.5, and .* cannot be multiplied.*Give it the weight 1"):
        merge_lora_checkpoint(base, adapter, tmp_path / "out", adapter_weights=[0.5])
    merge_lora_checkpoint(base, adapter, tmp_path / "out", adapter_weights=[1])


@pytest.mark.parametrize("weights", [0.5, [], [1, 2], ["1"], [float("nan")], [True], "1"])
def test_weights_that_are_none_are_refused(tmp_path: Path, base: Path, made: Made, weights: Any) -> None:
    with pytest.raises(ArgumentError, match="adapter_weights="):
        merge_lora_checkpoint(base, made.adapter(base), tmp_path / "out", adapter_weights=weights)


def test_the_same_adapter_twice_is_refused_and_the_weight_that_is_advised_doubles_it(
    tmp_path: Path, base: Path, made: Made
) -> None:
    adapter = made.adapter(base)
    shutil.copytree(adapter, tmp_path / "copy")
    for other in (adapter, tmp_path / "copy"):
        with pytest.raises(ArgumentError, match=r"are the same adapter.*adapter_weights=\[2\.0\]"):
            merge_lora_checkpoint(base, [adapter, other], tmp_path / "out")
    merge_lora_checkpoint(base, adapter, tmp_path / "out", adapter_weights=[2.0])
    before, after = on_disk(base), on_disk(tmp_path / "out")
    factors = load_file(adapter / "adapter_model.safetensors")
    name = "model.layers.0.self_attn.q_proj"
    a, b = (factors[f"base_model.model.{name}.lora_{x}.weight"].double() for x in "AB")
    assert torch.equal(after[f"{name}.weight"], (before[f"{name}.weight"].double() + 2 * 2 * b @ a).float())


# --------------------------------------------------------------------------------------------- what stands elsewhere


def test_folders_in_each_others_place_are_named(tmp_path: Path, base: Path, made: Made) -> None:
    adapter = made.adapter(base)
    order = re.escape("The order is base, adapter, output")
    with pytest.raises(ArgumentError, match=rf"(?s){order}.*{adapter.name}', holds an adapter"):
        merge_lora_checkpoint(adapter, adapter, tmp_path / "out")
    for given in ((base, base), (base, [adapter, base])):
        with pytest.raises(ArgumentError, match=rf"{order}(?s:.*)holds a model"):
            merge_lora_checkpoint(*given, tmp_path / "out")
    merge_lora_checkpoint(base, adapter, tmp_path / "out")


def test_the_class_that_the_error_asks_for_can_be_passed(tmp_path: Path, base: Path, made: Made) -> None:
    shutil.copytree(base, tmp_path / "base")
    path = tmp_path / "base" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "architectures": ["Unknown"]}))
    adapter = made.adapter(base, task_type=None)
    config = adapter / "adapter_config.json"
    unknown = Path(shutil.copytree(adapter, tmp_path / "adapter")) / config.name
    unknown.write_text(json.dumps({**json.loads(config.read_text()), "auto_mapping": None}))
    with pytest.raises(AdapterError, match=r"Pass auto_class=, such as transformers\.AutoModelForCausalLM"):
        merge_lora_checkpoint(tmp_path / "base", unknown.parent, tmp_path / "out")
    for number, given in enumerate((AutoModelForCausalLM, "AutoModelForCausalLM")):
        report = merge_lora_checkpoint(tmp_path / "base", unknown.parent, tmp_path / str(number), auto_class=given)
        assert report.of("merged")
    with pytest.raises(ArgumentError, match="auto_class='LlamaModels'"):
        merge_lora_checkpoint(base, adapter, tmp_path / "out", auto_class="LlamaModels")
    with pytest.raises(ArgumentError, match="use auto_class="):
        merge_lora_checkpoint(base, adapter, tmp_path / "out", base_kwargs={"auto_class": AutoModelForCausalLM})


def test_a_pickled_adapter_is_read_when_the_argument_of_the_error_is_passed(
    tmp_path: Path, base: Path, made: Made
) -> None:
    adapter = made.adapter(base)
    shutil.copytree(adapter, tmp_path / "adapter")
    weights = tmp_path / "adapter" / "adapter_model.safetensors"
    torch.save(load_file(weights), weights.with_suffix(".bin"))
    weights.unlink()
    with pytest.raises(PickleRefused, match="or pass allow_pickle=True"):
        merge_lora_checkpoint(base, tmp_path / "adapter", tmp_path / "out")
    merge_lora_checkpoint(base, tmp_path / "adapter", tmp_path / "out", allow_pickle=True)
    merge_lora_checkpoint(base, adapter, tmp_path / "other")
    found, expected = on_disk(tmp_path / "out"), on_disk(tmp_path / "other")
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())


def test_the_dtype_that_the_error_asks_for_makes_the_merge_possible(tmp_path: Path) -> None:
    base = save_llama(tmp_path / "base", torch.bfloat16)
    saved = save_adapter(tmp_path / "saved", base, target_modules=["embed_tokens"])
    adapter = edited(saved, tmp_path / "adapter", tensors=trained_further("embed_tokens.base_layer"))
    with pytest.raises(AdapterError, match=r"load the base with dtype=torch\.float32"):
        merge_lora_checkpoint(base, adapter, tmp_path / "out")
    merge_lora_checkpoint(base, adapter, tmp_path / "out", dtype=torch.float32)
    theirs = load_peft_on_rank(base, adapter, dtype=torch.float32)
    assert torch.allclose(logits(loaded(tmp_path / "out")), logits(theirs), atol=1e-5)


# --------------------------------------------------------------------------------------------------------- tokenizer


def with_tokenizer(folder: Path, *, template: str | None = None, word: str | None = None, **config: Any) -> Path:
    """Save the tokenizer of the tests beside a model, with another template, a word or entries of its config."""
    own = tokenizer()
    if template is not None:
        own.chat_template = template
    if word is not None:
        own.add_special_tokens({"additional_special_tokens": [word]})
    own.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **config}))
    return folder


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    save_llama(tmp_path / "base", vocab_size=102)  # a row for one word more than the tokenizer has
    save_adapter(tmp_path / "adapter", tmp_path / "base")
    return with_tokenizer(tmp_path / "base", template="base"), tmp_path / "adapter"


@pytest.mark.parametrize(("choice", "wins"), [(None, True), ("adapter", True), ("base", False)])
def test_a_trained_tokenizer_wins_unless_the_base_is_chosen(
    tmp_path: Path, pair: tuple[Path, Path], choice: Any, wins: bool
) -> None:
    with_tokenizer(pair[1], template="trained", word="<tool>")
    report = merge_lora_checkpoint(*pair, tmp_path / "out", tokenizer=choice)
    found = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert found.chat_template == ("trained" if wins else "base")
    assert ("<tool>" in found.get_vocab()) == wins
    assert findings(report) == ["tokenizer-of-adapter" if wins else "tokenizer-of-base"]


def test_a_trained_tokenizer_with_words_beyond_the_rows_is_refused(tmp_path: Path) -> None:
    base = save_llama(tmp_path / "base", vocab_size=101)
    adapter = save_adapter(tmp_path / "adapter", base)
    with_tokenizer(base, template="base")
    with_tokenizer(adapter, template="trained", word="<tool>")
    said = r"'<tool>' with the id 101, and the embeddings of the output have 101 rows.*Pass tokenizer='base'; or save"
    with pytest.raises(AdapterError, match=said):
        merge_lora_checkpoint(base, adapter, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    merge_lora_checkpoint(base, adapter, tmp_path / "out", tokenizer="base")
    model = AutoModelForCausalLM.from_pretrained(base)
    model.resize_token_embeddings(102)
    model.save_pretrained(tmp_path / "larger")
    saved = {"modules_to_save": ["embed_tokens", "lm_head"]}
    again = save_adapter(tmp_path / "again", tmp_path / "larger", **saved)
    with_tokenizer(again, template="trained", word="<tool>")
    merge_lora_checkpoint(base, again, tmp_path / "resized")
    found = AutoTokenizer.from_pretrained(tmp_path / "resized")
    assert len(found) == 102 == len(loaded(tmp_path / "resized").get_input_embeddings().weight)
    # words that the base has without rows, too, as Gemma 3 1B is published, are nothing of the adapter's
    with_tokenizer(base, template="base", word="<tool>")
    merge_lora_checkpoint(base, adapter, tmp_path / "alike")


@pytest.mark.parametrize(("choice", "wins"), [(None, True), ("base", False)])
def test_an_adapter_s_config_of_its_processor_is_taken_or_told(
    tmp_path: Path, pair: tuple[Path, Path], choice: Any, wins: bool
) -> None:
    with_tokenizer(pair[1], template="base")
    for folder, size in zip(pair, (224, 336), strict=True):
        (folder / "preprocessor_config.json").write_text(json.dumps({"size": size}))
        (folder / "processor_config.json").write_text(json.dumps({"processor_class": "LlavaProcessor"}))
    report = merge_lora_checkpoint(*pair, tmp_path / "out", tokenizer=choice)
    assert json.loads((tmp_path / "out" / "preprocessor_config.json").read_text())["size"] == (336 if wins else 224)
    (finding,) = report.findings
    assert finding.code == ("tokenizer-of-adapter" if wins else "tokenizer-of-base")
    assert "preprocessor_config.json" in finding.message
    assert " processor_config.json" not in finding.message  # the same in both
    assert (tmp_path / "out" / "tokenizer.json").is_file()


@pytest.mark.parametrize("name", ["../../escaped", "/tmp/x", "a/b", "..\\x", None])
@pytest.mark.parametrize("of_base", [True, False])
def test_a_chat_template_named_by_a_path_is_refused(
    tmp_path: Path, pair: tuple[Path, Path], name: object, of_base: bool
) -> None:
    named = [{"name": "default", "template": "fine"}, {"name": name, "template": "x"}]
    with_tokenizer(pair[0 if of_base else 1], chat_template=named)
    with pytest.raises(CheckpointError, match=r"a chat template is named .* which is a path"):
        merge_lora_checkpoint(*pair, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with_tokenizer(pair[0 if of_base else 1], chat_template=[{**each, "name": "tool_use"} for each in named])
    merge_lora_checkpoint(*pair, tmp_path / "out")


def test_what_training_left_in_a_base_stays_there(tmp_path: Path, pair: tuple[Path, Path]) -> None:
    left = ["trainer_state.json", "training_args.bin", "optimizer.pt", "scheduler.pt", "rng_state_0.pth", "latest"]
    left += ["all_results.json", "train_results.json", "trainer_log.jsonl", "zero_to_fp32.py", "training_loss.png"]
    left += ["global_step12/mp_rank_00_model_states.pt", "runs/one/events.out.tfevents.1", "checkpoint-5/config.json"]
    for name in left:
        (pair[0] / name).parent.mkdir(parents=True, exist_ok=True)
        (pair[0] / name).write_text("{}")
    (pair[0] / "LICENSE").write_text("mine")
    report = merge_lora_checkpoint(*pair, tmp_path / "out")
    assert set(report.left_out) >= set(left)
    names = {path.relative_to(tmp_path / "out").as_posix() for path in (tmp_path / "out").rglob("*")}
    assert names.isdisjoint(left)
    assert "LICENSE" in names


def test_a_tokenizer_that_differs_only_in_where_it_lay_is_the_base_s(tmp_path: Path, pair: tuple[Path, Path]) -> None:
    with_tokenizer(pair[1], template="base", is_local=True, name_or_path="somewhere")
    report = merge_lora_checkpoint(*pair, tmp_path / "out")
    assert findings(report) == []
    names = ("tokenizer_config.json", "tokenizer.json", "chat_template.jinja")
    assert all((tmp_path / "out" / name).read_bytes() == (pair[0] / name).read_bytes() for name in names)


@pytest.mark.parametrize("name", ["chat_template.jinja", "tokenizer_config.json"])
def test_what_the_adapter_s_tokenizer_lacks_stays_the_base_s(
    tmp_path: Path, pair: tuple[Path, Path], name: str
) -> None:
    with_tokenizer(pair[1], template="trained", model_max_length=77)
    for path in [p for p in pair[1].iterdir() if p.name.startswith(("token", "chat", "special")) and p.name != name]:
        path.unlink()
    merge_lora_checkpoint(*pair, tmp_path / "out")
    found = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert found.get_vocab() == AutoTokenizer.from_pretrained(pair[0]).get_vocab()
    assert found.chat_template == ("trained" if name == "chat_template.jinja" else "base")
    assert (found.model_max_length == 77) == (name == "tokenizer_config.json")


def test_a_tokenizer_of_an_adapter_that_has_none_is_refused(tmp_path: Path, pair: tuple[Path, Path]) -> None:
    with pytest.raises(ArgumentError, match='tokenizer="adapter": no adapter brings a tokenizer'):
        merge_lora_checkpoint(*pair, tmp_path / "out", tokenizer="adapter")
    with pytest.raises(ArgumentError, match="tokenizer='mine': pass"):
        merge_lora_checkpoint(*pair, tmp_path / "out", tokenizer="mine")  # type: ignore[arg-type]


# -------------------------------------------------------------------------------------------------- the command line


def test_the_command_takes_weights_tokenizer_class_and_pickles(
    tmp_path: Path, pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    save_tokenizer(pair[1])
    words = [str(pair[0]), f"{pair[1]}=0.5", str(tmp_path / "out"), "--tokenizer", "base", "--allow-pickle"]
    assert command_line.main(["merge", *words, "--auto-class", "AutoModelForCausalLM", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["weights"] == [0.5]
    merge_lora_checkpoint(*pair, tmp_path / "other", adapter_weights=[0.5])
    expected = on_disk(tmp_path / "other")
    assert all(torch.equal(tensor, expected[name]) for name, tensor in on_disk(tmp_path / "out").items())


@pytest.mark.parametrize(
    ("word", "found"),
    [("a=0.7", ("a", 0.7)), ("a=-1", ("a", -1.0)), ("a=b", ("a=b", 1.0)), ("a", ("a", 1.0)), ("=2", ("=2", 1.0))],
)
def test_a_weight_follows_the_adapter(word: str, found: tuple[str, float]) -> None:
    assert command.adapter_and_weight(word) == found


def test_a_folder_whose_name_ends_like_a_weight_is_a_folder(tmp_path: Path) -> None:
    (tmp_path / "lr=2").mkdir()
    assert command.adapter_and_weight(str(tmp_path / "lr=2")) == (str(tmp_path / "lr=2"), 1.0)


class Hub:
    """Stands for the hub, to which a test cannot write."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, object]] = []
        self.error: Exception | None = None

    def create_repo(self, repo: str, *, private: bool | None, exist_ok: bool) -> None:
        self.calls.append((repo, private))

    def upload_folder(self, *, repo_id: str, folder_path: str, commit_message: str) -> Any:
        self.calls.append((repo_id, folder_path))
        if self.error is not None:
            raise self.error
        return type("Commit", (), {"commit_url": "https://hub/commit"})


def test_the_output_is_uploaded_when_it_is_whole(
    tmp_path: Path, pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = Hub()
    monkeypatch.setattr("huggingface_hub.HfApi", lambda: hub)
    words = ["merge", *map(str, pair), str(tmp_path / "out"), "--push-to-hub", "me/merged", "--private"]
    assert command_line.main(words) == 0
    assert hub.calls == [("me/merged", True), ("me/merged", str(tmp_path / "out"))]
    assert capsys.readouterr().out.endswith("uploaded: https://hub/commit\n")
    for error in (OSError("no route"), http_error()("no route")):  # no network is the latter, of the HTTP client
        hub.error = error
        assert command_line.main([*words, "--overwrite"]) == 1
        said = capsys.readouterr()
        assert "merged" in said.out  # the report comes first
        assert "is whole, but its upload to 'me/merged' failed: no route" in said.err


def test_ctrl_c_is_one_line_that_says_what_is_kept(
    tmp_path: Path, pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*arguments: object) -> None:
        raise KeyboardInterrupt

    words = ["merge", *map(str, pair), str(tmp_path / "out")]
    monkeypatch.setattr("safe_loading._merging.merge_lora_checkpoint.report_file", stop)
    assert command_line.main(words) == 130
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("safe_loading: interrupted: 7 finished file(s)")
    assert said.endswith("the same call again goes on from there")
    monkeypatch.undo()
    assert command_line.main(words) == 0
    assert "7 file(s) of an interrupted call were verified and kept" in capsys.readouterr().out
