from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from faults import adapters as faults

from safe_loading import AdapterError, load_peft_on_rank


@pytest.mark.parametrize(
    "fields",
    [
        {"hyper_lora": None},
        {"hyper_group_size": 16, "use_hyper": False},
        {"hyper_dropout": 0.1},
        {"init_hyper_weights": True},
        {"enable_lora": None, "merge_weights": True},
        {"swift_type": "LORA", "lorap_lr_ratio": 16.0, "lorap_emb_lr": 1e-06, "lora_dtype": None, "use_qa_lora": False},
        {"lora_dtype": "AUTO"},
        {"lora_dtype": "bf16"},
    ],
    ids=["empty", "switched off", "dropout", "start", "peft 0.2", "ms-swift", "its default dtype", "its dtype"],
)
def test_a_field_of_a_newer_peft_that_changes_nothing_is_told(
    tmp_path: Path, tiny_llama: Path, tiny_adapter: Path, fields: dict[str, Any]
) -> None:
    newer = faults.edited(tiny_adapter, tmp_path / "newer", config=lambda c: c.update(fields))
    findings = load_peft_on_rank(newer, tiny_llama).load_report.findings
    assert {(finding.code, finding.severity) for finding in findings} == {("config-unknown-field", "info")}
    assert all("which changes nothing" in finding.message for finding in findings)


@pytest.mark.parametrize(
    "fields",
    [
        {"hyper_group_size": 16, "use_hyper": True},
        {"hyper_group_size": 16},
        {"init_hyper_weights": "pissa"},
        {"enable_lora": [True, False, True]},
        {"swift_type": "LONGLORA"},
    ],
    ids=str,
)
def test_a_field_of_a_newer_peft_that_may_change_something_is_refused(
    tmp_path: Path, tiny_llama: Path, tiny_adapter: Path, fields: dict[str, Any]
) -> None:
    newer = faults.edited(tiny_adapter, tmp_path / "newer", config=lambda c: c.update(fields))
    with pytest.raises(AdapterError, match=next(iter(fields))):
        load_peft_on_rank(newer, tiny_llama)


def test_a_newer_dropout_counts_in_training(tmp_path: Path, tiny_llama: Path, tiny_adapter: Path) -> None:
    newer = faults.edited(tiny_adapter, tmp_path / "newer", config=lambda c: c.update(hyper_dropout=0.1))
    with pytest.raises(AdapterError, match="hyper_dropout"):
        load_peft_on_rank(newer, tiny_llama, is_trainable=True)
