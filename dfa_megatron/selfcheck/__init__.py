"""Check a user's own configuration on CPU: many ranks against one. Each framework passes a `Case`.

A framework's folder makes the `Case` (what runs, what was reduced, what is expected) and names a function that each
rank process calls; see case.py. `check` runs it and returns a `Report`.
"""
