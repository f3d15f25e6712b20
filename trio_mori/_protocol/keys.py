"""How keys are spelled: one place, for both ends and for clean-up."""

from __future__ import annotations

from .._errors import KeyRefused
from .wire import MAX_KEY


def full_key(key: str, from_stage: str, to_stage: str) -> str:
    """The key on the wire: ``{key}@{from_stage}_{to_stage}``, as vllm-omni spells it.

    Raises:
        KeyRefused: a peer would not accept it, or could take it for the key of another edge.
    """
    if not (isinstance(key, str) and isinstance(from_stage, str) and isinstance(to_stage, str)):
        raise KeyRefused(f"key {key!r} from stage {from_stage!r} to {to_stage!r}: all three have to be strings")
    full = f"{key}@{from_stage}_{to_stage}"
    if len(full) > MAX_KEY:
        raise KeyRefused(
            f"key {full[:40]!r}... has {len(full)} characters with its edge; at most {MAX_KEY} are allowed: shorten it"
        )
    if full.count("_", len(key)) != 1 or full.count("@", len(key)) != 1:
        raise _ambiguous(f"key {key!r}", from_stage, to_stage)
    if not full.isascii():
        try:
            full.encode()
        except UnicodeEncodeError as error:
            raise KeyRefused(f"key {full!r} has no form in UTF-8 ({error.reason}): spell it without that") from None
    return full


def edge_name(from_stage: str, to_stage: str) -> str:
    """An edge as it stands in full keys.

    Raises:
        KeyRefused: another edge has the same name.
    """
    edge = f"{from_stage}_{to_stage}"
    if edge.count("_") != 1 or "@" in edge:
        raise _ambiguous("the edge", from_stage, to_stage)
    return edge


def _ambiguous(what: str, from_stage: str, to_stage: str) -> KeyRefused:
    # Stage 'a_b' to 'c' and 'a' to 'b_c' are spelled alike, and stock peers know no other form.
    return KeyRefused(
        f"{what} from stage {from_stage!r} to {to_stage!r}: the name of a stage has no '_' and no '@', for they divide "
        "the edge on the wire; write '-', or number the stages"
    )


def chunk_key(request_id: str, stage: str, number: int) -> str:
    """The key of a request's chunk, before the edge is added: ``{request}_{stage}_{n}``."""
    return f"{request_id}_{stage}_{number}"


def edge_of(key: str) -> str:
    """The edge of a full key, ``{from}_{to}``; empty when it has none."""
    return key.rpartition("@")[2] if "@" in key else ""


def chunk_owner(key: str) -> str | None:
    """The request whose chunk a full key is, or None when it is not spelled like one.

    The stage inside the key must be the edge's first stage; so ``req-1_extra_0_0@0_1`` belongs to ``req-1_extra``
    and to no ``req-1``.
    """
    base, _, edge = key.rpartition("@")
    head, _, number = base.rpartition("_")
    request, _, stage = head.rpartition("_")
    source = edge.rpartition("_")[0]
    return request if request and stage and stage == source and number.isdecimal() else None


def names_of(key: str) -> tuple[str, ...]:
    """The names under which `cleanup` finds a full key: the key without its edge, and the request whose chunk it is."""
    base = key.rpartition("@")[0]
    owner = chunk_owner(key)
    return (base,) if owner is None else (base, owner)
