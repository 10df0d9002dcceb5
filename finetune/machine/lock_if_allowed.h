// Has DeepSpeed's pinned memory lock its pages where the system lets it, and go on without where it does not.
//
// Its buffers of NVMe offload ask mlock(2) for gigabytes, and a process ends by an assertion where RLIMIT_MEMLOCK is less. Many
// systems have 8 MiB, and root in a container, without CAP_IPC_LOCK, is bound by it like everybody else. Nothing needs the lock:
// the kernel holds the pages of a direct transfer while it lasts. Without it they may only be swapped out where memory is short.
#pragma once

#include <sys/mman.h>

static inline int tessera_lock_if_allowed(const void* address, size_t bytes)
{
    (void)mlock(address, bytes);
    return 0;
}

#define mlock tessera_lock_if_allowed
