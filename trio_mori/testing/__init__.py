"""Fakes of the parts that trio_mori stands on, and the contracts of those parts as tests."""

from ._engine import EngineCall, HeldWrite, MemoryEngine, MemoryFabric
from ._engine_bench import EngineBench
from ._engine_checks import ENGINE_CHECKS, check_engine
from ._gpus import FakeGpus
from ._link_checks import LINK_CHECKS, LinkNetwork, check_link
from ._links import MemoryCable, MemoryDialler, MemoryListener, MemoryNetwork, memory_link_pair

__all__ = [
    "ENGINE_CHECKS",
    "LINK_CHECKS",
    "EngineBench",
    "EngineCall",
    "FakeGpus",
    "HeldWrite",
    "LinkNetwork",
    "MemoryCable",
    "MemoryDialler",
    "MemoryEngine",
    "MemoryFabric",
    "MemoryListener",
    "MemoryNetwork",
    "check_engine",
    "check_link",
    "memory_link_pair",
]
