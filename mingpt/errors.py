"""Errors that end a run with one message and no traceback."""


class UserError(Exception):
    """A mistake in the yaml, the data or a snapshot; exit status 2.

    Args:
        is_reported: another process reports the error, so this one ends without a message
    """

    def __init__(self, message: str, is_reported: bool = False) -> None:
        super().__init__(message)
        self.is_reported = is_reported


class PeerError(Exception):
    """Another rank is dead, or the rendezvous store is unreachable; exit status 1.

    Args:
        linger_seconds: seconds to stay alive after the message
    """

    def __init__(self, message: str, linger_seconds: float = 0.0) -> None:
        super().__init__(message)
        self.linger_seconds = linger_seconds
        self.is_reported = False  # True: another process reports the error, so this one ends without a message


class StoreUnreachableError(PeerError):
    """The rendezvous store does not answer."""


# Messages of the CPU allocator, of threads that find no memory for their stack, and of the loader of libraries.
OOM_MESSAGES = ("DefaultCPUAllocator: can't allocate memory", "can't start new thread", "failed to map segment")


def is_oom_error(error: Exception) -> bool:
    """Whether memory ran out. Compares the exception of CUDA's allocator by name: PyTorch may not be imported."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return any(message in str(error) for message in OOM_MESSAGES)
