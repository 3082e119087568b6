"""The pages, and what writes their tables: `python -m docs.update`."""
