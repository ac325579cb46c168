from __future__ import annotations

import argparse
import json
import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from faults.checkpoints import write_model

from safe_loading import ArgumentError, __version__
from safe_loading import __main__ as command_line
from safe_loading._commands import check
from safe_loading._commands.answer import Answer

SHARDS = {"model-1.safetensors": {"a": 4}, "model-2.safetensors": {"b": 2}}


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "safe_loading", *map(str, arguments)]
    return subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture
def good(tmp_path: Path) -> Path:
    return write_model(tmp_path / "good", SHARDS)


@pytest.fixture
def bad(tmp_path: Path) -> Path:
    folder = write_model(tmp_path / "bad", SHARDS)
    (folder / "model-2.safetensors").unlink()
    return folder


def test_check_of_a_good_folder_says_ok_and_leaves_with_0(good):
    result = run("check", good, "--headers")
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith(f"{good}: model, 2 tensors in 2 files, 6 B (U8 6 B): ok (headers alone)\n")


def test_check_of_a_bad_folder_lists_the_faults_and_leaves_with_1(bad):
    result = run("check", bad)
    assert (result.returncode, result.stderr) == (1, "")
    assert "NOT OK" in result.stdout
    assert "error[missing-shard]" in result.stdout


def test_a_path_that_is_not_there_is_told_on_stderr_with_2(tmp_path):
    result = run("check", tmp_path / "none")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith(f"safe_loading: {tmp_path / 'none'}: there is no such file.")
    assert "Traceback" not in result.stderr


def test_a_folder_that_is_spelt_otherwise_is_named(good, capsys):
    assert command_line.main(["check", str(good.with_name("god"))]) == 2
    said = capsys.readouterr().err
    assert "or copy the file. Did you mean" in said
    assert f"Did you mean '{good}'?" in said


def test_an_option_that_a_command_lacks_is_told_with_that_command_and_the_nearest(good, capsys):
    assert command_line.main(["check", str(good), "--header-only"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("usage: python -m safe_loading check ")
    assert "check: error: unrecognized arguments: --header-only; did you mean --headers?" in said
    assert command_line.main(["check", str(good), "--colour"]) == 2
    assert capsys.readouterr().err.endswith("unrecognized arguments: --colour\n")
    assert command_line.main(["--colour"]) == 2
    assert "safe_loading: error: unrecognized arguments: --colour" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("--batch 4 --length 1024", "--train ROWSxTOKENS"),
        ("--per_device_train_batch_size=4 --max_seq_length=1024", "--train ROWSxTOKENS"),
        ("--gradient_accumulation_steps 4 --lora_r 8", "--accumulation N and --lora r=16 alpha=32"),
        ("--load_in_4bit --num_processes 2", "--quantization NAME and --gpus N"),
        ("--torch_dtype float16", "--dtype bfloat16"),
        ("--bs 4 --block_size 512", "--train ROWSxTOKENS"),
        ("--per_device_eval_batch_size 4", "--eval-batch-size ROWS"),
        ("--label_smoothing_factor 0.1", "--label-smoothing"),
        ("--grad_accum_steps 4 --rank 8 --qlora", "--accumulation N and --lora r=16 alpha=32 and --quantization NAME"),
    ],
)
def test_options_of_trainers_are_told_by_those_that_say_the_same(good, capsys, typed, meant):
    assert command_line.main(["predict", str(good), *typed.split()]) == 2
    assert capsys.readouterr().err.endswith(f"; did you mean {meant}?\n")


def test_json_is_one_object(good, bad, capsys):
    assert command_line.main(["check", str(good), "--json", "--headers"]) == 0
    assert json.loads(capsys.readouterr().out)["ok"] is True
    assert command_line.main(["check", "--json", str(bad)]) == 1
    assert json.loads(capsys.readouterr().out)["findings"][0]["code"] == "missing-shard"


@pytest.mark.parametrize("arguments", [["check"], ["check", "a", "b"], ["no-such-command"], ["--no-such-option"]])
def test_wrong_usage_is_told_on_stderr_with_2(arguments, capsys):
    assert command_line.main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "usage:" in captured.err


def test_without_a_command_help_is_printed(capsys):
    assert command_line.main([]) == 0
    out = capsys.readouterr().out
    assert "python -m safe_loading" in out
    assert "check" in out


def test_help_and_version_leave_with_0(capsys):
    assert command_line.main(["--help"]) == 0
    assert command_line.main(["check", "--help"]) == 0
    assert command_line.main(["--version"]) == 0
    assert __version__ in capsys.readouterr().out


