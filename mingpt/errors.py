"""Errors that end a run with one message and no traceback."""


class UserError(Exception):
    """A mistake in the yaml, the data or a snapshot; exit status 2."""


class PeerError(Exception):
    """Another rank is the cause of an error, or the rendezvous store is unreachable; exit status 1."""


# Out-of-memory messages of the CPU allocator, of thread creation, of the dynamic loader, and of CUDA for memory that
# PyTorch's GPU allocator does not provide
OOM_MESSAGES = (
    "DefaultCPUAllocator: can't allocate memory",
    "can't start new thread",
    "failed to map segment",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
)


def is_oom_error(error: Exception) -> bool:
    """Returns whether memory ran out. CUDA's exception is compared by name, since PyTorch may not be imported."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return any(message in str(error) for message in OOM_MESSAGES)
