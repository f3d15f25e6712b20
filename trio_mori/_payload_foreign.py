"""numpy arrays and scalars and PIL images, without depending on numpy or PIL.

A payload can only hold one of these if its sender has imported the library; a receiver imports it when the first one
arrives.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

from ._errors import UnsupportedPayload
from ._payload_format import Refused, nbytes_of

# What `dtype.str` gives for dtypes whose elements are plain bytes: booleans, numbers, times, and strings and opaque
# bytes of a fixed length. Checked before it reaches `numpy.dtype`, which understands far more than that.
_ARRAY_DTYPE = re.compile(
    r"\|b1|[<>|][iu][1248]|[<>]f(?:2|4|8|12|16)|[<>]c(?:8|16|24|32)|\|[SV][1-9]\d{0,8}|[<>]U[1-9]\d{0,8}"
    r"|[<>][mM]8(?:\[(?:[1-9]\d{0,8})?(?:Y|M|W|D|h|m|s|ms|us|ns|ps|fs|as)\])?"
)

# Bytes per pixel; mode "1" packs eight pixels into one. Palettes are not part of the pixels, so P and PA are not here.
_PIXEL: Mapping[str, int] = {
    "1": 0,
    "L": 1,
    "LA": 2,
    "La": 2,
    "RGB": 3,
    "YCbCr": 3,
    "LAB": 3,
    "HSV": 3,
    "RGBA": 4,
    "RGBa": 4,
    "RGBX": 4,
    "CMYK": 4,
    "I": 4,
    "F": 4,
    "I;16": 2,
    "I;16L": 2,
    "I;16B": 2,
    "I;16N": 2,
}

# Modes whose every band has one byte: the others are changed by the stock serializer, which makes uint8 of them.
BAND_MODES: Mapping[str, int] = {
    mode: size for mode, size in _PIXEL.items() if size and mode not in ("I", "F") and not mode.startswith("I;")
}


def imported(name: str) -> ModuleType | None:
    """numpy or PIL.Image if this process has imported it."""
    return sys.modules.get(name)


def required(name: str, what: str) -> ModuleType:
    """numpy or PIL.Image, imported now.

    Raises:
        UnsupportedPayload: it cannot be imported.
    """
    try:
        return sys.modules.get(name) or importlib.import_module(name)
    except ImportError as error:
        package = {"numpy": "numpy", "PIL.Image": "pillow"}[name]
        raise UnsupportedPayload(
            f"the payload that arrived holds {what}; {name} cannot be imported here ({error}): pip install {package}",
            path="payload",
        ) from error


def array_dtype(array: Any) -> str:
    """The dtype of an array or scalar as it travels.

    Raises:
        Refused: its elements are not plain bytes, or that string would not give the same dtype back.
    """
    numpy = required("numpy", "a numpy array")
    name: str = array.dtype.str
    if not _ARRAY_DTYPE.fullmatch(name) or numpy.dtype(name) != array.dtype:
        raise Refused(
            f"is a numpy {type(array).__name__} of dtype {array.dtype}, which cannot travel bit for bit: send arrays "
            "of numbers, times or strings of a fixed length, and the fields of a structured array one by one"
        )
    return name


def itemsize_of(dtype: str) -> int:
    """Bytes of an element of a dtype that came over the wire; 0 if it is none."""
    if not _ARRAY_DTYPE.fullmatch(dtype):
        return 0
    numpy = required("numpy", "a numpy array or scalar")
    try:
        size: int = numpy.dtype(dtype).itemsize
    except (TypeError, ValueError, OverflowError):
        return 0
    return size


def array_address(array: Any) -> int:
    """Where the bytes of an array begin."""
    address: int = array.__array_interface__["data"][0]
    return address


def new_array(dtype: str, shape: Sequence[int]) -> Any:
    """An array of its own memory, not initialised. The dtype has been checked by `itemsize_of`.

    Raises:
        ValueError: more dimensions than this numpy has.
    """
    numpy = required("numpy", "a numpy array")
    return numpy.empty(shape, dtype=numpy.dtype(dtype))


def new_scalar(dtype: str, data: bytes) -> object:
    """A numpy scalar of its bytes, of which there are as many as the dtype has."""
    numpy = required("numpy", "a numpy scalar")
    scalar: object
    if dtype[1] == "S":
        scalar = numpy.bytes_(data)  # as an element it would lose the zeros at its end
    elif dtype[1] == "U":
        scalar = numpy.str_(data.decode("utf-32-be" if dtype[0] == ">" else "utf-32-le", "surrogatepass"))
    else:
        scalar = numpy.frombuffer(data, dtype=numpy.dtype(dtype))[0]
    return scalar


def image_nbytes(mode: str, width: int, height: int) -> int:
    """Bytes of an image's pixels; -1 if the mode is unknown or there are no pixels."""
    if mode not in _PIXEL or width < 1 or height < 1:
        return -1
    if mode == "1":
        return nbytes_of((width + 7) // 8, (height,))
    return nbytes_of(_PIXEL[mode], (width, height))


def check_image(image: Any) -> int:
    """Bytes of an image's pixels, which are loaded if they were not.

    Raises:
        Refused: its pixels are not all there is to it, or cannot be loaded.
    """
    try:
        image.load()
    except (OSError, ValueError, SyntaxError) as error:
        raise Refused(f"is a PIL image that cannot be loaded: {error}") from error
    size = image_nbytes(image.mode, *image.size)
    if size < 0:
        raise Refused(
            f"is a PIL image of mode {image.mode} and size {image.size}, which cannot travel: "
            "convert one with a palette to RGB or RGBA first; one without pixels has nothing to send"
        )
    return size


def new_image(mode: str, width: int, height: int, pixels: bytes) -> object:
    """A PIL image of its pixels, whose length has been checked."""
    image: object = required("PIL.Image", "an image").frombytes(mode, (width, height), pixels)
    return image
