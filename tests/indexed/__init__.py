"""Learned-sparse attention over ranks: `python -m tests.indexed --help` draws many cases."""
