"""What can the user put right? The one exception that ends in exit status 2."""


class UserError(Exception):
    """A mistake in yaml, data or snapshot: told in one message without a traceback, exit status 2."""
