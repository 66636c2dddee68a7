"""Sphinx configuration; ``nox -s docs`` builds with every warning an error."""

from __future__ import annotations

import kvtier

project = "kvtier"
author = "the kvtier developers"
copyright = "the kvtier developers, Apache-2.0"
release = kvtier.__version__

extensions = [
    "myst_parser",
    "sphinx_copybutton",
]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"kvtier {release}"

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
