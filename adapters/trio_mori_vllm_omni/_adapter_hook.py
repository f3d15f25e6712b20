"""Where vllm-omni's chunk adapter gives up what an aborted request has sent.

For its own shared-memory connector it does so, and for no other (0.30.0). The place is
`OmniChunkTransferAdapter._queue_shm_cleanup_locked`: `cleanup_sender` gets there for an abort, at once or, if a put is
under way, when that has ended; and the generation that it is given knows how many chunks were put and whether the
last of them has left, after which all of them must stay readable.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ._adapter_choice import Choice

logger = logging.getLogger("trio_mori.vllm_omni")

ADAPTER = "vllm_omni.distributed.omni_connectors.transfer_adapter.chunk_transfer_adapter"
CLASS, METHOD = "OmniChunkTransferAdapter", "_queue_shm_cleanup_locked"

_Original = Callable[[Any, str, Any], None]
_warned = False


def install() -> bool:
    """Have our connectors told of aborts too. Idempotent; False while the adapter is not imported, or has moved."""
    global _warned
    module = sys.modules.get(ADAPTER)
    if module is None:
        return False
    adapter = _stock_class(module)
    original = getattr(adapter, METHOD, None)
    if original is None:
        if not _warned:
            _warned = True
            logger.warning(
                "%s.%s is not there: chunks of aborted requests stay until they expire (buffer_ttl_seconds)",
                CLASS,
                METHOD,
            )
        return False
    if not hasattr(original, "stock"):
        setattr(adapter, METHOD, _told(original))
    return True


def remove() -> None:
    """Restore the adapter as it was."""
    adapter = _stock_class(sys.modules.get(ADAPTER))
    stock = getattr(getattr(adapter, METHOD, None), "stock", None)
    if stock is not None:
        setattr(adapter, METHOD, stock)


def _stock_class(module: ModuleType | None) -> Any:
    """vllm-omni's own, also where the name is bound to a choice."""
    bound = getattr(module, CLASS, None)
    return bound.stock if isinstance(bound, Choice) else bound


def _told(original: _Original) -> _Original:
    def queue_cleanup(adapter: Any, external_req_id: str, sender_token: Any) -> None:
        original(adapter, external_req_id, sender_token)
        # By what it can do, not by its class: the connector's module need not be loaded here.
        forget = getattr(adapter.connector, "forget_request", None)
        if forget is not None and sender_token.num_puts and not sender_token.terminal_sent:
            forget(external_req_id)

    queue_cleanup.stock = original  # type: ignore[attr-defined]
    return queue_cleanup
