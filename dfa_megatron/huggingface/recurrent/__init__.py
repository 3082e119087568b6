"""Layers of hybrids that carry a state, distributed by what they call: convolutions, delta rules, state spaces."""
