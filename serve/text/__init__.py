"""Text to tokens and back: the served tokenizer, incremental detokenizer."""
