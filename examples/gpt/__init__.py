"""The parts of examples/train.py, one idea each: flags, text, model, loop, checkpoints, report, launch."""
