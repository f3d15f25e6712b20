"""The events that a log can be searched for: the `event` of a record, with fields beside it; see docs/operations.md."""

from __future__ import annotations

OPEN = "connector_open"
CLOSED = "connector_closed"
PEER_LOST = "peer_lost"
PEER_ENDED = "peer_ended"
SENDER_ABSENT = "sender_absent"
PEER_CUT_OFF = "peer_cut_off"
PEER_REFUSED = "peer_refused"
OTHER_STAGE = "other_stage"
SENDER_REFUSED = "sender_refused"
QUARANTINE = "quarantine"
QUARANTINE_OVER = "quarantine_over"
PUTS_WAIT = "puts_wait"
EXPIRED = "expired"
UNFETCHED = "unfetched"