@pytest.mark.parametrize(
    "command", ["demo", "check", "merge", "verify", "audit", "predict", "doctor", "plan", "explain"]
)
def test_the_help_of_a_command_ends_with_a_line_that_it_takes(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert command_line.main([command, "--help"]) == 0
    start, words = capsys.readouterr().out.rstrip().splitlines()[-1].split("python -m safe_loading ")
    assert start == "example: "
    assert command_line._parsers()[0].parse_args(words.split()).run is not None
    assert words.split()[0] == command


def test_an_error_of_the_package_is_a_message_and_no_traceback(monkeypatch, capsys):
    def fail(_):
        raise ArgumentError("this is wrong")

    monkeypatch.setattr(check, "_run", fail)
    assert command_line.main(["check", "x"]) == 2
    assert capsys.readouterr().err == "safe_loading: this is wrong\n"
    assert command_line.main(["check", "x", "--json"]) == 2
    shown = capsys.readouterr()
    assert json.loads(shown.out) == {"schema": 1, "error": "ArgumentError", "message": "this is wrong", "problems": []}
    assert shown.err == "safe_loading: this is wrong\n"


def test_json_says_its_schema_and_every_command_has_it(good, capsys):
    for words in (["check", "--headers", str(good)], ["explain", "truncated"], ["doctor"]):
        command_line.main([*words, "--json"])
        assert next(iter(json.loads(capsys.readouterr().out).items())) == ("schema", 1), words
    commands = command_line._parsers()[0]._subparsers._group_actions[0].choices
    assert {name for name, command in commands.items() if "--json" not in command.format_help()} == {"demo"}


def test_help_has_the_table_of_exit_codes(capsys):
    command_line.main(["--help"])
    shown = capsys.readouterr().out
    assert "3    it does not fit" in shown
    page = Path(__file__).parents[2] / "docs" / "checkpoints.md"
    if not page.exists():
        pytest.skip("the tests are away from their tree")
    table = page.read_text()
    assert [code for code in ("0", "1", "2", "3", "130") if f"\n| {code} |" not in table] == []


def test_a_merge_without_a_terminal_says_how_far_it_is(tmp_path, tiny_llama, tiny_adapter, monkeypatch, capsys):
    monkeypatch.setattr("safe_loading._core.progress._LINE_SECONDS", 0.0)
    words = ["merge", str(tiny_llama), str(tiny_adapter)]

    def said(*more: str) -> str:
        assert command_line.main([*words, str(tmp_path / f"out{len(list(tmp_path.iterdir()))}"), *more]) == 0
        return capsys.readouterr().err

    lines = said().splitlines()
    assert all(re.fullmatch(r"merging: .* of .* \(\d+%\) after \d+ s", line) for line in lines)
    assert len(lines) > 1
    assert said("-q") == ""
    assert "MergeReport" not in "".join(lines)
    assert len(said("-v").splitlines()) > len(lines)
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    assert said() == ""


def test_a_demo_goes_into_a_new_folder_only(tmp_path, capsys):
    (tmp_path / "file").write_text("mine")
    for folder, says in ((tmp_path, "is not empty"), (tmp_path / "file", "cannot be written")):
        assert command_line.main(["demo", "--folder", str(folder)]) == 1
        assert says in capsys.readouterr().err


def test_a_reader_that_stops_early_is_no_traceback(good):
    reading, writing = os.pipe()
    os.close(reading)
    words = [sys.executable, "-m", "safe_loading", "check", "--headers", str(good)]
    result = subprocess.run(words, stdout=writing, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    os.close(writing)
    assert result.stderr == ""


def test_check_answers_without_torch_numpy_or_any_other_package(good):
    code = (
        "import sys; before = set(sys.modules); from safe_loading.__main__ import main; "
        f"status = main(['check', '--headers', {str(good)!r}]); "
        "new = {name.partition('.')[0] for name in set(sys.modules) - before}; "
        "print(status, sorted(new - sys.stdlib_module_names))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.splitlines()[-1] == "0 ['safe_loading']"


def test_the_shell_completes_commands_and_options(tmp_path):
    pytest.importorskip("argcomplete")
    for line, wanted in (("safe-loading do", "doctor "), ("safe-loading plan --max", "--max-memory ")):
        answer = tmp_path / "answer"
        asked = {"_ARGCOMPLETE": "1", "_ARGCOMPLETE_STDOUT_FILENAME": str(answer), "COMP_LINE": line}
        environment = {**os.environ, **asked, "COMP_POINT": str(len(line)), "COMP_TYPE": "9"}
        command = [sys.executable, "-c", "import safe_loading.__main__ as m; m.main()"]
        subprocess.run(command, env=environment, timeout=60, check=True)
        assert answer.read_text() == wanted


def test_no_command_passes_on_the_notice_of_a_kernel(good, monkeypatch, caplog):
    def run_with_notices(arguments: argparse.Namespace) -> Answer:
        engine = logging.getLogger("bitsandbytes.backends.cpu.ops")
        engine.warning("Failed to load CPU gemm_4bit_forward from kernels-community: %s.", "no kernels")
        engine.warning("another warning")
        return Answer([])

    monkeypatch.setattr(check, "_run", run_with_notices)
    assert command_line.main(["check", str(good)]) == 0
    assert [record.getMessage() for record in caplog.records] == ["another warning"]
    run_with_notices(argparse.Namespace())  # left to others as it was
    assert len(caplog.records) == 3
