"""What is refused: models, modules around them, calls, and padding that is not on the right."""
