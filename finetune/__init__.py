"""Training: from text to sharded checkpoints, through DeepSpeed ZeRO with optional CPU offload."""
