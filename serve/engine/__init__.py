"""The pure core: who runs, who waits, who holds which block; no clock, no threads, no tensors."""
