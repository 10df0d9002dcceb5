"""One program per engine, each run by the Python of its own environment, and what all of them say and hear."""
