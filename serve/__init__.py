"""Serving: the same shards that training writes, over gRPC."""
