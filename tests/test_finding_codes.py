"""Every code of a finding is made on purpose and mended: by an example of its page, or by a test that is named here."""

from __future__ import annotations

import ast
from pathlib import Path

import finding_codes as table
import pytest

if not table.DOCS.is_dir():
    pytest.skip("the tests run without the project's docs", allow_module_level=True)

TESTS = Path(__file__).parent
DOCTOR = "commands/test_doctor.py::"
VERSIONS, DEVICES, DISKS = (
    f"{DOCTOR}test_versions_are_judged",
    f"{DOCTOR}test_hidden_devices_and_too_many_ranks_are_told",
    f"{DOCTOR}test_places_are_judged",
)
# What a page cannot show in a few lines: two GPUs, another user or process, other engines or disks, bases in fp8.
MADE_BY_TESTS = {
    "audit.md": {
        "SL116": "memory/test_audit_model.py::test_a_context_elsewhere",
        "SL117": "memory/test_audit_model.py::test_one_unit_of_fsdp",
        "SL124": "memory/test_audit_model.py::test_what_layers_in_8_bits_keep_under_checkpointing",
    },
    "checkpoints.md": {
        "changed": "checkpoint/test_checkpoint_index.py::"
        "test_files_that_changed_since_their_headers_were_read_are_refused",
        "not-a-folder": "checkpoint/test_checkpoint_index.py::"
        "test_folders_that_are_not_there_or_hold_nothing_are_not_found",
        "unreadable": "loading/test_check_checkpoint.py::test_a_folder_that_cannot_be_listed_is_a_finding",
    },
    "loading.md": {
        "current-device": "loading/test_contexts_on_cuda.py::test_the_device_of_a_rank_is_made_current",
        "shared-tensor-differs": "loading/test_methods.py::"
        "test_projections_that_differ_from_the_shared_ones_are_refused",
    },
    "merge_checkpoint.md": dict.fromkeys(
        ("requantised", "update-lost"),
        "merging/test_merge_lora_checkpoint_codes.py::test_an_update_that_rounding_loses_is_told_and_dequantized_it_is_kept",
    ),
    "merging.md": {"update-lost": "merging/test_fp8_merge.py::test_the_report_says_what_rounding_to_codes_lost"},
    "doctor.md": {
        "engine-missing": VERSIONS,
        "engine-too-old": VERSIONS,
        "engine-untested": VERSIONS,
        "engine-known": VERSIONS,
        "engine-broken": f"{DOCTOR}test_a_torch_that_cannot_be_imported_is_told",
        "devices-hidden": DEVICES,
        "too-few-devices": DEVICES,
        "devices-renumbered": f"{DOCTOR}test_renumbered_devices_are_told",
        "stray-context": f"{DOCTOR}test_a_process_on_two_gpus_is_a_stray",
        "no-exchange": DISKS,
        "little-room": DISKS,
        "network-disk": DISKS,
        "small-shared-memory": DISKS,
    },
}
PAGES = [path.name for path in sorted(table.DOCS.glob("*.md")) if table.rows(path.name)]


@pytest.mark.parametrize("page", PAGES)
def test_every_code_is_made_on_its_page_or_by_a_test(page: str) -> None:
    codes = {row.code for row in table.rows(page)}
    by_tests = MADE_BY_TESTS.get(page, {})
    made = codes & table.made(page).keys()
    assert not codes - made - by_tests.keys(), f"make these on purpose, and mend them, at the end of docs/{page}"
    assert not made & by_tests.keys(), "made on the page, so no test needs to be named"
    assert by_tests.keys() <= codes


@pytest.mark.parametrize("page", MADE_BY_TESTS)
def test_the_tests_that_make_a_code_exist_and_name_it(page: str) -> None:
    for code, test in MADE_BY_TESTS[page].items():
        file, _, name = test.partition("::")
        source = (TESTS / file).read_text(encoding="utf-8")
        assert name in {node.name for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)}, test
        assert code in source, test


def test_a_code_that_is_only_in_a_table_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = "| code | severity | what it means | what to do |\n| --- | --- | --- | --- |\n"
    rows += "| `a-made` | error | [this](x.md) | that |\n| `b-not` | info | more | {py:class}`~safe_loading.X` |\n"
    block = '```python\nshow({"a-made": ("do()", "mend()"), "b-not": ("x", "y")})\n```\n\n```text\na-made: said\n```\n'
    (tmp_path / "page.md").write_text(rows + "\n" + block)
    monkeypatch.setattr(table, "DOCS", tmp_path)
    assert table.rows("page.md") == [
        table.Row("a-made", "page.md", "error", "this", "that"),
        table.Row("b-not", "page.md", "info", "more", "`X`"),
    ]
    assert table.made("page.md") == {"a-made": table.Example("do()", "mend()")}


def test_the_command_ships_what_the_pages_say() -> None:
    shipped = table.SHIPPED.read_text(encoding="utf-8")
    assert shipped == table.shipped(), "run python -m tests.finding_codes --write"
