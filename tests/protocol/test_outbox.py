from __future__ import annotations

import pytest
from desks import SenderDesk

pytestmark = pytest.mark.deterministic


# --- closing ----------------------------------------------------------------------------------------------


def test_after_the_farewell_a_silent_receiver_lapses_without_harm() -> None:
    desk = SenderDesk()
    session = desk.meet()
    desk.put()
    desk.fetch(session, 1, room=0)
    desk.book.stop()
    desk.book.leave()
    desk.wait(31)
    assert desk.clean
