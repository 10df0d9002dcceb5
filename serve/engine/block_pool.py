"""Who holds which KV block."""

from __future__ import annotations

from collections import OrderedDict

from serve.types import BlockId


class BlockPool:
    """Says who holds each KV block and which blocks are free.

    A block is room for a fixed number of consecutive positions of one sequence, in every layer. The pool deals in block
    ids only; the tensors are the ranks'. Free blocks are of two sorts: empty ones, and kept ones whose contents somebody
    may want back (see ``PrefixCache``). Empty ones are taken first, the one that was released last before the others, so that
    memory which was never touched stays untouched while there is other; then the kept one that was released longest ago.
    Not thread-safe: the engine thread alone calls it.

    Always true (see ``check``): a block is on exactly one of the two free lists, once, exactly when its reference count
    is zero; it is on the kept list exactly when it is also marked as kept.
    """

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks >= 1, f"a pool of {num_blocks} blocks can hold nothing"
        self.num_blocks = num_blocks
        self._references = [0] * num_blocks
        self._marked = [False] * num_blocks
        self._empty = [BlockId(i) for i in reversed(range(num_blocks))]
        self._kept: OrderedDict[BlockId, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        """Blocks that can be taken, kept ones included."""
        return len(self._empty) + len(self._kept)

    @property
    def num_used(self) -> int:
        """Blocks with at least one reference."""
        return self.num_blocks - self.num_free

    @property
    def num_kept(self) -> int:
        """Free blocks whose contents are kept."""
        return len(self._kept)

    def is_free(self, block: BlockId) -> bool:
        return self._references[block] == 0

    def is_marked(self, block: BlockId) -> bool:
        return self._marked[block]

    def try_take(self, count: int) -> list[BlockId] | None:
        """Take ``count`` free blocks, one reference each; ``None``, and no change, if too few. Their marks are gone."""
        if count > self.num_free:
            return None
        taken: list[BlockId] = []
        for _ in range(count):
            if self._empty:
                block = self._empty.pop()
            else:
                block, _ = self._kept.popitem(last=False)
                self._marked[block] = False
            self._references[block] = 1
            taken.append(block)
        return taken

    def share(self, block: BlockId) -> None:
        """One more reference to a block that is held, or that is free and kept."""
        if self._references[block] == 0:
            assert self._marked[block], f"block {block} is free and empty: it cannot be shared, only taken"
            del self._kept[block]
        self._references[block] += 1

    def release(self, block: BlockId) -> None:
        """Give one reference back; after the last one the block is free, as the newest of its sort."""
        assert self._references[block] > 0, f"block {block} was released more often than it was taken"
        self._references[block] -= 1
        if self._references[block] == 0:
            if self._marked[block]:
                self._kept[block] = None
            else:
                self._empty.append(block)

    def mark(self, block: BlockId) -> None:
        """From now on the contents are worth keeping. The block must be held."""
        assert self._references[block] > 0, f"block {block} is free: what it holds cannot become worth keeping"
        self._marked[block] = True

    def unmark(self, block: BlockId) -> None:
        """From now on the contents are worth nothing."""
        assert self._marked[block], f"block {block} is not marked as kept"
        self._marked[block] = False
        if self._references[block] == 0:
            del self._kept[block]
            self._empty.append(block)

    def check(self) -> None:
        """Assert what must always hold. Cost grows with the pool: for tests."""
        assert all(count >= 0 for count in self._references), "a reference count is negative"
        assert len(set(self._empty)) == len(self._empty), "a block is on the empty list twice"
        free = {block for block, count in enumerate(self._references) if count == 0}
        marked = {block for block in free if self._marked[block]}
        assert set(self._kept) == marked, "the kept list is not the free marked blocks"
        assert set(self._empty) == free - marked, "the empty list is not the free unmarked blocks"

    def check_references(self, held: dict[BlockId, int]) -> None:
        """Assert that the references are those of ``held`` (block -> holders) and no others."""
        counted = {BlockId(block): count for block, count in enumerate(self._references) if count}
        assert counted == held, f"blocks are held as {counted}, but the tables name them as {held}"
