"""Attention over KV blocks on CUDA devices."""
