"""Sphinx configuration: Markdown pages, the API from docstrings, the picture of a restart from the phase table."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE / "_ext"), str(HERE.parent)]

from inprocess import Wrapper  # noqa: E402

# or it would show how a Wrapper is written without parentheses, and no options
Wrapper.__signature__ = inspect.signature(Wrapper)  # type: ignore[attr-defined]

project = "inprocess"
author = "the inprocess developers"
version = release = "0.1.0"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "restart_diagram"]
exclude_patterns = ["_build", "performance/*"]  # the latter are included in performance.md
html_theme = "furo"
html_title = "inprocess"
html_static_path = ["_static"]
html_css_files = ["cards.css"]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_class_signature = "mixed"
napoleon_numpy_docstring = False
# names of this library must resolve; those of Python and torch are not linked
nitpick_ignore_regex = [
    ("py:.*", r"(?!inprocess\.).*"),
    ("py:class", r"inprocess\..*\.(T|F|Reset|Duration|Board)"),
]
