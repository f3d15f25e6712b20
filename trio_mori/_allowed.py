"""What a configuration value may be: one check per kind of value, which also says in words what it allows.

A check takes any object and returns the value to keep, or raises `NotAllowed`. It never looks at anything else, so
that the words in an error, in the documentation and in the code are the same ones.
"""

from __future__ import annotations

import difflib
import ipaddress
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any, Protocol, TypeVar

import attrs

from ._errors import ConfigError

Kept = TypeVar("Kept", covariant=True)

# How alike a key and a known one are where it is taken for a misspelling: 'stage' and 'stages' are, 'engine_args' and
# 'stage_args' are not.
_HARDLY_ANOTHER = 0.85

# What a size may be written with, and how many times 1024 that is.
_UNITS = {"k": 1, "m": 2, "g": 3, "t": 4}

# The longest piece of a given value that an error repeats: a line of a terminal.
_SHOWN = 80


class NotAllowed(Exception):
    """A value is outside what its check allows; the text is a remedy for this very value, or empty."""


class Check(Protocol[Kept]):
    """Decides on one kind of value."""

    @property
    def allowed(self) -> str:
        """What may be given, to be read after "give"."""

    def __call__(self, value: object) -> Kept:
        """The value to keep.

        Raises:
            NotAllowed: it is not one of those allowed.
        """


def show(value: object) -> str:
    """A value as an error message repeats it: short, whatever it is."""
    if isinstance(value, str):
        return repr(value if len(value) <= _SHOWN else value[:_SHOWN] + "...")
    if isinstance(value, int) and value.bit_length() > 64:
        return f"an integer of {value.bit_length()} bits"
    if value is None or isinstance(value, (int, float)):
        return repr(value)
    return f"a value of type {type(value).__name__}"


def near(word: object, known: Iterable[str]) -> str:
    """The remedy for a misspelt word: ``did you mean 'x'?``, or nothing."""
    if not isinstance(word, str) or len(word) > _SHOWN:
        return ""
    spellings = {name.lower(): name for name in known}
    close = difflib.get_close_matches(word.lower(), spellings, n=2)
    return f"did you mean {' or '.join(repr(spellings[name]) for name in close)}?" if close else ""


def misspelt(word: str, present: Iterable[object], known: Iterable[str]) -> str | None:
    """The key among those present that was meant to be `word`, which is not among them: it is hardly another one."""
    others = [key for key in present if isinstance(key, str) and len(key) <= _SHOWN and key not in known]
    return next(iter(difflib.get_close_matches(word, others, n=1, cutoff=_HARDLY_ANOTHER)), None)


def checked(check: Check[object], default: object, meaning: str) -> Any:
    """An attrs field whose values go through a check; a refusal is a `ConfigError`. Check and meaning are its metadata.

    Any is what `attrs.field` returns to a type checker, too.
    """

    def convert(value: object, field: attrs.Attribute[object]) -> object:
        try:
            return check(value)
        except NotAllowed as refusal:
            remedy = f" ({refusal})" if str(refusal) else ""
            message = f"{field.name}: {show(value)} is not allowed; give {check.allowed}{remedy}"
            raise ConfigError(message, key=field.name, value=value) from None

    return attrs.field(
        default=default,
        converter=attrs.Converter(convert, takes_field=True),
        metadata={"allowed": check.allowed, "meaning": meaning},
    )


