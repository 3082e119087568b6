"""Random training steps of Megatron-Core, transformers and DeepSpeed against one rank (`make fuzz-frameworks`)."""
