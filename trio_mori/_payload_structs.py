"""Struct types: what a dataclass, attrs class, msgspec.Struct or namedtuple consists of, and how one is made again.

A rebuilt instance has exactly the values that were sent. Neither `__init__` nor converters nor validators run, with
one exception: msgspec has no way to make an instance but its constructor, so a `__post_init__` runs, and the values are
set once more after it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from enum import Enum
from types import MemberDescriptorType
from weakref import WeakKeyDictionary

import attrs
import msgspec
from msgspec import UNSET

from ._errors import ConfigError, RemoteProtocolError
from ._payload_format import ATTRS, DATACLASS, MSGSPEC, NAMEDTUPLE, Refused, StructClass

# A struct on top of one of these has content beside its fields.
_CONTENT = (dict, list, set, frozenset, str, bytes, bytearray, int, float, complex, BaseException, Enum)

# What an instance's __dict__ may hold beside fields without being content: typing's note of type arguments, and the
# hash that attrs keeps.
_HASH_CACHE = "_attrs_cached_hash"
_NO_CONTENT = frozenset({"__orig_class__", _HASH_CACHE})


@attrs.frozen
class StructType:
    """A struct type of this process.

    Attributes:
        described: It as it stands in headers.
        names: Its fields, as a set.
        extra: What an instance's __dict__ may hold beside them; None when instances have no __dict__.
        defaults: By field index, the default at which the stock encoding leaves the field out.
        slots: Indices of the fields that live in slots, in the order of the stock encoding of attrs classes.
        keeps_hash: It is an attrs class whose instances need a place for their hash.
    """

    described: StructClass
    names: frozenset[str]
    extra: frozenset[str] | None
    defaults: Mapping[int, object]
    slots: Sequence[int]
    keeps_hash: bool


_known: WeakKeyDictionary[type, StructType | None] = WeakKeyDictionary()


def struct_type(cls: type) -> StructType | None:
    """What `cls` is; None when it is no struct type, or one with content beside its fields."""
    try:
        return _known[cls]
    except KeyError:
        found = _known[cls] = _describe(cls)
        return found


def type_name(cls: type) -> str:
    """The name by which sender and receiver mean the same type."""
    return f"{cls.__module__}:{cls.__qualname__}"


def _describe(cls: type) -> StructType | None:
    name = type_name(cls)
    if issubclass(cls, tuple):
        fields = _inherited(cls, "_fields")
        if not isinstance(fields, tuple) or _inherited(cls, "_make") is None:
            return None
        return _struct_type(cls, StructClass(NAMEDTUPLE, name, fields, fields, array_like=True))
    if issubclass(cls, _CONTENT):
        return None
    if issubclass(cls, msgspec.Struct):
        fields, config = cls.__struct_fields__, cls.__struct_config__
        described = StructClass(
            MSGSPEC,
            name,
            fields,
            cls.__struct_encode_fields__,
            array_like=config.array_like,
            tag_field=config.tag_field,
            tag=config.tag,
        )
        return _struct_type(cls, described, _defaults(cls) if config.omit_defaults else {})
    if dataclasses.is_dataclass(cls):
        fields = tuple(each.name for each in dataclasses.fields(cls))
        return _struct_type(cls, StructClass(DATACLASS, name, fields, fields))
    if attrs.has(cls):
        fields = tuple(each.name for each in attrs.fields(cls))
        public = [None if each.startswith("_") else each for each in fields]
        return _struct_type(cls, StructClass(ATTRS, name, fields, public))
    return None


def _struct_type(cls: type, described: StructClass, defaults: Mapping[int, object] | None = None) -> StructType:
    cached = {name for base in cls.__mro__ for name, at in vars(base).items() if type(at) is functools.cached_property}
    code = _inherited(cls, "__hash__")
    return StructType(
        described=described,
        names=frozenset(described.fields),
        extra=_NO_CONTENT | cached if cls.__dictoffset__ else None,
        defaults=defaults or {},
        slots=_slots(cls, described.fields) if described.flavour == ATTRS else (),
        keeps_hash=described.flavour == ATTRS and _HASH_CACHE in _names_used(code),
    )


def _inherited(cls: type, name: str) -> object:
    return next((vars(base)[name] for base in cls.__mro__ if name in vars(base)), None)


def _names_used(function: object) -> Sequence[str]:
    return function.__code__.co_names if isinstance(function, type(_inherited)) else ()


def _defaults(cls: type[msgspec.Struct]) -> dict[int, object]:
    defaults = cls.__struct_defaults__
    first = len(cls.__struct_fields__) - len(defaults)
    return {first + at: default for at, default in enumerate(defaults) if default is not msgspec.NODEFAULT}


def _slots(cls: type, fields: Sequence[str]) -> list[int]:
    """msgspec reads slots from the class downwards to its bases, and within one class as CPython sorts them."""
    order = []
    at: type | None = cls
    while at is not None:
        members = sorted(name for name, member in vars(at).items() if type(member) is MemberDescriptorType)
        order += [fields.index(name) for name in members if name in fields]
        at = at.__base__
    return order


def values_of(value: object, kind: StructType) -> list[object]:
    """The values of a struct's fields, in order.

    Raises:
        Refused: a field has no value, or the instance has content beside its fields.
    """
    if kind.extra is not None:
        beside = [name for name in vars(value) if name not in kind.names and name not in kind.extra]
        if beside:
            raise Refused(
                f"is not a field of {kind.described.name}, and only fields travel: declare it, or send it beside"
            ).inside(f".{beside[0]}", value)
    if isinstance(value, tuple):
        return list(value)
    values = []
    for name in kind.described.fields:
        try:
            values.append(getattr(value, name))
        except AttributeError:
            raise Refused(f"is a field of {kind.described.name} that was never set: set it").inside(
                f".{name}", value
            ) from None
    return values


def stock_order(value: object, kind: StructType, values: Sequence[object]) -> list[int] | None:
    """Which fields the stock encoding has, in its order; None: all that have an encoded name, as declared."""
    encoded = kind.described.encoded
    if kind.described.array_like:
        return None
    declared = [index for index, name in enumerate(encoded) if name is not None]
    order = declared
    if kind.described.flavour == ATTRS:
        held = vars(value) if kind.extra is not None else ()
        fields = kind.described.fields
        found = [*(fields.index(name) for name in held if name in kind.names), *kind.slots]
        order = [index for index in found if encoded[index] is not None]
    kept = [index for index in order if values[index] is not UNSET and not _is_default(values[index], kind, index)]
    return None if kept == declared else kept


def _is_default(value: object, kind: StructType, index: int) -> bool:
    """Whether msgspec takes a value for its field's default: the same object, or an empty container of its factory."""
    if index not in kind.defaults:
        return False
    default = kind.defaults[index]
    if value is default:
        return True
    # The type of what `field(default_factory=...)` leaves in a class has no public name.
    factory = default.factory if type(default).__name__ == "Factory" else None  # type: ignore[attr-defined]
    return type(value) in (list, dict, set) and factory is type(value) and not value


