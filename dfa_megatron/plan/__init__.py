"""Who computes what, when, and what moves: plans of distributed attention as pure data, without PyTorch."""
