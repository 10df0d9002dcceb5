"""Messages and services of the gRPC contract, generated from ``protos/serve/v1`` by ``protos/generate.py``; never edited."""
