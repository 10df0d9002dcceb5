"""What serving and training both ask the system: limits of the container, processes, freed memory, the port of metrics."""
