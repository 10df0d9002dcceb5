"""The blocking client: complete a prompt, then ask how likely texts are.

python -m examples.client "def read_config(path):" --address 127.0.0.1:50051
"""

from __future__ import annotations

import argparse
import sys

from serve.client import Client, ScoreItem, TesseraError


def main() -> int:
    parser = argparse.ArgumentParser(description="Complete a prompt and compare two continuations of it.")
    parser.add_argument("prompt", nargs="?", default="def read_config(path):")
    parser.add_argument("--address", default="127.0.0.1:50051", help="host:port or unix:/path of tessera-serve")
    arguments = parser.parse_args()

    with Client(arguments.address, timeout=60.0) as client:
        try:
            client.wait_until_serving()
            model = client.models()[0]
            print(f"{model.name}: {model.family}, {model.num_parameters:,} parameters, {model.dtype}")

            # Nothing but a length is set, so the answer is greedy: the same each time.
            answer = client.generate(arguments.prompt, max_new_tokens=32)
            print(arguments.prompt + answer.text)
            finish = answer.completions[0].finish
            print(f"({finish.usage.completion_tokens} tokens, ended by {finish.reason}, {finish.timings.total_seconds:.2f} s)")

            # A text and what it follows: the log-likelihood of the text alone.
            continuations = ["\n    return", "\n    banana"]
            scores = client.score([ScoreItem(text, arguments.prompt) for text in continuations])
            for text, score in zip(continuations, scores, strict=True):
                print(f"log-likelihood of {text!r}: {score.sum:.2f}")
        except TesseraError as error:
            print(f"client: {error}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
