"""``python -m finetune`` is ``tessera-finetune``."""

from typing import NoReturn

from finetune.cli import main
from host.process import end_process


def run() -> NoReturn:
    """Run one command in a process of its own."""
    end_process(main())


if __name__ == "__main__":
    run()
