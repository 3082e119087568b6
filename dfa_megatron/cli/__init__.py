"""The command `dfa-megatron`: look at plans without starting a run."""
