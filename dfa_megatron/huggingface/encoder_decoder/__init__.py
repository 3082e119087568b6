"""Models of an encoder and a decoder that attends to it."""
