"""Words of others in reports, errors and commands: bounded, printable, and no command of a terminal or a CI runner."""

from __future__ import annotations

import json
import logging
import unicodedata
from typing import Any

import pytest
import torch
from torch import nn

from safe_loading import ArgumentError, Workload, audit_model, meta_model, predict_memory
from safe_loading.__main__ import main
from safe_loading._core.bars import MemoryBar, Segment, draw_bars
from safe_loading._core.log import logger
from safe_loading._core.report import Finding, findings_html, html_table, text_table
from safe_loading.errors import SafeLoadingError, printable

HOSTILE = "a\x1b[31m\x00\r\n::error file=x::owned\n##[error]x\n  ::set-output\u202e\ud800\x9b2J\x7f\u2028b"


def is_harmless(text: str) -> bool:
    text.encode()
    lines = text.split("\n")
    kinds = {unicodedata.category(character) for line in lines for character in line if character != "\t"}
    return not kinds & {"Cc", "Cf", "Cs", "Zl", "Zp"} and not any(
        line.lstrip().startswith(("::", "##[")) for line in lines
    )


def test_it_is_shown_as_python_writes_it() -> None:
    lines = [r"a\x1b[31m\x00\r", r"\x3a:error file=x::owned", r"\x23#[error]x", r"  \x3a:set-output\u202e\ud800\x9b2J"]
    assert printable(HOSTILE) == "\n".join(lines) + r"\x7f\u2028b"
    assert "\n" not in printable(HOSTILE, lines=False)
    assert is_harmless(printable(HOSTILE))
    assert not any(map(is_harmless, ("\x1b", "a\n ::error::", "\u202e", "\u2028", "\r")))
    assert printable("::error::x") == r"\x3a:error::x"


@pytest.mark.parametrize("text", ["layers.0.mlp", "Größe 層 🙂\tx\ny", "a::b", "# heading", "%", ""])
def test_what_can_be_printed_stays(text: str) -> None:
    assert printable(text) == text


def test_the_middle_of_what_is_too_long_is_left_out() -> None:
    shown = printable("first" + "x" * 10**6 + "the fix")
    assert len(shown) < 4100
    assert shown.startswith("first")
    assert shown.endswith("the fix")
    assert "996012 characters left out" in shown


def test_errors_findings_and_tables() -> None:
    error = SafeLoadingError(f"here: {HOSTILE}", [HOSTILE, "y" * 10**5])
    finding = Finding("code", "error", HOSTILE, HOSTILE, "do\nthis")
    assert is_harmless(str(error))
    assert len(str(error)) < 10_000
    assert str(finding).count("\n") == 1  # of the fix
    svg = draw_bars([MemoryBar(HOSTILE, [Segment("weights", 5)], contents=HOSTILE)])
    shown = [str(finding), finding.problem, text_table(["name"], [[HOSTILE]]), html_table(["name"], [[HOSTILE]]), svg]
    assert all(map(is_harmless, [*shown, findings_html([finding])]))


def test_log_records(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "safe_loading"):
        logger.info("of %s", HOSTILE)
    assert is_harmless(caplog.messages[0])


class Wrapper(nn.Module):
    """A wrapper that drops gradients, so that the audit has something to say, around a child of a hostile name."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.add_module(HOSTILE.replace(".", ""), inner)

    def forward(self, input_ids: torch.Tensor, **others: Any) -> Any:
        return next(self.children())(input_ids, **others)


def test_the_text_of_an_audit_and_a_forecast_and_their_annotations() -> None:
    from models import SIZES
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = dict(SIZES)
    model = Wrapper(LlamaForCausalLM(LlamaConfig(**sizes)))
    report = audit_model(model, Workload.train(1, 8))
    forecast = predict_memory(model, Workload.train(1, 8))
    assert any("31m" in str(each) for each in (report, forecast))
    for text in (str(report), report._repr_html_(), str(forecast), forecast._repr_html_(), report.to_json()):
        assert is_harmless(text)
    findings = tuple(Finding("SL101", "error", HOSTILE, f"50 %, {HOSTILE}", "do: a, b") for _ in range(2))
    lines = type(report)("m", findings, (), (), {}, None).to_github().split("\n")
    assert len(lines) == 2
    assert all(line.startswith("::error title=SL101 a\\x1b") and line.endswith("Fix: do: a, b") for line in lines)
    assert all("\r" not in line and "50 %25, a" in line and "%0A" in line for line in lines)
    properties = lines[0].split("::")[1]
    assert ":" not in properties.replace("error title=", "")
    json.loads(type(report)("m", findings, (), (), {}, None).to_sarif().encode())


def test_a_config_of_a_hundred_thousand_architectures_is_refused_in_few_words() -> None:
    from transformers import PreTrainedConfig

    config = PreTrainedConfig(architectures=[f"Name{number}" for number in range(10**5)])
    with pytest.raises(ArgumentError, match="Pass auto_class=") as caught:
        meta_model(config)
    assert len(str(caught.value)) < 5000


def test_a_command_that_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", HOSTILE.replace("\x00", "")]) != 0
    assert is_harmless(capsys.readouterr().err)
