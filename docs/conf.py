"""Settings of Sphinx. Nothing here needs more than the `test` extra, and nothing is fetched from the network."""

from __future__ import annotations

from safe_loading import __version__

project = "safe_loading"
author = "the authors of safe_loading"
release = version = __version__
html_title = f"safe_loading {__version__}"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
exclude_patterns = ["_build"]

smartquotes = False  # "--option" and "cuda" stand as they are typed

html_theme = "furo"
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
