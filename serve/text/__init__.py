"""Text to tokens and back: tokenizer, incremental detokenizer, chat template."""
