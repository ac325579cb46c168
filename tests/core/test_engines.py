"""Engines that are missing, too old for the package or for a feature, or of versions that do not fit each other."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from safe_loading import EngineError, SafeLoadingError
from safe_loading._core import engines

ROOT = Path(__file__).resolve().parents[2]


def run(code: str, folder: Path, **versions: str | None) -> subprocess.CompletedProcess[str]:
    """Run code in a process that sees the engines of these versions installed (None: not at all)."""
    requirements = "".join(f"Requires-Dist: {name}>=1.5\n" for name in versions)
    installed = {"safe_loading": "0.1.0", **{name: version for name, version in versions.items() if version}}
    for name, version in installed.items():
        info = folder / f"{name}-{version}.dist-info"
        info.mkdir(parents=True)
        text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        (info / "METADATA").write_text(text + (requirements if name == "safe_loading" else ""))
    # Before everything that is installed, so that importlib.metadata finds these first.
    path = os.pathsep.join([str(folder), str(ROOT)])
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_an_old_and_a_missing_engine_are_named_at_the_first_verb(tmp_path: Path) -> None:
    code = (
        "import safe_loading\n"
        "from safe_loading import check_checkpoint\n"
        "print('reads')\n"
        "from safe_loading import load_peft_on_rank\n"
    )
    found = run(code, tmp_path, peft="1.4.9", no_such_engine=None)
    assert found.stdout == "reads\n", found.stderr
    assert "EngineError" in found.stderr
    assert "pip install 'peft>=1.5' 'no_such_engine>=1.5'" in found.stderr
    assert "peft>=1.5 is required, and peft 1.4.9 is installed" in found.stderr
    assert "no_such_engine>=1.5 is required, and no_such_engine is not installed" in found.stderr


def test_engines_that_are_new_enough_are_used(tmp_path: Path) -> None:
    found = run("from safe_loading import device_for_rank\nprint('there')", tmp_path, peft="1.5")
    assert found.stdout == "there\n", found.stderr


def test_the_error_is_what_an_import_raises() -> None:
    assert issubclass(EngineError, ImportError)
    assert issubclass(EngineError, SafeLoadingError)


def test_a_feature_names_the_version_that_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "installed_version", lambda name: "0.18.1")
    engines.is_older.cache_clear()
    try:
        engines.require_for("DoRA", "peft", "0.18.1")
        with pytest.raises(EngineError, match=r"A hot swap needs peft >= 0\.20; 0\.18\.1 is installed"):
            engines.require_for("A hot swap", "peft", "0.20")
    finally:
        engines.is_older.cache_clear()


def test_a_call_between_engines_of_other_versions_is_explained() -> None:
    def converter(*, operations: object) -> None: ...

    with (
        pytest.raises(EngineError, match=r"peft \d.* and transformers \d.* do not fit each other.*unexpected keyword"),
        engines.engines_that_fit("peft", "transformers"),
    ):
        converter(distributed_operation=1)  # type: ignore[call-arg]  # as transformers 5.23 is called by peft 0.19
    with pytest.raises(TypeError, match="unsupported operand") as other, engines.engines_that_fit("peft"):
        sum(["1"])  # type: ignore[list-item]  # an error of another kind
    assert not isinstance(other.value, SafeLoadingError)
