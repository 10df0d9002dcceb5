"""The layouts of Megatron-LM and Megatron-DeepSpeed."""
