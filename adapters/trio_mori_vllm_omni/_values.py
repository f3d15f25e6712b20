"""Values as vllm-omni's serializer would deliver them, without serialising what is large.

Whatever `OmniSerializer` makes of a value, by msgpack and back, is made of it here by msgpack and back too, with its
tensors, arrays and images taken out before and put in again after. What travels is the plain tree that is left; whoever
gets it applies the serializer's last step, which makes a RequestOutput of what looks like one.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import torch
from msgspec import msgpack
from PIL import Image
from vllm_omni.distributed.omni_connectors.utils.memory_pool import ManagedBuffer as StockBuffer
from vllm_omni.distributed.omni_connectors.utils.serialization import OmniMsgpackDecoder, OmniMsgpackEncoder

from trio_mori import RemoteProtocolError

# Any of msgpack's application types; vllm-omni uses none.
_CODE = 77

# Images whose pixels are all there is to them, one byte to a band.
_IMAGE_MODES = frozenset(("L", "LA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr", "LAB", "HSV", "La", "RGBa"))

_decoder = OmniMsgpackDecoder()

# Of whatever the serializer's last step knows by its keys, one that has to be among them.
SUSPECT = frozenset(
    ("__tensor__", "__ndarray__", "__pil_image__", "final_output_type", "images", "outputs", "finish_reason")
)

# Nothing is made of these.
_LEAVES = frozenset((bool, int, float, str, bytes, type(None), torch.Tensor))


class _Collector(OmniMsgpackEncoder):  # type: ignore[misc]
    """Encodes all but the large parts, which it keeps. What cannot travel as it is goes the serializer's way."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[object] = []

    def _keep(self, part: object) -> msgpack.Ext:
        self.parts.append(part)
        return msgpack.Ext(_CODE, (len(self.parts) - 1).to_bytes(4, "big"))

    def _encode_tensor(self, tensor: torch.Tensor) -> Any:
        if type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided:
            return self._keep(tensor)
        return super()._encode_tensor(tensor)

    def _encode_ndarray(self, arr: np.ndarray[Any, Any]) -> Any:
        return self._keep(arr) if type(arr) is np.ndarray else super()._encode_ndarray(arr)

    def _encode_pil_image(self, img: Image.Image) -> Any:
        return self._keep(img) if img.mode in _IMAGE_MODES else super()._encode_pil_image(img)


class StockCodec:
    """Does to payloads what the stock serializer does. Stateless."""

    def plain(self, value: Any) -> tuple[object, bool]:
        """The tree that the serializer would have sent, with its large parts as they are; and if all are on the host.

        Raises:
            TypeError, ValueError, OverflowError: the serializer could not have sent it.
        """
        if isinstance(value, StockBuffer):
            return value.tensor, value.tensor.device.type == "cpu"
        collector = _Collector()
        encoded = collector.encode(value)

        def restored(code: int, data: memoryview) -> object:
            return collector.parts[int.from_bytes(data, "big")] if code == _CODE else msgpack.Ext(code, bytes(data))

        is_on_host = all(part.is_cpu for part in collector.parts if isinstance(part, torch.Tensor))
        return msgspec.msgpack.Decoder(ext_hook=restored).decode(encoded), is_on_host

    def revived(self, tree: object) -> object:
        """What the serializer would have delivered of a tree that came.

        Raises:
            RemoteProtocolError: it has the marks of a tensor or an output, and is none; the serializer would have
                raised whatever its constructors do.
        """
        if not _is_suspect(tree):
            return tree
        try:
            return _decoder._post_process(tree)
        except Exception as error:
            raise RemoteProtocolError(
                f"a payload has the marks of a tensor or an output of vllm, and cannot be made one: {error!r}; run one "
                "release of vllm-omni at both ends"
            ) from error


def _is_suspect(tree: Any) -> bool:
    """Whether the serializer's last step might make something else of a tree. That takes four times as long as this."""
    kind = type(tree)
    if kind is dict:
        return not SUSPECT.isdisjoint(tree) or any(map(_is_suspect, tree.values()))
    if kind is list or kind is tuple:
        return not _LEAVES.issuperset(map(type, tree)) and any(map(_is_suspect, tree))
    return isinstance(tree, dict | list | tuple)  # of a class of its own, which does not stay
