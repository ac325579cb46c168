"""A finding as a line of a report and of an exception, and numbers with their nouns."""

from __future__ import annotations

import pytest

from safe_loading._core.report import Finding, counted


def test_a_problem_ends_with_the_command_that_says_more() -> None:
    finding = Finding("truncated", "error", "a.safetensors", "is cut short.", "download it again.")
    assert str(finding) == "a.safetensors: is cut short. Fix: download it again."
    assert finding.problem == f"{finding} (safe-loading explain truncated)"
    command = Finding("pickle-only", "error", "a.bin", "is a pickle.", "convert it once:\npython -c ...")
    assert command.problem == f"{command}\n(safe-loading explain pickle-only)", "the command is a line of its own"


@pytest.mark.parametrize(
    ("count", "words", "text"),
    [
        (0, ("tensor",), "0 tensors"),
        (1, ("tensor",), "1 tensor"),
        (2, ("tensor",), "2 tensors"),
        (1, ("tensor is", "tensors are"), "1 tensor is"),
        (3, ("tensor is", "tensors are"), "3 tensors are"),
    ],
)
def test_a_number_has_its_noun(count: int, words: tuple[str, ...], text: str) -> None:
    assert counted(count, *words) == text
