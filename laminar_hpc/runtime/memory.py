"""How much memory a node has left, against what weights will take of it."""

from __future__ import annotations

import contextlib

from laminar_hpc.errors import ConfigError

GIB = 1 << 30

TRAINER_SLOTS = 3
"""Versions of its shard that a trainer has room for: one being handed over, the newest waiting, one being written."""


def available_bytes() -> int | None:
    """What this node can still give, by the kernel's estimate and by the limit of this process's cgroup; None: unknown."""
    found = []
    with contextlib.suppress(OSError, ValueError, StopIteration), open("/proc/meminfo", encoding="ascii") as lines:
        found.append(1024 * int(next(line for line in lines if line.startswith("MemAvailable:")).split()[1]))
    with contextlib.suppress(OSError, ValueError):
        with open("/sys/fs/cgroup/memory.max", encoding="ascii") as limit:
            allowed = int(limit.read())  # "max" is no limit
        with open("/sys/fs/cgroup/memory.current", encoding="ascii") as current:
            found.append(allowed - int(current.read()))
    return min(found, default=None)


def has_room(nbytes: int) -> bool:
    """Whether this node can spare `nbytes`, as far as can be seen."""
    available = available_bytes()
    return available is None or nbytes <= available


def check_memory(needed: int, what: str) -> None:
    """ConfigError where this node has not got `needed` bytes left for `what`."""
    available = available_bytes()
    if available is not None and needed > available:
        raise ConfigError(
            f"weights.slots: {what} need {needed / GIB:.2f} GiB on this node, {max(available, 0) / GIB:.2f} GiB are available"
        )
