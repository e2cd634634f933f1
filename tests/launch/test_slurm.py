"""Where the ranks of a job go on the nodes of an allocation, and what is said when they do not fit; no Slurm needed."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laminar_hpc.config.schema import Config
from laminar_hpc.errors import ConfigError
from laminar_hpc.launch import slurm
from laminar_hpc.launch.mpiexec import command_line
from laminar_hpc.launch.slurm import Allocation, Need, Node, fewest_nodes, open_allocation, place, repeated
from laminar_hpc.policy.roles import Role, assign


def nodes(*slots: int, gpus: int | None = None) -> list[Node]:
    """Nodes n1, n2, ... with so many slots."""
    return [Node(f"n{index + 1}", count, gpus) for index, count in enumerate(slots)]


README = Need(trainers=4, relays=2, ranks=5, gpus=4)
"""The job of README's "On a cluster": 4 trainers, 2 relays, 8 rollouts."""


@pytest.mark.parametrize(
    ("there", "expected"),
    [
        (nodes(5, 5, 5), [("n1", 5), ("n2", 5), ("n3", 5)]),
        (nodes(5, 5, 5, gpus=4), [("n1", 5), ("n2", 5), ("n3", 5)]),
        (nodes(5, 5, 5, 5), [("n1", 5), ("n2", 5), ("n3", 5)]),  # the last one is spare
        (nodes(3, 2, 5, 5), [("n1", 3), ("n2", 2), ("n3", 5), ("n4", 5)]),
        (nodes(5, 3, 5, 5), [("n1", 5), ("n3", 5), ("n4", 5)]),  # n2 is too small for rollouts
        (nodes(8, 8), [("n1", 8), ("n2", 7)]),  # manager and 2 trainers beside the first relay
        (nodes(10, 5), [("n1", 10), ("n2", 5)]),
        (nodes(4, 6, 5), [("n1", 4), ("n2", 6), ("n3", 5)]),  # one trainer beside the first relay
        (nodes(8, 8, gpus=4), None),  # slots enough, but no GPU for a trainer beside 4 rollouts
        (nodes(8, 8, gpus=6), [("n1", 8), ("n2", 7)]),
        (nodes(5, 5), None),
        (nodes(20), None),  # a relay each needs a node
        ([], None),
    ],
)
def test_where_the_ranks_go(there: list[Node], expected: list[tuple[str, int]] | None) -> None:
    assert place(README, there) == expected


def test_a_small_job_fits_onto_one_node_and_takes_a_second_one_where_it_may() -> None:
    need = Need(trainers=1, relays=1, ranks=3, gpus=2)
    assert place(need, nodes(5)) == [("n1", 5)]
    assert place(need, nodes(5, 5)) == [("n1", 2), ("n2", 3)]


@given(
    trainers=st.integers(1, 6),
    relays=st.integers(1, 4),
    share=st.integers(1, 4),
    spares=st.integers(0, 2),
    slots=st.lists(st.integers(1, 12), max_size=7),
)
def test_every_placement_is_one_that_the_roles_can_be_assigned_on(
    trainers: int, relays: int, share: int, spares: int, slots: list[int]
) -> None:
    there = nodes(*slots)
    found = place(Need(trainers, relays, 1 + spares + share, share), there)
    if found is None:
        group = 1 + spares + share  # what cannot be for want of slots alone: too few in all, or no room for the relays
        usable = sorted((count for count in slots if count >= group), reverse=True)
        assert sum(slots) < 1 + trainers + relays * group or len(usable) < relays or len(set(slots)) > 1
        return
    room = {node.name: node.slots for node in there}
    assert all(0 < count <= room[name] for name, count in found)
    assert [name for name, _ in found] == [node.name for node in there if node.name in dict(found)]
    roles = assign([name for name, count in found for _ in range(count)], trainers, relays, share * relays, spares)
    assert [one.role for one in roles].count(Role.TRAINER) == trainers


def test_how_many_nodes_are_needed() -> None:
    assert fewest_nodes(README, nodes(5, 5, 5, 5)) == 3
    assert fewest_nodes(README, nodes(8, 8, 8, 8)) == 2
    assert fewest_nodes(README, nodes(5, 5)) is None


@pytest.mark.parametrize(
    ("text", "numbers"), [("5(x2),3", [5, 5, 3]), ("4", [4]), ("2,1(x3),2", [2, 1, 1, 1, 2]), ("", [])]
)
def test_numbers_of_nodes_in_short(text: str, numbers: list[int]) -> None:
    assert repeated(text) == numbers


def test_what_is_no_number_of_nodes_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"looks like 5\(x2\),3, got '5\*2'"):
        repeated("5*2")


CONFIG = Config(
    run_dir="/run",
    model={"path": "model"},
    job={"trainers": 4, "relays": 2, "rollouts": 8},
    rollout={"tensor_parallel": 1},
)


