"""What is published names its files by whole addresses, and every link between files of the tree leads somewhere."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import publication
import pytest

ROOT = publication.ROOT
ADDRESS = "https://example.org/who/what"
if not (ROOT / "README.md").is_file():
    pytest.skip("the tests are away from their tree", allow_module_level=True)
PAGES = [
    *(path for name in ("README", "CONTRIBUTING", "SECURITY", "CHANGELOG") for path in ROOT.glob(f"{name}.md")),
    *(path for folder in ("docs", "attacks", "benchmarks", "tests") for path in sorted((ROOT / folder).rglob("*.md"))),
]
LINK = re.compile(r"\]\((?!https?://|mailto:)([^)#\s]*)(?:#([^)\s]+))?\)")


@pytest.fixture
def released(tmp_path: Path) -> Path:
    for name in ("README.md", "pyproject.toml", "CITATION.cff"):
        shutil.copy(ROOT / name, tmp_path)
    publication.write(tmp_path, ADDRESS, "v1.2.3", "2026-01-02")
    return tmp_path


def test_the_readme_of_a_release_has_whole_links_to_files_of_its_tag(released: Path) -> None:
    links = re.findall(r"(!?)\[[^\]]*\]\(([^)\s]+)\)", (released / "README.md").read_text(encoding="utf-8"))
    assert [link for _, link in links if not link.startswith(("https://", "#"))] == []
    own = [(picture, link.removeprefix(f"{ADDRESS}/")) for picture, link in links if link.startswith(ADDRESS)]
    assert len(own) > 40
    for picture, link in own:
        kind, tag, path = link.split("/", 2)
        assert (kind, tag) == ("raw" if picture else "blob", "v1.2.3")
        assert (ROOT / path.partition("#")[0]).exists(), path


def test_a_release_says_where_it_is_from_and_when(released: Path) -> None:
    tomllib = pytest.importorskip("tomllib", reason="new in Python 3.11")
    project = tomllib.loads((released / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["urls"]["Source"] == ADDRESS
    assert project["authors"]
    cited = (released / "CITATION.cff").read_text(encoding="utf-8")
    assert f'\nrepository-code: "{ADDRESS}"\ndate-released: 2026-01-02\n' in cited


def test_an_index_takes_what_is_built(tmp_path: Path) -> None:
    pytest.importorskip("twine", reason="pip install twine")
    tree = tmp_path / "tree"
    tree.mkdir()
    for name in ("pyproject.toml", "README.md", "CITATION.cff", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    shutil.copytree(ROOT / "safe_loading", tree / "safe_loading", ignore=shutil.ignore_patterns("__pycache__"))
    publication.write(tree, ADDRESS, "v1.2.3", "2026-01-02")
    pytest.importorskip("hatchling", reason="builds the package")
    build = "from hatchling.build import build_sdist as s, build_wheel as w; s('dist'); w('dist')"
    subprocess.run([sys.executable, "-c", f"import os; os.mkdir('dist'); {build}"], cwd=tree, check=True, timeout=120)
    files = [str(path) for path in sorted((tree / "dist").iterdir())]
    assert len(files) == 2
    command = [sys.executable, "-m", "twine", "check", "--strict", *files]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_action_of_a_workflow_is_pinned_to_a_commit() -> None:
    workflows = list((ROOT / ".github" / "workflows").glob("*.yml"))
    if not workflows:
        pytest.skip("an sdist has no workflows")
    used = re.findall(r"uses: ((?!\./)\S+)", "\n".join(path.read_text(encoding="utf-8") for path in workflows))
    assert len(used) > 8
    assert [action for action in used if not re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", action)] == []


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them and as myst does, and those of the codes in its tables."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    codes = re.findall(r"^\| `([\w-]+)` \|", text, re.MULTILINE)
    both = [heading.lower().replace("'", other) for heading in headings for other in ("", "-")]
    return {re.sub(r"[^\w\- ]", "", heading).strip().replace(" ", "-") for heading in both} | {*codes}


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_the_links_of_a_page_lead_to_files_and_headings_of_the_tree(page: Path) -> None:
    text = re.sub(r"^```.*?^```$|`[^`\n]*`", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    broken = []
    for name, anchor in LINK.findall(text):
        target = (page.parent / name) if name else page
        if not target.exists():
            broken.append(name)
        elif anchor and target.suffix == ".md" and anchor not in anchors(target):
            broken.append(f"{name}#{anchor}")
    assert broken == []
