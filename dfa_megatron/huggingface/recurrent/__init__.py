"""Distribute the layers of hybrids that carry a state: convolutions, delta rules and state spaces, by what they call.

layers.py finds such layers and says which call is running, stand_ins.py replaces the functions that they call.
"""
