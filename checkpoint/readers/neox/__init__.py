"""The layout of GPT-NeoX."""
