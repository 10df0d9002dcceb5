"""Training: from text to sharded checkpoints, through DeepSpeed's ZeRO, offloaded where wanted, or its pipeline."""
