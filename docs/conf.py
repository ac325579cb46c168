"""Settings of Sphinx. Nothing here needs more than the `test` extra, and nothing is fetched from the network."""

from __future__ import annotations

import importlib.util
import os
import re
from typing import Any

from docutils import nodes

from safe_loading import __version__

project = "safe_loading"
author = "the authors of safe_loading"
release = version = __version__
html_title = f"safe_loading {__version__}"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.autosummary", "sphinx.ext.napoleon"]
autosummary_generate = False  # the table alone; what it leads to is on the same page
if importlib.util.find_spec("sphinx_copybutton") is not None:  # it is only a convenience
    extensions.append("sphinx_copybutton")
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
exclude_patterns = ["_build"]

smartquotes = False  # "--option" and "cuda" stand as they are typed

html_theme = "furo"
# The repository whose workflow builds the site; a build elsewhere names none.
repository = "/".join(os.environ[name] for name in ("GITHUB_SERVER_URL", "GITHUB_REPOSITORY") if name in os.environ)
if repository.count("/") > 3:
    html_theme_options = {"source_repository": repository, "source_branch": "main", "source_directory": "docs/"}
html_static_path = ["_static"]
html_css_files = ["tables.css"]
html_show_sourcelink = False
html_show_copyright = False

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_default_options = {"exclude-members": "__init__"}
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
python_maximum_signature_line_length = 88
python_use_unqualified_type_names = True

_TABLE_OF_CODES = re.compile(r"^\| code \|.*\n\| ---.*\n(?:\|.*\n)+", re.MULTILINE)
_ROW = re.compile(r"^\| `([\w-]+)` \|", re.MULTILINE)
_COLUMNS = re.compile(r"\S {2,}\S|---|├")
_NAMES = re.compile(r'(<span class="pre">|<h1>|<td[^>]*><p>)([^<]+)')
_INSIDE_A_NAME = re.compile(r"(?<=\w[_.,/=(:#\[])(?=[A-Za-z0-9])|(?<=[a-z])(?=[A-Z][a-z])")
_OPTION = re.compile(r"(?<![\w-])--[a-z]+")


def _anchor_codes(app: Any, docname: str, source: list[str]) -> None:
    """Give the row of each finding's code an anchor, so that `checkpoints.html#truncated` leads to it."""
    source[0] = _TABLE_OF_CODES.sub(lambda table: _ROW.sub(r'| <a id="\1"></a>`\1` |', table.group()), source[0])


def _mark_prose(_: Any, page: nodes.document) -> None:
    """Give printed text without columns a class, so that its lines are wrapped."""
    for block in page.findall(nodes.literal_block):
        if block.get("language") == "text" and not _COLUMNS.search(block.astext()):
            block["classes"].append("prose")


def _write_dashes(_: Any, page: nodes.document) -> None:
    """Write the two hyphens that Sphinx puts between a parameter and its meaning as a dash: lines end between them."""
    for text in list(page.findall(nodes.Text)):
        if text == " -- ":
            text.parent.replace(text, nodes.Text(" \N{EN DASH} "))


def _breakable(name: str) -> str:
    """Return the HTML of a name with the places at which a line may end, as browsers know none in `a_long_name`."""
    return _INSIDE_A_NAME.sub("<wbr>", _OPTION.sub(r'<span class="option">\g<0></span>', name))


def _break_names(app: Any, page: str, template: str, context: dict[str, Any], doctree: nodes.document | None) -> None:
    """Let long names be broken where a reader would break them, on the page and in the links to the next ones."""
    if doctree is not None:
        context["body"] = _NAMES.sub(lambda part: part[1] + _breakable(part[2]), context["body"])
    for side in ("prev", "next"):
        if context.get(side):
            context[side]["title"] = _INSIDE_A_NAME.sub("<wbr>", context[side]["title"])


def _name_made_defaults(*event: Any) -> tuple[str | None, str | None]:
    """Show a field's default that is made by a function as `...`: Sphinx cannot read `<factory>`."""
    signature, returned = event[-2:]
    return signature and signature.replace("<factory>", "..."), returned


def setup(app: Any) -> None:
    """Register what this project adds to a build."""
    app.connect("source-read", _anchor_codes)
    app.connect("doctree-read", _mark_prose)
    app.connect("doctree-resolved", lambda app, page, _: _write_dashes(app, page))
    app.connect("html-page-context", _break_names)
    app.connect("autodoc-process-signature", _name_made_defaults)
