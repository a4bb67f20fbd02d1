"""Errors that end a run with one message and no traceback."""


class UserError(Exception):
    """A mistake in yaml, data or snapshot; exit status 2."""


class PeerError(Exception):
    """Another rank or the rendezvous store is gone; exit status 1."""


class StoreUnreachableError(PeerError):
    """The rendezvous store is gone."""
