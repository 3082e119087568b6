"""The parts of examples/train.py, one idea each: flags, text, model, loop, report, launch."""
