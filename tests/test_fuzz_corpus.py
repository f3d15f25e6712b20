"""What fuzzing has found worth keeping, and random changes of it: understood or refused, and nothing else."""

from __future__ import annotations

import random

import pytest
from fuzz.targets import TARGETS, corpus_of

CHANGES = 300


@pytest.mark.parametrize("target", sorted(TARGETS))
def test_what_is_kept_and_changes_of_it_are_understood_or_refused(target: str) -> None:
    chance = random.Random(target)
    kept = corpus_of(target)
    # Of a seed that nobody understands any more, changes reach nothing that is worth fuzzing.
    understood = [TARGETS[target](data) for data in kept]
    assert any(understood), "no input that is kept is understood: keep a fresh one"
    for _ in range(CHANGES):
        TARGETS[target](changed(chance.choice(kept), chance))


def changed(data: bytes, chance: random.Random) -> bytes:
    """Some bytes are others, gone, or new."""
    copy = bytearray(data)
    for _ in range(chance.randrange(1, 5)):
        at = chance.randrange(len(copy) + 1)
        what = chance.randrange(3)
        if what == 0 and at < len(copy):
            copy[at] = chance.randrange(256)
        elif what == 1:
            del copy[at : at + chance.randrange(1, 9)]
        else:
            copy[at:at] = chance.randbytes(chance.randrange(1, 9))
    return bytes(copy)
