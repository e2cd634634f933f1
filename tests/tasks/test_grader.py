"""The grader against real worker processes, well-behaved and hostile ones."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import hostile_worker
import numpy as np
import pytest

from laminar_hpc.config.schema import Config
from laminar_hpc.errors import EngineError
from laminar_hpc.process.channel import wait_any
from laminar_hpc.process.worker import WorkerMain
from laminar_hpc.protocol.trajectory import Purpose, Verdict
from laminar_hpc.tasks import worker as task_worker
from laminar_hpc.tasks.grader import MAX_DEATHS, Grader, Outcome
from laminar_hpc.tasks.tokenizer import Tokenizer

TRAIN, EVALUATION = Purpose.TRAIN, Purpose.EVALUATION
GRADED, RAISED, DEADLINE = Verdict.GRADED, Verdict.RAISED, Verdict.DEADLINE
DEADLINE_S = 0.5
PATIENCE_S = 30.0

pytestmark = pytest.mark.usefixtures("forkserver")

MakeConfig = Callable[..., Config]
Start = Callable[..., Grader]


@pytest.fixture
def start(make_config: MakeConfig, tmp_path: Path) -> Iterator[Start]:
    """Starts a grader; its worker is gone after the test."""
    with contextlib.ExitStack() as stack:

        def start_grader(main: WorkerMain = hostile_worker.main, **sections: dict[str, object]) -> Grader:
            sections.setdefault("task", {"deadline_s": PATIENCE_S})
            grader = Grader(make_config(**sections), str(tmp_path / "task.log"), main)
            stack.callback(grader.stop, 0.1)
            grader.start(time.monotonic())
            return grader

        yield start_grader


@pytest.fixture
def tokens_of(model_dir: Path) -> Callable[[str], bytes]:
    """Text as a response's bytes."""
    tokenizer = Tokenizer(str(model_dir))
    return lambda text: np.asarray(tokenizer.encode(text), "<i4").tobytes()


def collect(grader: Grader, count: int) -> list[Outcome]:
    """The next `count` outcomes; the test fails where they do not come."""
    outcomes: list[Outcome] = []
    begun = time.monotonic()
    while len(outcomes) < count:
        assert time.monotonic() - begun < PATIENCE_S, f"{outcomes}, waiting for {grader.waiting_for()}"
        wait_any(grader.channels(), 0.02)
        outcomes += grader.poll(time.monotonic())
    return outcomes


def verdicts(outcomes: list[Outcome]) -> dict[int, Verdict | None]:
    return {outcome.trajectory: outcome.verdict for outcome in outcomes}


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


def test_prompts_and_rewards_of_a_real_task(start: Start, model_dir: Path, tokens_of: Callable[[str], bytes]) -> None:
    one_term = {"min_terms": 1, "max_terms": 1}
    grader = start(task_worker.main, task={"parameters": one_term, "prompts": 50}, evaluation={"prompts": 7})
    grader.encode(1, TRAIN, 3)
    grader.encode(2, EVALUATION, 6)
    first, second = collect(grader, 2)
    assert grader.up is not None
    assert (grader.up.prompts, grader.up.held_out) == (50, 7)
    assert [first.trajectory, second.trajectory] == [1, 2]
    assert first.tokens is not None
    text = Tokenizer(str(model_dir)).decode(np.frombuffer(first.tokens, "<i4").tolist())
    assert text.startswith("State the final answer")
    number = text.split()[-2]
    grader.grade(1, TRAIN, 3, tokens_of(f" {number}"))
    grader.grade(2, TRAIN, 3, tokens_of("no"))
    right, wrong = collect(grader, 2)
    assert right == Outcome(1, verdict=GRADED, reward=1.0)
    assert wrong.verdict is GRADED
    assert wrong.reward < 1.0
    assert grader.waiting_for() == ""
    assert grader.restarts == 0


@pytest.mark.parametrize(
    ("response", "reason"),
    [
        ("raise", "ValueError: two lines"),
        ("exit", "SystemExit: leaving"),
        ("memory", "MemoryError"),
        ("nan", "ValueError: the reward is nan"),
        ("inf", "ValueError: the reward is inf"),
        ("words", "ValueError: could not convert"),
    ],
)
def test_a_verifier_that_raises_gives_no_reward(
    start: Start, tokens_of: Callable[[str], bytes], response: str, reason: str
) -> None:
    grader = start()
    for trajectory, text in enumerate(["0.25", response, "1"]):
        grader.grade(trajectory, TRAIN, 0, tokens_of(text))
    before, raised, after = collect(grader, 3)
    assert before == Outcome(0, verdict=GRADED, reward=0.25)
    assert raised.verdict is RAISED
    assert raised.reason.startswith(reason)
    assert after == Outcome(2, verdict=GRADED, reward=1.0)
    assert grader.restarts == 0


