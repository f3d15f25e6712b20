"""Payloads: what `put` makes of one, and `get` of what arrived. Bit for bit, or refused by name.

A payload lies in the pool as one piece: the bytes of its large parts, each at an aligned offset, and nothing else. What
they mean is in a *header* (see `trio_mori._payload_format`), which travels in the control message.
"""

from __future__ import annotations

from ._payload_glance import glance, is_raw
from ._payload_plan import Plan, plan, plan_bytes
from ._payload_restore import Restored, restore

__all__ = ["Plan", "Restored", "glance", "is_raw", "plan", "plan_bytes", "restore"]
