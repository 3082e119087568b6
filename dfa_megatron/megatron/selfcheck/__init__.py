"""What the self-check needs of Megatron-Core: reads its flags, makes the model small, trains it and records tensors.

`shrink.case_of(flags)` is the entry. flags.py reads, shrink.py reduces, model.py builds, train.py runs in the
rank processes.
"""
