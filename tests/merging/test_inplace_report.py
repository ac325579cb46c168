"""The report of a merge in memory: a line for the same weight of all layers, and each weight in JSON."""

from __future__ import annotations

import json

from safe_loading import InplaceMergeReport
from safe_loading._merging.report import MergedWeight


def weight(name: str, rms: float | None, method: str = "blocks") -> MergedWeight:
    return MergedWeight(name, "Linear", "bfloat16", ("default",), method, 1024, rms)


def test_the_same_weight_of_all_layers_has_one_line_and_json_has_each() -> None:
    weights = [weight(f"model.layers.{layer}.mlp.{part}.weight", layer / 8) for layer in (1, 2, 3) for part in "ab"]
    weights += [weight("model.layers.4.mlp.a.weight", None, "peft"), weight("lm_head.weight", 0.5)]
    report = InplaceMergeReport(("default",), tuple(weights), 0.0, True)
    table = [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in str(report).splitlines()[4:]]
    assert table == [
        ["model.layers.*.mlp.a.weight", "3", "Linear", "bfloat16", "default", "blocks", "3.0 KiB", "0.125 to 0.375"],
        ["model.layers.*.mlp.b.weight", "3", "Linear", "bfloat16", "default", "blocks", "3.0 KiB", "0.125 to 0.375"],
        ["model.layers.4.mlp.a.weight", "1", "Linear", "bfloat16", "default", "peft", "1.0 KiB"],
        ["lm_head.weight", "1", "Linear", "bfloat16", "default", "blocks", "1.0 KiB", "0.5"],
    ]
    assert [each["name"] for each in json.loads(report.to_json())["weights"]] == [each.name for each in weights]
