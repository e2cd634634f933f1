"""The tree keeps its rules, and each rule finds what breaks it."""

from __future__ import annotations

import re
import typing

import pytest
import rules
from rules import RULES_OF_THE_PACKAGE, RULES_OF_THE_TESTS, Rule
from source_tree import ROOT, Module, modules_of_tests, package_modules

from laminar_hpc.config.schema import Control
from laminar_hpc.policy.modes import MODES


def broken(rule: Rule, modules: tuple[Module, ...]) -> list[str]:
    """What breaks the rule, as FILE:LINE: text."""
    return [f"{module.path}:{line}: {text}" for module in modules for line, text in rule(module)]


def explained(rule: Rule, lines: list[str]) -> str:
    return "\n".join([f"{rule.__name__}: {rule.__doc__}", *lines])


@pytest.mark.parametrize("rule", RULES_OF_THE_PACKAGE, ids=lambda rule: rule.__name__)
def test_the_package_keeps_the_rule(rule: Rule) -> None:
    lines = broken(rule, package_modules())
    assert not lines, explained(rule, lines)


@pytest.mark.parametrize("rule", RULES_OF_THE_TESTS, ids=lambda rule: rule.__name__)
def test_the_tests_keep_the_rule(rule: Rule) -> None:
    lines = broken(rule, modules_of_tests())
    assert not lines, explained(rule, lines)


BROKEN = [
    (rules.imports_go_down, "laminar_hpc/policy/a.py", "from laminar_hpc.control.pool import Pool"),
    (rules.imports_go_down, "laminar_hpc/policy/a.py", "def f():\n    import laminar_hpc.runtime.rank"),
    (rules.imports_go_down, "laminar_hpc/tasks/a.py", "from laminar_hpc.rollout import worker"),
    (rules.imports_go_down, "laminar_hpc/process/a.py", "from laminar_hpc.tasks import worker"),
    (rules.imports_go_down, "laminar_hpc/trainer/a.py", "from laminar_hpc.weights import image"),
    (rules.imports_go_down, "laminar_hpc/weights/manifest.py", "from laminar_hpc.weights.image import Image"),
    (rules.imports_go_down, "laminar_hpc/sim/a.py", "from laminar_hpc.runtime import rank"),
    (rules.imports_go_down, "laminar_hpc/runtime/a.py", "from ..sim import kernel"),
    (rules.imports_go_down, "laminar_hpc/runtime/a.py", "from laminar_hpc.launch import local"),
    (rules.imports_go_down, "laminar_hpc/launch/a.py", "from laminar_hpc.cli import main"),
    (rules.imports_go_down, "analysis/a.py", "from laminar_hpc.runtime.check import check_run"),
    (rules.the_simulator_has_no_clock, "laminar_hpc/sim/a.py", "from time import monotonic"),
    (rules.pure_floors_know_no_world, "laminar_hpc/control/a.py", "import time"),
    (rules.pure_floors_know_no_world, "laminar_hpc/policy/a.py", "import numpy as np"),
    (rules.pure_floors_know_no_world, "laminar_hpc/control/a.py", "from laminar_hpc.config.schema import Config"),
    (rules.pure_floors_know_no_world, "laminar_hpc/policy/a.py", "from random import shuffle"),
    (rules.pure_floors_know_no_world, "laminar_hpc/policy/a.py", "import random\nx = random.random()"),
    (rules.pure_floors_know_no_world, "laminar_hpc/errors.py", "import logging"),
    (rules.pure_floors_know_no_world, "laminar_hpc/protocol/a.py", "print('x')"),
    (rules.pure_floors_know_no_world, "laminar_hpc/weights/reshard.py", "import os"),
    (
        rules.pure_floors_know_no_world,
        "laminar_hpc/control/a.py",
        "from laminar_hpc.weights.digest import chunk_digest",
    ),
    (rules.few_config_modules_open_files, "laminar_hpc/config/schema.py", "open('x')"),
    (rules.libraries_have_one_place, "laminar_hpc/analysis/a.py", "import h5py"),
    (rules.libraries_have_one_place, "laminar_hpc/runtime/a.py", "def f():\n    from mpi4py import MPI"),
    (rules.libraries_have_one_place, "laminar_hpc/weights/image.py", "import xxhash"),
    (rules.libraries_have_one_place, "laminar_hpc/tasks/worker.py", "import torch.nn"),
    (rules.libraries_have_one_place, "laminar_hpc/record/a.py", "import pandas"),
    (rules.nothing_runs_foreign_code, "laminar_hpc/tasks/a.py", "import pickle"),
    (rules.nothing_runs_foreign_code, "laminar_hpc/tasks/a.py", "from os import system"),
    (rules.nothing_runs_foreign_code, "laminar_hpc/tasks/a.py", "x = eval('1')"),
    (rules.nothing_runs_foreign_code, "laminar_hpc/launch/a.py", "subprocess.run('x', shell=True)"),
    (rules.nothing_runs_foreign_code, "laminar_hpc/launch/a.py", "os.system('x')"),
    (rules.nothing_runs_foreign_code, "laminar_hpc/launch/a.py", "f(['pkill', 'x'])"),
    (rules.nothing_runs_foreign_code, "laminar_hpc/record/a.py", "np.load(f, allow_pickle=yes)"),
    (rules.nothing_runs_foreign_code, "laminar_hpc/trainer/a.py", "torch.load(f)"),
    (rules.messages_are_never_pickled, "laminar_hpc/mpi/a.py", "self._comm.send(x, 1)"),
    (rules.messages_are_never_pickled, "laminar_hpc/mpi/a.py", "MPI.COMM_WORLD.bcast(x)"),
    (rules.messages_are_never_pickled, "laminar_hpc/process/a.py", "self.connection.recv()"),
    (rules.modes_are_never_named, "laminar_hpc/control/a.py", "x = mode.name == 'sync'"),
    (rules.modes_are_never_named, "laminar_hpc/control/a.py", "x = mode.name in ('sync', 'other')"),
    (rules.modes_are_never_named, "laminar_hpc/control/a.py", "match name:\n    case 'laminar':\n        pass"),
    (rules.modes_are_never_named, "laminar_hpc/runtime/a.py", "x = MODES['laminar']"),
    (rules.functions_fit_a_screen, "laminar_hpc/a.py", "def f():\n" + "    x = 1\n" * 60),
    (rules.public_names_are_documented, "laminar_hpc/a.py", "x = 1"),
    (rules.public_names_are_documented, "laminar_hpc/a.py", "'''Doc.'''\ndef f():\n    pass"),
    (
        rules.public_names_are_documented,
        "laminar_hpc/a.py",
        "'''Doc.'''\nclass A:\n    '''Doc.'''\n    def f(self):\n        pass",
    ),
    (rules.tests_never_sleep, "tests/a.py", "time.sleep(1)"),
    (rules.tests_never_sleep, "tests/a.py", "from time import sleep"),
]


