"""From files of text and conversations to rows of tokens."""