def rebuild(cls: type, described: StructClass, values: Sequence[object]) -> object:
    """An instance of the listed type `cls` with the values that a peer sent.

    Raises:
        ConfigError: `cls` is no struct type.
        RemoteProtocolError: the peer's type has other fields or is of another make.
    """
    kind = struct_type(cls)
    if kind is None:
        raise ConfigError(
            f"{type_name(cls)} in payload_types is no dataclass, attrs class, msgspec.Struct or namedtuple: remove it",
            key="payload_types",
            value=cls,
        )
    if kind.described.flavour != described.flavour or kind.names != frozenset(described.fields):
        raise RemoteProtocolError(
            f"{described.name} is another type at the peer: it has the fields {tuple(described.fields)} there and "
            f"{tuple(kind.described.fields)} here. Run one version on both sides, or take it out of payload_types"
        )
    by_name = dict(zip(described.fields, values, strict=True))
    if issubclass(cls, tuple):
        return tuple.__new__(cls, [by_name[name] for name in kind.described.fields])
    try:
        if issubclass(cls, msgspec.Struct):
            struct = cls(**by_name)
            for name, value in by_name.items():
                msgspec.structs.force_setattr(struct, name, value)
            return struct
        instance: object = object.__new__(cls)
        for name, value in by_name.items():
            object.__setattr__(instance, name, value)
        if kind.keeps_hash:
            object.__setattr__(instance, _HASH_CACHE, None)
        return instance
    except (TypeError, ValueError, AttributeError) as error:
        raise RemoteProtocolError(f"{described.name} cannot be made of what the peer sent: {error}") from error
