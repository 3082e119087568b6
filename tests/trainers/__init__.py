"""Trainers that are not installed here: their hooks, checked against their source."""
