"""Read DeepSpeed's JSON, make engine and model small, train and record, for the self-check.

`command.case_of(words)` is the entry. command.py reads words and makes the case, shrink.py reduces the JSON, train.py
runs in the rank processes, at_start.py is the block's key `selfcheck`.
"""
