"""That this process has file descriptors left, asked before they are needed, and what it is called if it has none."""

from __future__ import annotations

import errno
import os
import resource

from ._errors import NoDescriptors

_SHORT = frozenset({errno.EMFILE, errno.ENFILE})

# Descriptors that have to be free for an event loop, an engine and a sender: they take 24 where the process has none of
# them yet and there are keys, and each peer takes some more. libzmq ends the process if it finds none for its threads.
NEEDED = 32


def require_descriptors(what: str) -> None:
    """See that enough of them are free to open something.

    Args:
        what: What is to be opened, for the message.

    Raises:
        NoDescriptors: fewer than `NEEDED` are.
    """
    taken: list[int] = []
    try:
        taken.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
        while len(taken) < NEEDED:
            taken.append(os.dup(taken[0]))
    except OSError as error:
        if is_shortage(error.errno):
            raise no_descriptors(what, error.errno) from error
        raise
    finally:
        for descriptor in taken:
            os.close(descriptor)


def is_shortage(number: int | None) -> bool:
    """Whether an errno says that no descriptors are left."""
    return number in _SHORT


def no_descriptors(what: str, number: int | None) -> NoDescriptors:
    """The error for an errno that says so."""
    number = number or errno.EMFILE
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    where = "this machine (`sysctl fs.file-max`)" if number == errno.ENFILE else "this process (`ulimit -n`)"
    return NoDescriptors(
        f"cannot open {what}: too few file descriptors are left of the {limit} of this process; raise the limit of "
        f"{where}, or close what is not needed (`ls -l /proc/PID/fd`)",
        limit=limit,
        errno=number,
    )
