"""DeepSpeed ZeRO: every rank has the whole model's layers and a part of their state."""
