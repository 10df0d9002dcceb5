"""What turns text into token ids, and a conversation into text: the checkpoint's tokenizer and its chat template."""