def test_a_verifier_that_hangs_loses_its_own_trajectory_only(start: Start, tokens_of: Callable[[str], bytes]) -> None:
    grader = start(task={"deadline_s": DEADLINE_S})
    grader.encode(10, TRAIN, 1)
    collect(grader, 1)
    hung = grader.pid
    for trajectory, text in enumerate(["1", "hang", "0", "hang", "0.5"]):
        grader.grade(trajectory, TRAIN, 0, tokens_of(text))
    grader.encode(11, TRAIN, 2)
    begun = time.monotonic()
    outcomes = collect(grader, 6)
    assert time.monotonic() - begun > 2 * DEADLINE_S
    assert [outcome.trajectory for outcome in outcomes] == [0, 1, 2, 3, 4, 11]
    assert verdicts(outcomes) == {0: GRADED, 1: DEADLINE, 2: GRADED, 3: DEADLINE, 4: GRADED, 11: None}
    assert "task.deadline_s = 0.5" in outcomes[1].reason
    assert outcomes[5].tokens == tokens_of("train 2")
    assert grader.restarts == 2
    assert hung is not None
    assert is_gone(hung)


def test_a_verifier_that_ends_the_process_loses_its_own_trajectory_only(
    start: Start, tokens_of: Callable[[str], bytes]
) -> None:
    grader = start()
    texts = ["die"] * (MAX_DEATHS + 1) + ["1"]
    for trajectory, text in enumerate(texts):
        grader.grade(trajectory, TRAIN, 0, tokens_of(text))
    outcomes = collect(grader, len(texts))
    assert [outcome.verdict for outcome in outcomes] == [RAISED] * (MAX_DEATHS + 1) + [GRADED]
    assert "died while grading" in outcomes[0].reason
    assert grader.restarts == MAX_DEATHS + 1


def test_the_deadline_is_that_of_each_grade_not_of_the_queue(start: Start, tokens_of: Callable[[str], bytes]) -> None:
    """Fifteen times 0.1 s are longer than the deadline."""
    grader = start(task={"deadline_s": 1.0})
    for trajectory in range(15):
        grader.grade(trajectory, TRAIN, 0, tokens_of("slow"))
    assert {outcome.verdict for outcome in collect(grader, 15)} == {GRADED}
    assert grader.restarts == 0


def test_a_hanging_verifier_never_makes_the_driver_wait(start: Start, tokens_of: Callable[[str], bytes]) -> None:
    """64 responses of 32 KiB are far more than a pipe holds."""
    grader = start(task={"deadline_s": DEADLINE_S})
    collect_up(grader)
    long = tokens_of("." * 8000 + "hang")
    assert len(long) > 32000
    for trajectory in range(64):
        grader.grade(trajectory, TRAIN, 0, long)
    begun = time.monotonic()
    assert grader.poll(begun) == []
    assert time.monotonic() - begun < DEADLINE_S
    assert verdicts(collect(grader, 1)) == {0: DEADLINE}


def test_one_response_may_be_longer_than_the_pipe(start: Start, tokens_of: Callable[[str], bytes]) -> None:
    grader = start()
    for trajectory in range(3):
        grader.grade(trajectory, TRAIN, 0, tokens_of(" " * 300_000 + "1"))
    assert verdicts(collect(grader, 3)) == dict.fromkeys(range(3), GRADED)


def collect_up(grader: Grader) -> None:
    """Poll until the worker is up."""
    grader.encode(-1, TRAIN, 0)
    collect(grader, 1)


def test_a_worker_killed_while_idle_comes_back(start: Start, tokens_of: Callable[[str], bytes]) -> None:
    grader = start()
    collect_up(grader)
    assert grader.pid is not None
    os.kill(grader.pid, signal.SIGKILL)
    wait_any(grader.channels(), PATIENCE_S)
    assert grader.poll(time.monotonic()) == []
    assert grader.waiting_for() == "the task worker to start"
    grader.grade(5, TRAIN, 0, tokens_of("1"))
    assert collect(grader, 1) == [Outcome(5, verdict=GRADED, reward=1.0)]
    assert grader.restarts == 1


