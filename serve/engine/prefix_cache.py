"""What the KV blocks hold, by the tokens that were computed into them."""

from __future__ import annotations

import secrets
from array import array
from hashlib import sha256

from serve.engine.block_pool import BlockPool
from serve.types import BlockId


class DigestChain:
    """Digests of a sequence's full blocks, each made when first asked for.

    Digest i is sha256 over digest i - 1 and the token ids of block i, so it stands for every token up to the end of that
    block; the root stands for who may share. ``token_ids`` is the sequence's own list, which only grows.
    """

    __slots__ = ("_block_tokens", "_digests", "_root", "_token_ids")

    def __init__(self, root: bytes, token_ids: list[int], block_tokens: int) -> None:
        self._root = root
        self._token_ids = token_ids
        self._block_tokens = block_tokens
        self._digests: list[bytes] = []

    def digest(self, index: int) -> bytes:
        """The digest of full block ``index``; the sequence must have all its tokens."""
        digests = self._digests
        size = self._block_tokens
        while len(digests) <= index:
            first = len(digests) * size
            ids = self._token_ids[first : first + size]
            assert len(ids) == size, f"block {len(digests)} is not full: it has {len(ids)} of {size} tokens"
            parent = digests[-1] if digests else self._root
            digests.append(sha256(parent + array("q", ids).tobytes()).digest())
        return digests[index]


class PrefixCache:
    """Hands out KV blocks, and finds those that already hold what a sequence needs.

    A block is registered under the digest of all tokens up to its end, once the step that computed it was applied. Held
    or free, it can be found until its contents are overwritten or the cache is flushed. The root digest mixes in a random
    key, so nobody can make two prompts collide or guess what is cached.

    Always true (see ``check``): ``_block_of`` and ``_digest_of`` are each other's inverse, and the pool keeps exactly the
    registered blocks.
    """

    def __init__(self, num_blocks: int, block_tokens: int, *, key: bytes | None = None) -> None:
        assert block_tokens >= 1, f"a block of {block_tokens} positions can hold nothing"
        self.pool = BlockPool(num_blocks)
        self.block_tokens = block_tokens
        self._key = secrets.token_bytes(32) if key is None else key
        self._block_of: dict[bytes, BlockId] = {}
        self._digest_of: dict[BlockId, bytes] = {}

    def like(self, num_blocks: int) -> PrefixCache:
        """An empty one of so many blocks, whose roots are the same: digest chains made for this one go on in it."""
        return PrefixCache(num_blocks, self.block_tokens, key=self._key)

    def blocks_for(self, num_positions: int) -> int:
        """Blocks that ``num_positions`` positions of one sequence need."""
        return -(-num_positions // self.block_tokens)

    def shared_root(self, salt: str, tenant: str = "") -> bytes:
        """Root for all requests of this tenant with this salt; without a tenant, for those that all may share."""
        whose = sha256(tenant.encode()).digest() if tenant else b""
        return sha256(self._key + (b"tenant:" + whose if tenant else b"salt:") + salt.encode("utf-8", "surrogatepass")).digest()

    def private_root(self, serial: int) -> bytes:
        """Root for the sequences of one request alone."""
        return sha256(self._key + b"request:" + str(serial).encode()).digest()

    def root_of_kind(self, root: bytes, kind: int) -> bytes:
        """Root for those of them whose keys are of one kind; see ``LengthRule``."""
        return sha256(root + b"kind:" + str(kind).encode()).digest() if kind else root

    def lookup(self, chain: DigestChain, limit: int) -> list[BlockId]:
        """The longest run of registered blocks from the start of ``chain``, at most ``limit``. Takes no reference."""
        found: list[BlockId] = []
        while len(found) < limit:
            block = self._block_of.get(chain.digest(len(found)))
            if block is None:
                break
            found.append(block)
        return found

    def register(self, digest: bytes, block: BlockId) -> None:
        """Remember what a held block contains. When another block has the same contents already, that one stays."""
        if digest in self._block_of or block in self._digest_of:
            return
        self._block_of[digest] = block
        self._digest_of[block] = digest
        self.pool.mark(block)

    def try_take(self, count: int) -> list[BlockId] | None:
        """Take ``count`` blocks to write to, one reference each; ``None``, and no change, if too few are free."""
        taken = self.pool.try_take(count)
        for block in taken or ():
            digest = self._digest_of.pop(block, None)
            if digest is not None:
                del self._block_of[digest]
        return taken

    def release(self, table: list[BlockId]) -> None:
        """Give back a sequence's blocks. The last go first, so that of a prefix the tail is overwritten before the head."""
        for block in reversed(table):
            self.pool.release(block)

    def flush(self) -> int:
        """Forget all contents; returns how many blocks were registered. Blocks that are held stay held."""
        for block in self._digest_of:
            self.pool.unmark(block)
        count = len(self._digest_of)
        self._digest_of.clear()
        self._block_of.clear()
        return count

    def check(self) -> None:
        """Assert what must always hold. Cost grows with the pool: for tests."""
        self.pool.check()
        assert {block: digest for digest, block in self._block_of.items()} == self._digest_of, "the two maps disagree"
        marked = {block for block in range(self.pool.num_blocks) if self.pool.is_marked(BlockId(block))}
        assert marked == set(self._digest_of), "the pool does not keep exactly the registered blocks"
