"""What the self-check needs of DeepSpeed: reads its JSON, makes engine and model small, trains and records tensors.

`command.case_of(words)` is the entry. command.py reads words and makes the case, shrink.py reduces the JSON, train.py
runs in the rank processes, at_start.py is the block's key `selfcheck`.
"""
