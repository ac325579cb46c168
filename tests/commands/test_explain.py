"""``explain``: what a code means, an example and the fix, without a network."""

from __future__ import annotations

import pytest

import safe_loading
from safe_loading import ArgumentError
from safe_loading import __main__ as command_line
from safe_loading._commands.explain import explain


def test_a_code_is_explained_with_the_lines_that_make_it_and_that_end_it() -> None:
    text = explain("SL103")
    assert text.startswith("SL103\n")
    assert "base.model.norm.requires_grad_(True)" in text
    assert "base.model.norm.requires_grad_(False)" in text
    assert text.endswith("in the repository: docs/audit.md")


@pytest.mark.parametrize("asked", ["truncated", "Truncated", "[truncated]", "error-of-truncated"])
def test_a_code_is_found_as_people_copy_it(asked: str) -> None:
    if asked.startswith("error"):
        with pytest.raises(ArgumentError, match=r"The nearest are .*truncated"):
            explain(asked)
    else:
        assert explain(asked).startswith("truncated (error)\n")


def test_a_code_of_two_pages_has_both() -> None:
    text = explain("no-longer-tied")
    assert "docs/merging.md" in text
    assert "docs/merge_checkpoint.md" in text


def test_every_exception_is_explained() -> None:
    for name in safe_loading.__all__:
        value = getattr(safe_loading, name)
        if isinstance(value, type) and issubclass(value, Exception):
            text = explain(name)
            assert text.startswith(name)
            assert "```" not in text  # a page's fences are no use in a terminal


def test_the_command_prints_one_or_all_and_refuses_what_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.main(["explain", "launcher", "adapter-dtype"]) == 0
    said = capsys.readouterr().out
    assert said.index("launcher (error)") < said.index("adapter-dtype (error)")
    assert command_line.main(["explain"]) == 0
    assert "SL120" in capsys.readouterr().out
    assert command_line.main(["explain", "trunkated"]) == 2
    assert "The nearest are truncated" in capsys.readouterr().err
