"""``python -m serve`` is ``tessera-serve``."""

import sys

from serve.cli import main

if __name__ == "__main__":
    sys.exit(main())
