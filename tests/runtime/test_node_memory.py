"""Weights against the memory that there is."""

from __future__ import annotations

import pytest

from laminar_hpc.errors import ConfigError
from laminar_hpc.runtime.memory import GIB, available_bytes, check_memory


def test_the_kernel_says_how_much_is_left() -> None:
    available = available_bytes()
    assert available is not None
    assert GIB // 64 < available < 1 << 50


def test_what_does_not_fit_is_refused_in_one_line() -> None:
    check_memory(1, "3 slots of the weight image")
    with pytest.raises(
        ConfigError, match=r"^weights.slots: 3 slots of the weight image need 1048576.00 GiB on this node, "
    ):
        check_memory(1 << 50, "3 slots of the weight image")
