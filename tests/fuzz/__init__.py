"""Random cases of distributed attention against dense float64: outputs, lse and every gradient (`make fuzz`)."""
