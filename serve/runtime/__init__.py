"""What lies between the engine and the RPC layer: threads, streams, and the life of the ranks."""
