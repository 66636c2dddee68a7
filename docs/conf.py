"""Sphinx configuration; ``nox -s docs`` builds with every warning an error."""

from __future__ import annotations

import kvtier

project = "kvtier"
author = "the kvtier developers"
copyright = "the kvtier developers, Apache-2.0"
release = kvtier.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"kvtier {release}"

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

autodoc_typehints = "description"
napoleon_custom_sections = [("Cancellation", "notes_style")]
# The build never asks the network, so names of other projects cannot be resolved.
nitpick_ignore_regex = [
    (
        r"py:.*",
        r"(asyncio|collections|concurrent|numpy|pathlib|pydantic|torch|typing|vllm)\..*",
    ),
    (r"py:.*", r"(ConfigDict|annotated_types\..*)"),
]
