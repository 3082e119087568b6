"""Read Megatron-Core's flags, make the model small, train and record, for the self-check.

`shrink.case_of(flags)` is the entry. read_flags.py reads, shrink.py reduces, model.py builds, train.py runs in the
rank processes.
"""
