"""Layers that compute attention in code of their own: product, softmax, product."""
