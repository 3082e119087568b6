"""What the self-check needs of transformers: reads a config, makes the model small, trains it and records tensors.

`command.case_of(words)` is the entry. command.py reads words, shrink.py reduces, model.py builds, watch.py records
attention, train.py runs in the rank processes.
"""
