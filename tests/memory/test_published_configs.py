"""Published configs are planned with the bytes that their weights take: 2 for each parameter without quantization.

The configs lie beside the repository (``shared/field``), and where they do not, these tests are skipped.
`tests/model/test_weights_dtype.py` has what decides in them.
"""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from safe_loading import SafeLoadingError, check_checkpoint, plan_device_map

_FIELD = next(
    (up / "shared" / "field" for up in Path(__file__).parents[2:5] if (up / "shared" / "field").is_dir()), None
)
_EXPECTED: dict[str, Any] = json.loads((_FIELD / "expected.json").read_text()) if _FIELD is not None else {}
_PLAIN = sorted(n for n, e in _EXPECTED.items() if not e.get("quantized") and e.get("parameters") and e.get("cls"))
_OTHERS = sorted(set(_EXPECTED).difference(_PLAIN))
_FLAT = "stepfun-ai--Step-3.7-Flash"  # its sizes are not where its class reads them, which takes its defaults instead
# transformers does not build them either, or no transformers reads their weights
_REFUSED = r"trust_remote_code=True|transformers refuses this config|modelopt quantized the weights"


def _cases(names: list[str], always: str = "VL") -> list[Any]:
    sample = set(random.Random(0).sample(names, min(8, len(names))))
    return [pytest.param(n, marks=() if n in sample or always in n else pytest.mark.slow) for n in names]


pytestmark = pytest.mark.skipif(not _PLAIN, reason="the published configs do not lie beside the repository")


@pytest.mark.parametrize("name", _cases(_PLAIN))
def test_a_plan_counts_2_bytes_for_each_parameter(name: str, tmp_path: Path) -> None:
    assert _FIELD is not None
    shutil.copy(_FIELD / "configs" / f"{name}.json", tmp_path / "config.json")
    if name == _FLAT:
        document = json.loads((tmp_path / "config.json").read_text())
        findings = plan_device_map(tmp_path, {0: "40TB"}, verify=False).findings
        [ignored] = [finding for finding in findings if finding.code == "sizes-ignored"]
        assert "ignores vocab_size=128896 (it takes 128815)" in ignored.message
        document["text_config"] = {"vocab_size": document["vocab_size"]}
        (tmp_path / "config.json").write_text(json.dumps(document))
    plan = plan_device_map(tmp_path, {0: "40TB"}, verify=False)
    # buffers, and what a class keeps in float32, are a few KB
    assert plan.devices[0].used == pytest.approx(2 * _EXPECTED[name]["parameters"], rel=1e-4)


@pytest.mark.parametrize("name", _cases(_OTHERS, always="gpt-oss"))
def test_a_quantized_config_is_planned_smaller_or_refused_by_name(name: str, tmp_path: Path) -> None:
    assert _FIELD is not None
    expected = _EXPECTED[name]
    shutil.copy(_FIELD / "configs" / f"{name}.json", tmp_path / "config.json")
    findings = {finding.code for finding in check_checkpoint(tmp_path).findings}
    if "why" in expected or "modelopt-codes" in findings:
        with pytest.raises(SafeLoadingError, match=_REFUSED):
            plan_device_map(tmp_path, {0: "40TB"}, verify=False)
        return
    used = plan_device_map(tmp_path, {0: "40TB"}, verify=False).devices[0].used
    assert used < 1.1 * expected["parameters"]  # 8 bits, with scales, and modules that stay in 16


@pytest.mark.parametrize("name", _cases([*_PLAIN, *_OTHERS], always="Qwen3-0.6B"))
def test_check_says_of_a_config_alone_that_its_weights_are_not_there(name: str, tmp_path: Path) -> None:
    assert _FIELD is not None
    shutil.copy(_FIELD / "configs" / f"{name}.json", tmp_path / "config.json")
    errors = {finding.code for finding in check_checkpoint(tmp_path).findings if finding.severity == "error"}
    assert errors - {"modelopt-codes"} == {"weights-missing"}


@pytest.mark.skipif(not _PLAIN, reason="the published configs do not lie beside the repository")
def test_a_config_in_gptq_is_planned_by_its_own_rules(tmp_path: Path) -> None:
    assert _FIELD is not None
    config = json.loads((_FIELD / "configs" / "nvidia--Qwen3.6-27B-NVFP4.json").read_text())
    kept = {"-:.*attn.*": {}, "-:.*shared_expert.*": {}, "-:.*mtp.*": {}, "-:.*visual.*": {}}
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4, "group_size": 128, "lm_head": False}
    config["quantization_config"]["dynamic"] = {"lm_head": {}, "model.language_model.embed_tokens": {}, **kept}
    (tmp_path / "config.json").write_text(json.dumps(config))
    plan = plan_device_map(tmp_path, {0: "40TB"}, verify=False)
    assert plan.devices[0].used == pytest.approx(29.38e9, rel=1e-3)  # 18.07 without them
