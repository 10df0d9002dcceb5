"""The few threads on which the RPC layer does what would keep the event loop from its other calls."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

from google.protobuf.message import Message

T = TypeVar("T")

INLINE_BYTES: Final = 16_384
"""A message up to this long is read, checked and converted on the event loop: whatever it holds, that takes less than the loop
can spare."""

_text_threads: Final = ThreadPoolExecutor(max_workers=2, thread_name_prefix="text")
"""Few, so that a flood of long texts does not take the cores from the ranks."""
_message_threads: Final = ThreadPoolExecutor(max_workers=2, thread_name_prefix="message")
"""For work that the size of a message bounds: it never waits behind texts, or behind templates, which may run for long."""


async def in_text_thread(work: Callable[[], T]) -> T:
    """Run ``work`` in one of the few threads for long texts and chat templates."""
    return await asyncio.get_running_loop().run_in_executor(_text_threads, work)


async def in_message_thread(work: Callable[[], T]) -> T:
    """Run ``work`` in one of the few threads for what takes a bounded time, by the size of a message."""
    return await asyncio.get_running_loop().run_in_executor(_message_threads, work)


async def off_loop(message: Message, work: Callable[[], T]) -> T:
    """Do ``work`` on ``message``: in a thread if the message is large, else at once."""
    return await in_message_thread(work) if message.ByteSize() > INLINE_BYTES else work()
