"""The folder of a run: names, log, saves, and what a run leaves for the next."""
