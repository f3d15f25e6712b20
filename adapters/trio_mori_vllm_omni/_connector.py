"""The face that vllm-omni sees."""

from __future__ import annotations

from typing import Any

from vllm_omni.distributed.omni_connectors.connectors.base import OmniConnectorBase
from vllm_omni.distributed.omni_connectors.utils.kv_utils import get_local_tp_rank, get_omni_replica_id

from . import _adapter_hook
from ._place import find_place
from ._sync import SyncConnector
from ._values import StockCodec


class TrioMoriConnector(SyncConnector, OmniConnectorBase):  # type: ignore[misc]
    """A stage's connector on trio_mori, in the place of vllm-omni's own. See docs/vllm-omni.md."""

    supports_raw_data = True

    def __init__(self, config: dict[str, Any], *, resolved: bool = False) -> None:
        """Find the stage's ports, and open.

        Args:
            config: The `extra` of the deploy YAML, as vllm-omni has completed it.
            resolved: Its ports are final; see `_place`.

        Raises:
            ConfigError: a value is not allowed.
            BindFailed, EngineUnavailable: as `SyncConnector`.
        """
        place = find_place(config, resolved=resolved, rank=get_local_tp_rank(), replica=get_omni_replica_id())
        _adapter_hook.install()
        super().__init__(config, place, StockCodec())
