"""Trainers that are not installed here: their hooks, and scripts that run their code."""
