"""The ranks: processes that compute what the engine plans."""
