"""``tessera-top``: a server seen in a terminal, from its ``/metrics`` alone."""
