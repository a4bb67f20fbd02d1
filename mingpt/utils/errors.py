"""What ends a run with one message instead of a traceback?"""


class UserError(Exception):
    """A mistake in yaml, data or snapshot: told in one message without a traceback, exit status 2."""


class PeerError(Exception):
    """Another rank, or what ranks meet at, is gone: told in one message without a traceback, exit status 1."""


class StoreUnreachableError(PeerError):
    """What ranks meet at is gone."""
