"""Multimodal models: towers for images, video and sound, and a language model whose attention is distributed."""
