"""Every message is written down, as the tests that provoke it have met it."""

from __future__ import annotations

import pytest
from messages import PAGE, is_there, met, page, read_page, sites


def test_every_message_has_an_entry_and_no_entry_is_of_one_that_is_gone() -> None:
    """Else `python tests/messages.py`, with the test that provokes what is new."""
    assert list(read_page()) == list(sites())
    assert all(map(is_there, read_page().values()))


@pytest.mark.slow
def test_messages_are_what_the_page_says() -> None:
    assert page(met(sorted({*read_page().values()}))) == PAGE.read_text()
