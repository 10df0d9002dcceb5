"""``make demo``: train a small GPT on this Python's own source, keep it as shards, serve it on two ranks, stream from it."""
