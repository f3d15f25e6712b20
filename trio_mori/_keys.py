"""Who a connector is, and who may talk to it, where its control plane is secured."""

from __future__ import annotations

from collections.abc import Mapping

import attrs


@attrs.frozen(repr=False)
class Keys:
    """The CURVE keys of one connector, each as 40 characters; read from files by `load_keys`.

    Attributes:
        public, secret: Its own pair.
        sender: The public key of the senders that it dials.
        allowed: The public keys that may dial it, with their names for the log; its own among them.
    """

    public: bytes
    secret: bytes
    sender: bytes
    allowed: Mapping[bytes, str]
