"""The site: `make docs` builds it from the pages of this folder, with warnings as errors.

Links to files outside of this folder (`../dfa_megatron/...`) become links into the repository if REPOSITORY names its
address up to the branch, as in https://HOST/OWNER/dfa_megatron/blob/main; else they become plain text.
"""

from __future__ import annotations

import os
import re
from typing import Any

project = "dfa_megatron"
author = "the dfa_megatron authors"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
highlight_language = "text"  # of blocks that name none
html_theme = "furo"
html_title = "dfa_megatron"
html_show_copyright = False  # LICENSE has it
html_static_path = ["_static"]
html_css_files = ["width.css"]

myst_heading_anchors = 4
smartquotes = False  # they would turn --flag into a dash
autodoc_mock_imports = ["accelerate", "deepspeed", "transformers"]
autodoc_typehints = "none"  # signatures show them
autodoc_preserve_defaults = True

_OUTSIDE = re.compile(r"\[([^\]]+)\]\(\.\./([^)]*)\)")


def _links(_app: Any, _name: str, source: list[str]) -> None:
    """Point links that leave this folder into the repository."""
    address = os.environ.get("REPOSITORY", "")
    source[0] = _OUTSIDE.sub(rf"[\1]({address}/\2)" if address else r"\1", source[0])


def _markdown(*about: Any) -> None:
    """Turn a docstring's Markdown into reStructuredText: `name` is code, and * and | mean themselves."""
    lines: list[str] = about[-1]
    for at, line in enumerate(lines):
        parts = line.split("`")
        if len(parts) % 2:
            parts[::2] = [part.replace("*", r"\*").replace("|", r"\|") for part in parts[::2]]
            lines[at] = "``".join(parts)


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.connect("source-read", _links)
    app.connect("autodoc-process-docstring", _markdown, priority=400)  # before napoleon
