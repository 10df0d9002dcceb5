"""The layouts of torch.distributed.checkpoint."""
