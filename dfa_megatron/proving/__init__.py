"""Prove a job on its own devices, kernels, dtype and weights: many ranks are compared with one, before it trains.

A random text, and a pack of documents, run over the ranks and then on each rank alone, with the framework's own
attention. Compared are the loss, what every layer gives for each token, and the gradients of every parameter.

`Job` is what a framework says of its model, `examine` compares, `Proof` is the outcome.
"""

from dfa_megatron.proving.examine import examine
from dfa_megatron.proving.job import Job, Text
from dfa_megatron.proving.verdict import Proof

__all__ = ["Job", "Proof", "Text", "examine"]
