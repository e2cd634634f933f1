"""What the command says when it is asked for nothing."""

from __future__ import annotations

import pytest

from laminar_hpc.cli import main


def test_the_bare_command_prints_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("usage: laminar ")
    assert all(f"\n    {command} " in printed.out for command in ("run", "report", "bench", "model"))
    assert printed.err == ""
