"""What a run will need and what the machine has: counted and simulated before anything is loaded, measured while it runs."""
