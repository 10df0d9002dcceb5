"""Writes the format that is Tessera's own."""
