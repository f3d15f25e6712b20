"""Memory that a write may touch for the rest of the process."""

from __future__ import annotations

import ctypes


def keep_for_ever(*objects: object) -> None:
    """Take a reference that is never dropped, not even when the interpreter shuts down.

    A list in a module is emptied at exit, while a thread may still be copying into what it held.
    """
    for one in objects:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(one))


def let_go(*objects: object) -> None:
    """Give back the reference that `keep_for_ever` took."""
    for one in objects:
        ctypes.pythonapi.Py_DecRef(ctypes.py_object(one))
