"""Errors that end a run with one message and no traceback."""


class UserError(Exception):
    """A mistake in yaml, data or snapshot; exit status 2.

    Args:
        is_reported: another process reports it, and this one ends without a message
    """

    def __init__(self, message: str, is_reported: bool = False) -> None:
        super().__init__(message)
        self.is_reported = is_reported


class PeerError(Exception):
    """Another rank is dead, or the rendezvous store is unreachable; exit status 1.

    Args:
        linger_seconds: for which this process must not end after its message
    """

    def __init__(self, message: str, linger_seconds: float = 0.0) -> None:
        super().__init__(message)
        self.linger_seconds = linger_seconds
        self.is_reported = False  # by another process, and this one ends without a message


class StoreUnreachableError(PeerError):
    """The rendezvous store does not answer."""


# In exceptions of the CPU's allocator, of threads without memory for a stack, and of libraries.
OOM_MESSAGES = ("DefaultCPUAllocator: can't allocate memory", "can't start new thread", "failed to map segment")


def is_oom_error(error: Exception) -> bool:
    """Whether memory ran out. PyTorch, whose CUDA allocator has its own exception, may not be imported."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return any(message in str(error) for message in OOM_MESSAGES)
