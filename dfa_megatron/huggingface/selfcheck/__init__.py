"""Read a transformers config, make the model small, train and record, for the self-check.

`command.case_of(words)` is the entry. command.py reads words, shrink.py reduces, model.py builds, watch.py records
attention, train.py runs in the rank processes.
"""