@pytest.mark.parametrize(("rule", "path", "source"), BROKEN)
def test_a_rule_finds_what_breaks_it(rule: Rule, path: str, source: str) -> None:
    assert len(broken(rule, (Module(path, source),))) == 1


KEPT = [
    (
        rules.imports_go_down,
        "laminar_hpc/control/a.py",
        "from laminar_hpc.policy import modes\nfrom laminar_hpc import __version__",
    ),
    (rules.imports_go_down, "laminar_hpc/protocol/a.py", "from laminar_hpc.errors import ProtocolError"),
    (
        rules.imports_go_down,
        "laminar_hpc/tasks/a.py",
        "from laminar_hpc.process.worker import Worker\nfrom . import build",
    ),
    (rules.imports_go_down, "laminar_hpc/rollout/a.py", "from laminar_hpc.weights.digest import digest"),
    (
        rules.imports_go_down,
        "laminar_hpc/cli.py",
        "import laminar_hpc.launch.local\nimport laminar_hpc.analysis.report",
    ),
    (
        rules.imports_go_down,
        "analysis/a.py",
        "from laminar_hpc.record import reader\nfrom laminar_hpc.analysis import figures",
    ),
    (rules.pure_floors_know_no_world, "laminar_hpc/control/a.py", "from random import Random\nimport heapq, msgspec"),
    (rules.pure_floors_know_no_world, "laminar_hpc/control/a.py", "import random\ndef f(random_: random.Random): ..."),
    (rules.pure_floors_know_no_world, "laminar_hpc/runtime/a.py", "import time"),
    (rules.pure_floors_know_no_world, "laminar_hpc/control/a.py", "from laminar_hpc.weights.reshard import share"),
    (rules.few_config_modules_open_files, "laminar_hpc/config/model_files.py", "open('x')"),
    (rules.libraries_have_one_place, "laminar_hpc/record/reader.py", "import h5py, os, numpy.typing"),
    (rules.nothing_runs_foreign_code, "laminar_hpc/a.py", "'''Never pkill.'''\nre.compile('x')\nf(shell=False)"),
    (
        rules.messages_are_never_pickled,
        "laminar_hpc/mpi/a.py",
        "comm.Send(x)\nself.channel.send(x)\nconnection.send_bytes(x)",
    ),
    (rules.modes_are_never_named, "laminar_hpc/cli.py", "p = ArgumentParser(prog='laminar')\nx = name == 'other'"),
    (rules.functions_fit_a_screen, "laminar_hpc/a.py", "def f():\n" + "    x = 1\n" * 59),
    (
        rules.public_names_are_documented,
        "laminar_hpc/a.py",
        "'''Doc.'''\ndef _f():\n    pass\nclass _A:\n    def f(self):\n        pass",
    ),
    (rules.public_names_are_documented, "laminar_hpc/__init__.py", ""),
    (rules.tests_never_sleep, "tests/a.py", "event.wait(1)\nsubprocess.Popen(['sleep', '9'])"),
]


@pytest.mark.parametrize(("rule", "path", "source"), KEPT)
def test_a_rule_leaves_the_rest_alone(rule: Rule, path: str, source: str) -> None:
    assert broken(rule, (Module(path, source),)) == []


def test_the_tree_is_seen() -> None:
    names = {module.name for module in package_modules()}
    assert {"laminar_hpc", "laminar_hpc.errors", "laminar_hpc.control.controller", "laminar_hpc.jobs.train"} <= names


def test_the_config_allows_the_modes_that_there_are() -> None:
    assert set(typing.get_args(Control.model_fields["mode"].annotation)) == set(MODES)


def test_no_script_kills_by_name() -> None:
    scripts = [
        path for folder in ("jobs", "sbatch", "tests", ".ci") for path in (ROOT / folder).rglob("*") if path.is_file()
    ]
    shell = [path for path in scripts if path.suffix in ("", ".sh", ".sbatch")]
    assert shell
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line}"
        for path in shell
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if re.search(r"\b(pkill|killall)\b", line)
    ]
    assert not found, "\n".join(found)
