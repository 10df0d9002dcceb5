"""Mutated input for what reads bytes of others: requests, the ranks' wire, configuration files, checkpoints."""
