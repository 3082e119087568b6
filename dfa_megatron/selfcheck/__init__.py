"""Proves a user's own configuration: many ranks against one, on CPU. It knows no framework; each hands it a `Case`.

A framework's folder makes the `Case` (what runs, what was reduced, what is expected) and names a function that each
rank process calls; see case.py. `check` runs it and returns a `Report`.
"""
