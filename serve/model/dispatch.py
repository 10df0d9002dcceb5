"""What looks at torch's operations while they run."""

from __future__ import annotations

from torch.utils._python_dispatch import TorchDispatchMode


class Watching(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves its hook unannotated
    """A mode of torch's that may be entered without importing its compiler, which takes seconds."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()  # type: ignore[no-untyped-call]  # torch leaves it unannotated

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it unannotated

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Whether torch keeps the compiler from what runs within, which nobody compiles: it would import it for that."""
        return False
