"""The server beside other engines for CPUs, on the same weights in one run: ``make bench-peers``."""
