"""What is done beside the event loop keeps nothing else from being done."""

from __future__ import annotations

import asyncio
import threading

from serve.rpc.threads import INLINE_BYTES, in_text_thread, off_loop
from serve.v1 import tokenizer_pb2


async def test_templates_that_do_not_end_keep_no_large_message_waiting() -> None:
    over, large = threading.Event(), tokenizer_pb2.TokenizeRequest(text="x" * (INLINE_BYTES + 1))
    templates = [asyncio.ensure_future(in_text_thread(lambda: over.wait(60))) for _ in range(4)]
    try:
        async with asyncio.timeout(10):
            assert await off_loop(large, lambda: threading.current_thread().name.startswith("message"))
        assert not any(template.done() for template in templates)
    finally:
        over.set()
        await asyncio.gather(*templates)
