"""Make a transformers config small, without changing the work of attention, and prove its model."""
