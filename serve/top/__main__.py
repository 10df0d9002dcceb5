"""``python -m serve.top``."""

from __future__ import annotations

import sys

from serve.top.cli import main

if __name__ == "__main__":
    sys.exit(main())