@attrs.frozen
class Integer:
    """An integer within bounds, or one of a few outside them. A bool is none, nor is a string of digits."""

    low: int
    high: int
    also: tuple[int, ...] = ()
    note: str = ""
    multiple: int = 1
    in_bytes: bool = False

    @property
    def allowed(self) -> str:
        return (
            "".join(f"{number} or " for number in self.also) + f"an integer from {self.low} to {self.high}{self.note}"
        )

    def __call__(self, value: object) -> int:
        if isinstance(value, str) and value.strip().lstrip("+-").isdigit():
            raise NotAllowed("leave out the quotes")
        if self.in_bytes and (size := _size_in_words(value)):
            raise NotAllowed(f"write {size} for {value}")
        if isinstance(value, bool) or not isinstance(value, int):
            raise NotAllowed
        if value in self.also:
            return value
        if not self.low <= value <= self.high:
            raise NotAllowed
        return -(-value // self.multiple) * self.multiple


def _size_in_words(value: object) -> int:
    """The bytes that a text such as 512MB or 1.5 GiB means; 0 if it means none."""
    words = value.lower() if isinstance(value, str) else ""
    found = re.fullmatch(r"\s*([0-9]{1,6}(?:\.[0-9]{1,6})?)\s*([kmgt])(?:i?b)?\s*", words)
    return 0 if found is None else int(float(found[1]) * 1024 ** _UNITS[found[2]])


@attrs.frozen
class Number:
    """A finite number within bounds, kept as a float."""

    noun: str
    above: float | None = None
    at_least: float | None = None
    below: float | None = None
    at_most: float | None = None

    @property
    def allowed(self) -> str:
        bounds = [
            f"{word} {bound:g}"
            for word, bound in (
                ("above", self.above),
                ("at least", self.at_least),
                ("below", self.below),
                ("at most", self.at_most),
            )
            if bound is not None
        ]
        return f"{self.noun}, {' and '.join(bounds)}"

    def __call__(self, value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise NotAllowed
        try:
            number = float(value)
        except OverflowError:
            raise NotAllowed from None
        if (
            not math.isfinite(number)
            or (self.above is not None and not number > self.above)
            or (self.at_least is not None and not number >= self.at_least)
            or (self.below is not None and not number < self.below)
            or (self.at_most is not None and not number <= self.at_most)
        ):
            raise NotAllowed
        return number


@attrs.frozen
class Choice:
    """One of a few words, in any case; kept in lower case."""

    words: tuple[str, ...]
    remedies: Mapping[str, str] = attrs.field(factory=dict)

    @property
    def allowed(self) -> str:
        return "one of " + ", ".join(self.words)

    def __call__(self, value: object) -> str:
        if value is False and "off" in self.words:  # what YAML makes of an off without quotes
            return "off"
        if not isinstance(value, str):
            raise NotAllowed
        word = value.lower()
        if word not in self.words:
            raise NotAllowed(self.remedies.get(word) or near(word, self.words))
        return word


@attrs.frozen
class Device:
    """Where tensors live: ``cpu``, ``cuda`` or ``cuda:N``, or one of a few words."""

    also: tuple[str, ...] = ()

    @property
    def allowed(self) -> str:
        return "".join(f"{word}, " for word in self.also) + "cpu, cuda or cuda:N"

    def __call__(self, value: object) -> str:
        if isinstance(value, str) and value.lower() in self.also:
            return value.lower()
        if not isinstance(value, str) or not re.fullmatch(r"cpu|cuda(:(0|[1-9][0-9]{0,2}))?", value.lower()):
            raise NotAllowed("ROCm devices are named cuda too" if value in ("hip", "rocm", "gpu") else "")
        return value.lower()


@attrs.frozen
class Text:
    """A short printable text without spaces, or an empty one."""

    noun: str

    @property
    def allowed(self) -> str:
        return f"{self.noun}, without spaces, or an empty string"

    def __call__(self, value: object) -> str:
        if not isinstance(value, str) or not re.fullmatch(r"[\x21-\x7e]{0,255}", value):
            raise NotAllowed
        return value


@attrs.frozen
class AbsolutePath:
    """The absolute path of a file or directory, or an empty text. It is not looked for."""

    noun: str

    @property
    def allowed(self) -> str:
        return f"{self.noun}, without spaces, or an empty string"

    def __call__(self, value: object) -> str:
        path = Text(self.noun)(value)
        if path and not path.startswith("/"):
            raise NotAllowed("begin it with a slash: it has to mean the same wherever a stage runs")
        return path


@attrs.frozen
class Host:
    """An IPv4 or IPv6 address, a host name, or one of a few words."""

    words: tuple[str, ...] = ()

    @property
    def allowed(self) -> str:
        return "".join(f"{word}, " for word in self.words) + "an IPv4 or IPv6 address (no brackets) or a host name"

    def __call__(self, value: object) -> str:
        if not isinstance(value, str):
            raise NotAllowed
        if value.lower() in self.words:
            return value.lower()
        if re.fullmatch(r"\w+://.*|[^:]*:[0-9]+|\[.*\].*", value):
            raise NotAllowed("write the bare address; the port has a key of its own")
        if not re.fullmatch(r"[A-Za-z0-9_.:%-]{1,253}", value):
            raise NotAllowed
        try:
            address = ipaddress.ip_address(value)
        except ValueError:
            if re.fullmatch(r"[0-9.]+|.*[:%].*|[-.].*", value):
                raise NotAllowed from None
            return value
        if address.is_unspecified:
            raise NotAllowed("nobody can dial that address")
        return value


@attrs.frozen
class OrNull:
    """What another check allows, or null, or a word that stands for null."""

    check: Check[object]
    meaning: str
    word: str | None = None

    @property
    def allowed(self) -> str:
        word = f" or {self.word}" if self.word else ""
        return f"{self.check.allowed}, or null{word} ({self.meaning})"

    def __call__(self, value: object) -> object:
        if value is None or (self.word is not None and value == self.word):
            return None
        return self.check(value)
