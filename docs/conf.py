"""The documentation as a site: `make docs` builds it, and a warning is an error."""

from __future__ import annotations

import osdp

project = "osdp"
release = version = osdp.__version__
project_copyright = "the osdp authors"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["*.py"]
html_theme = "furo"
html_title = f"osdp {release}"

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

autodoc_inherit_docstrings = False  # frameworks write theirs in another form
autodoc_typehints = "description"
autodoc_member_order = "bysource"
napoleon_google_docstring = True
