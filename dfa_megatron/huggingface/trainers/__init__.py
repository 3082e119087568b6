"""Trainers whose ranks share sequences: HF Trainer and its subclasses, without DeepSpeed."""
