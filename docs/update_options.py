"""Write the table of options.md from DistAttentionConfig: `python docs/update_options.py`."""

from __future__ import annotations

from pathlib import Path

from dfa_megatron.config import DistAttentionConfig

PAGE = Path(__file__).with_name("options.md")
START, END = "<!-- options -->\n", "<!-- /options -->"


def page(text: str) -> str:
    """Return the page with the table of today's options."""
    before, rest = text.split(START)
    return before + START + DistAttentionConfig.markdown_table() + "\n" + END + rest.split(END)[1]


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