def test_what_is_forgotten_is_not_returned(start: Start, tokens_of: Callable[[str], bytes]) -> None:
    grader = start(task={"deadline_s": DEADLINE_S})
    for trajectory, text in enumerate(["0", "hang", "1"]):
        grader.grade(trajectory, TRAIN, 0, tokens_of(text))
    assert verdicts(collect(grader, 1)) == {0: GRADED}
    assert grader.waiting_for() == "the grade of trajectory 1"
    grader.forget([1])
    assert verdicts(collect(grader, 1)) == {2: GRADED}
    for trajectory in (3, 4):
        grader.grade(trajectory, TRAIN, 0, tokens_of("hang"))
    grader.poll(time.monotonic())
    grader.forget_all()
    grader.encode(5, TRAIN, 7)
    assert collect(grader, 1) == [Outcome(5, tokens=tokens_of("train 7"))]
    assert grader.restarts == 2


def test_what_a_verifier_prints_is_in_the_log(start: Start, tokens_of: Callable[[str], bytes], tmp_path: Path) -> None:
    grader = start()
    grader.grade(0, TRAIN, 0, tokens_of("print"))
    grader.grade(1, TRAIN, 0, tokens_of("raise"))
    assert verdicts(collect(grader, 2)) == {0: GRADED, 1: RAISED}
    log = (tmp_path / "task.log").read_text()
    assert "a verifier that talks" in log
    assert "Traceback" in log


def test_a_task_that_cannot_be_built_ends_it_with_its_text(start: Start, tmp_path: Path) -> None:
    grader = start(task_worker.main, task={"name": "jsonl", "path": str(tmp_path / "none.jsonl")})
    with pytest.raises(EngineError, match=r"task worker: ConfigError: task\.path: .*none\.jsonl: cannot be read"):
        collect(grader, 1)
    assert grader.channels() == []


def test_a_prompt_that_is_too_long_is_no_prompt_and_the_rest_goes_on(start: Start) -> None:
    grader = start(rollout={"max_prompt_tokens": 7})
    for trajectory, prompt in ((0, 3), (1, 33), (2, 4)):
        grader.encode(trajectory, TRAIN, prompt)
    short, long, other = collect(grader, 3)
    assert (short.trajectory, short.verdict) == (0, None)
    assert (long.trajectory, long.verdict, long.tokens) == (1, Verdict.NO_PROMPT, None)
    assert "train prompt 33 has 8 tokens; rollout.max_prompt_tokens allows 1 to 7" in long.reason
    assert (other.trajectory, other.verdict) == (2, None)
    assert grader.restarts == 0


def test_a_worker_that_dies_again_and_again_is_given_up(start: Start) -> None:
    grader = start(hostile_worker.dies_at_once)
    with pytest.raises(
        EngineError, match=f"died {MAX_DEATHS + 1} times in a row while waiting for the task worker to start"
    ):
        collect(grader, 1)
    assert grader.restarts == MAX_DEATHS


def test_a_prompt_that_ends_the_worker_each_time_is_given_up(start: Start) -> None:
    grader = start()
    grader.encode(0, TRAIN, 666)
    with pytest.raises(EngineError, match="in a row while waiting for the prompt of trajectory 0"):
        collect(grader, 1)


def test_a_worker_that_does_not_come_up_is_not_waited_for_without_bound(start: Start) -> None:
    grader = start(hostile_worker.never_up, job={"start_timeout_s": 0.3})
    pid = grader.pid
    with pytest.raises(
        EngineError, match=r"still waiting for the task worker to start after job\.start_timeout_s = 0\.3 s"
    ):
        collect(grader, 1)
    assert pid is not None
    assert is_gone(pid)


def test_stopping_ends_a_worker_that_hangs(start: Start, tokens_of: Callable[[str], bytes]) -> None:
    grader = start()
    collect_up(grader)
    grader.grade(0, TRAIN, 0, tokens_of("hang"))
    grader.poll(time.monotonic())
    pid = grader.pid
    grader.stop(timeout_s=0.1)
    assert pid is not None
    assert is_gone(pid)
    assert grader.poll(time.monotonic()) == []