def test_the_mpiexec_line_names_each_node_and_its_ranks() -> None:
    allocation = Allocation("7", nodes(5, 5, 5, 5))
    line = command_line(CONFIG, ["--run-dir", "/run"], allocation.hosts(CONFIG), allocation.options())
    program = [sys.executable, "-m", "laminar_hpc.jobs.train", "--run-dir", "/run"]
    step = f"--overlap --job-name=laminar-{os.getpid()}"
    assert line[1:] == [
        *("--with-ft", "ulfm", "--bind-to", "none", "--oversubscribe", "--prtemca", "plm_slurm_args", step),
        *("-n", "5", "--host", "n1", *program, ":"),
        *("-n", "5", "--host", "n2", *program, ":"),
        *("-n", "5", "--host", "n3", *program),
    ]


def test_a_daemon_is_not_held_to_the_cpus_of_one_rank() -> None:
    allocation = Allocation("7", nodes(5, 5))
    assert allocation.environment({"SLURM_CPUS_PER_TASK": "8", "SLURM_JOB_ID": "7"}) == {"SLURM_JOB_ID": "7"}


def test_an_allocation_that_can_never_hold_the_job_says_what_it_lacks() -> None:
    with pytest.raises(ConfigError) as refused:
        Allocation("7", nodes(4, 4, 4)).hosts(CONFIG)
    assert str(refused.value) == (
        "job: its 15 ranks do not fit into the allocation: 2 rollout nodes with 5 ranks each, and 5 ranks for manager and "
        "trainers; allowed ranks are n1: 4, n2: 4, n3: 4 (--ntasks-per-node)"
    )


def program(folder: Path, name: str, text: str) -> None:
    """An executable that stands where Slurm's would."""
    path = folder / name
    path.write_text("#!/bin/sh\n" + text)
    path.chmod(0o755)


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Slurm's programs: `squeue` knows steps of several names, `srun` fails on n2 and never ends on n3, all is logged."""
    folder, log = tmp_path / "bin", tmp_path / "log"
    folder.mkdir()
    program(folder, "scontrol", f'echo "$@" >> {log}; printf "n1\\nn2\\nn3\\nn4\\n"')
    program(
        folder,
        "squeue",
        f'printf "7.0 laminar-{os.getpid()}\\n7.1 prted\\n7.batch batch\\n7.3 laminar-{os.getpid()}\\n"',
    )
    program(folder, "scancel", f'echo scancel "$@" >> {log}')
    program(folder, "srun", 'case "$*" in *nodelist=n2*) exit 1;; *nodelist=n3*) exec cat /dev/zero > /dev/null;; esac')
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return log


SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NODELIST": "n[1-4]",
    "SLURM_JOB_NUM_NODES": "4",
    "SLURM_TASKS_PER_NODE": "5(x4)",
}


def test_an_allocation_is_read_from_the_batch_scripts_environment(commands: Path) -> None:
    allocation = open_allocation({**SLURM, "SLURM_GPUS_ON_NODE": "4"})
    assert allocation is not None
    assert allocation.nodes == nodes(5, 5, 5, 5, gpus=4)
    assert commands.read_text() == "show hostnames n[1-4]\n"
    assert open_allocation({}) is None
    assert open_allocation({**SLURM, "SLURM_JOB_NUM_NODES": "1"}) is None
    with pytest.raises(ConfigError, match="names 4 nodes, SLURM_TASKS_PER_NODE '5' is for 1"):
        open_allocation({**SLURM, "SLURM_TASKS_PER_NODE": "5"})


def test_nodes_that_do_not_answer_in_time_are_left_out_and_dead_steps_are_cancelled(
    commands: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm, "PROBE_S", 1.0)
    allocation = Allocation("7", nodes(5, 5, 5, 5))
    began_s = time.monotonic()
    assert allocation.look() == ["n2", "n3"]
    assert time.monotonic() - began_s < 10.0
    assert commands.read_text() == "scancel 7.0 7.3\n"
    assert allocation.silent == ["n2", "n3"]
    assert allocation.look() == []  # they are known
    with pytest.raises(ConfigError) as refused:
        allocation.hosts(CONFIG)
    assert str(refused.value) == "2 of 4 nodes answer, the job needs 3; no answer from n2, n3"


def test_slurm_without_its_programs_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="Slurm job 7: there is no `scontrol` on PATH"):
        open_allocation(SLURM)


def test_a_command_that_fails_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in slurm.PROGRAMS:
        program(tmp_path, name, 'echo "slurm_load_node: Unable to contact\nslurm controller" >&2; exit 1')
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(
        ConfigError, match=r"`scontrol show hostnames` failed: slurm_load_node: Unable to contact slurm"
    ):
        open_allocation(SLURM)
