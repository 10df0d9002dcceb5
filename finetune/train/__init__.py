"""One rank's run: the loop, its schedule, its first weights, what it saves and what it goes on from."""
