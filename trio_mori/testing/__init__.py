"""Fakes of the parts that trio_mori stands on, and the contracts of those parts as tests."""

from ._link_checks import LINK_CHECKS, LinkNetwork, check_link
from ._links import MemoryCable, MemoryDialler, MemoryListener, MemoryNetwork, memory_link_pair

__all__ = [
    "LINK_CHECKS",
    "LinkNetwork",
    "MemoryCable",
    "MemoryDialler",
    "MemoryListener",
    "MemoryNetwork",
    "check_link",
    "memory_link_pair",
]
