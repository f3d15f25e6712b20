"""A name of the core that it does not export yet."""

from importlib import import_module
from typing import Any

Portal: Any = import_module("trio_mori._portal").Portal
