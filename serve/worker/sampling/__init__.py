"""From logits to tokens: rules that requests set, draws, logprobs."""
