"""``python -m serve.client``: the ``tessera-generate`` command."""

import sys

from serve.client.cli import main

if __name__ == "__main__":
    sys.exit(main())
