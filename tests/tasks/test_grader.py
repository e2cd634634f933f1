"""The grader against real worker processes, well-behaved and hostile ones."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
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

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("forkserver")]

MakeConfig = Callable[..., Config]
Start = Callable[..., Grader]
Grade = Callable[[Grader, list[str]], list[Outcome]]


def start_one(stack: contextlib.ExitStack, config: Config, directory: Path, main: WorkerMain) -> Grader:
    """A grader whose worker is gone with the stack."""
    grader = Grader(config, str(directory / "task.log"), main)
    stack.callback(grader.stop, 0.1)
    grader.start(time.monotonic())
    return grader


@pytest.fixture
def start(make_config: MakeConfig, tmp_path: Path) -> Iterator[Start]:
    """Starts a grader of the test's own."""
    with contextlib.ExitStack() as stack:

        def start_grader(main: WorkerMain = hostile_worker.main, **sections: dict[str, object]) -> Grader:
            sections.setdefault("task", {"deadline_s": PATIENCE_S})
            return start_one(stack, make_config(**sections), tmp_path, main)

        yield start_grader


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the log of the shared workers is."""
    return tmp_path_factory.mktemp("shared") / "task.log"


@pytest.fixture(scope="module")
def shared(forkserver: None, model_dir: Path, log: Path) -> Iterator[Callable[[float], Grader]]:
    """The grader with that deadline, one for all tests: none of them may cost its worker."""
    del forkserver
    with contextlib.ExitStack() as stack:
        graders: dict[float, Grader] = {}

        def get(deadline_s: float) -> Grader:
            if deadline_s not in graders:
                data = {
                    "run_dir": str(log.parent),
                    "model": {"path": str(model_dir)},
                    "task": {"deadline_s": deadline_s},
                }
                config = Config.model_validate(data)
                graders[deadline_s] = start_one(stack, config, log.parent, hostile_worker.main)
            return graders[deadline_s]

        yield get
        assert [grader.restarts for grader in graders.values()] == [0] * len(graders)


@pytest.fixture
def patient(shared: Callable[[float], Grader]) -> Grader:
    return shared(PATIENCE_S)


@pytest.fixture
def strict(shared: Callable[[float], Grader]) -> Grader:
    return shared(DEADLINE_S)


@pytest.fixture(scope="module")
def tokens_of(model_dir: Path) -> Callable[[str], bytes]:
    """Text as a response's bytes."""
    tokenizer = Tokenizer(str(model_dir))
    return lambda text: np.asarray(tokenizer.encode(text), "<i4").tobytes()


@pytest.fixture
def grade(tokens_of: Callable[[str], bytes]) -> Grade:
    """The outcomes of these responses, whose trajectories are 0, 1, 2, ..."""

    def grade_all(grader: Grader, responses: list[str]) -> list[Outcome]:
        for trajectory, text in enumerate(responses):
            grader.grade(trajectory, TRAIN, 0, tokens_of(text))
        outcomes = collect(grader, len(responses))
        assert [outcome.trajectory for outcome in outcomes] == list(range(len(responses)))
        return outcomes

    return grade_all


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


def descendants(pid: int | None) -> list[str]:
    """States of all processes below `pid`: "Z" is a zombie."""
    assert pid is not None
    found = []
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        with contextlib.suppress(OSError):
            found += [Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0], *descendants(int(child))]
    return found


def in_order(pid: int | None) -> bool:
    """Whether there are a guard and a child below the worker, and nothing else."""
    states = descendants(pid)
    return len(states) == 2 and set(states) <= {"S", "R"}


def wait_for(condition: Callable[[], object]) -> None:
    """The test fails where it does not come true."""
    begun = time.monotonic()
    pause = threading.Event()
    while not condition():
        assert time.monotonic() - begun < PATIENCE_S
        pause.wait(0.01)


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


def collect_up(grader: Grader) -> None:
    """Poll until the worker is up."""
    grader.encode(-1, TRAIN, 0)
    collect(grader, 1)


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
        ("interrupt", "KeyboardInterrupt: now"),
        ("recurse", "RecursionError: "),
        ("allocate", "MemoryError"),
        ("nan", "ValueError: the reward is nan"),
        ("inf", "ValueError: the reward is inf"),
        ("words", "ValueError: could not convert"),
        ("die", "the process ended while it was at this: exit code 3"),
        ("abort", "the process ended while it was at this: signal 6"),
        ("close", "the process ended while it was at this: "),
        ("write", "the process broke its pipe: "),
    ],
)
def test_a_verifier_that_fails_gives_no_reward(patient: Grader, grade: Grade, response: str, reason: str) -> None:
    before, raised, again, after = grade(patient, ["0.25", response, response, "1"])
    assert before == Outcome(0, verdict=GRADED, reward=0.25)
    assert raised.verdict is again.verdict is RAISED
    assert raised.reason.startswith(reason)
    assert after == Outcome(3, verdict=GRADED, reward=1.0)
    assert in_order(patient.pid)


def test_a_verifier_that_comes_back_twice_counts_once(patient: Grader, grade: Grade) -> None:
    outcomes = grade(patient, ["twice", "0.5", "twice", "0.25"])
    assert [outcome.reward for outcome in outcomes] == [1.0, 0.5, 1.0, 0.25]


@pytest.mark.parametrize("response", ["hang", "catch", "leave"])
def test_a_verifier_that_hangs_loses_its_own_trajectory_only(
    strict: Grader, grade: Grade, tokens_of: Callable[[str], bytes], response: str
) -> None:
    """Also where it leaves a process in another session that keeps the pipe open."""
    strict.encode(10, TRAIN, 1)
    collect(strict, 1)
    worker = strict.pid
    begun = time.monotonic()
    outcomes = grade(strict, ["1", response, "0", response, "0.5"])
    assert 2 * DEADLINE_S < time.monotonic() - begun < 6 * DEADLINE_S
    assert [outcome.verdict for outcome in outcomes] == [GRADED, DEADLINE, GRADED, DEADLINE, GRADED]
    assert "longer than 0.5 s" in outcomes[1].reason
    strict.encode(11, TRAIN, 2)
    assert collect(strict, 1) == [Outcome(11, tokens=tokens_of("train 2"))]
    assert strict.pid == worker
    assert in_order(worker)


def test_many_lost_children_cost_no_restart(patient: Grader, grade: Grade) -> None:
    """100 of them, among responses that are graded as if nothing were."""
    responses = ["die", "0.5"] * 100
    begun = time.monotonic()
    outcomes = grade(patient, responses)
    assert time.monotonic() - begun < PATIENCE_S / 3
    assert [outcome.verdict for outcome in outcomes] == [RAISED, GRADED] * 100
    assert {outcome.reward for outcome in outcomes[1::2]} == {0.5}


def test_the_deadline_is_that_of_each_grade_not_of_the_queue(strict: Grader, grade: Grade) -> None:
    """Ten times 0.1 s are longer than the deadline."""
    assert {outcome.verdict for outcome in grade(strict, ["slow"] * 10)} == {GRADED}


def test_the_child_goes_on_though_nobody_takes_its_answers(
    patient: Grader, tokens_of: Callable[[str], bytes], log: Path
) -> None:
    """The one that hands requests on stops while the sixth is graded: the child has the seventh already."""
    collect_up(patient)
    before = log.read_text().count("a verifier that talks")
    for trajectory, text in enumerate([*["slow"] * 5, "stop", "print"]):
        patient.grade(trajectory, TRAIN, 0, tokens_of(text))
    patient.poll(time.monotonic())
    [guard] = Path(f"/proc/{patient.pid}/task/{patient.pid}/children").read_text().split()
    try:
        wait_for(lambda: log.read_text().count("a verifier that talks") > before)
    finally:
        os.kill(int(guard), signal.SIGCONT)
    assert [outcome.reward for outcome in collect(patient, 7)] == [0.5] * 5 + [1.0, 1.0]


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


def test_one_response_may_be_longer_than_the_pipe(patient: Grader, grade: Grade) -> None:
    assert {outcome.verdict for outcome in grade(patient, [" " * 300_000 + "1"] * 3)} == {GRADED}


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


def test_a_verifier_that_kills_the_worker_loses_its_own_trajectory_only(start: Start, grade: Grade) -> None:
    """It may have taken answers along that were not sent yet, so the second worker is asked one by one."""
    grader = start()
    outcomes = grade(grader, ["1", "kill", "0.5"])
    assert [outcome.verdict for outcome in outcomes] == [GRADED, RAISED, GRADED]
    assert outcomes[1].reason == "the task worker died while grading"
    assert grader.restarts == 2


@pytest.mark.parametrize("end", ["worker killed", "group killed", "guard killed", "stopped"])
def test_a_process_of_a_verifier_that_left_its_session_ends_with_the_worker(
    start: Start, grade: Grade, tmp_path: Path, end: str
) -> None:
    grader = start()
    assert [outcome.verdict for outcome in grade(grader, ["daemon"])] == [GRADED]
    log = tmp_path / "task.log"
    wait_for(lambda: re.search(r"daemon \d+\.", log.read_text()))
    daemon = int(re.findall(r"daemon (\d+)\.", log.read_text())[0])
    assert not is_gone(daemon)
    assert grader.pid is not None
    if end == "worker killed":
        os.kill(grader.pid, signal.SIGKILL)
    elif end == "group killed":
        os.killpg(grader.pid, signal.SIGKILL)
    elif end == "guard killed":
        assert [outcome.verdict for outcome in grade(grader, ["kill"])] == [RAISED]
    else:
        grader.stop()
    wait_for(lambda: is_gone(daemon))


def test_a_worker_that_says_nothing_is_replaced(start: Start, grade: Grade, tokens_of: Callable[[str], bytes]) -> None:
    """Stopped from outside, while it is at a grade: the driver's own bound, on the driver's clock."""
    grader = start(task={"deadline_s": DEADLINE_S})
    collect_up(grader)
    assert grader.pid is not None
    stopped = grader.pid
    os.kill(stopped, signal.SIGSTOP)
    grader.grade(7, TRAIN, 0, tokens_of("1"))
    now = time.monotonic()
    assert grader.poll(now) == grader.poll(now + 5.4) == []
    assert verdicts(grader.poll(now + 5.6)) == {7: DEADLINE}
    assert is_gone(stopped)
    assert [outcome.reward for outcome in grade(grader, ["0.5"])] == [0.5]


def test_a_worker_that_says_nothing_makes_its_prompts_after_all(
    start: Start, tokens_of: Callable[[str], bytes]
) -> None:
    """Stopped from outside: the next one is asked for the same."""
    grader = start(task={"prompt_deadline_s": DEADLINE_S})
    collect_up(grader)
    assert grader.pid is not None
    stopped = grader.pid
    os.kill(stopped, signal.SIGSTOP)
    grader.encode(7, TRAIN, 2)
    now = time.monotonic()
    assert grader.poll(now) == grader.poll(now + 5.4) == []
    assert grader.restarts == 0
    assert grader.poll(now + 5.6) == []
    assert is_gone(stopped)
    assert collect(grader, 1) == [Outcome(7, tokens=tokens_of("train 2"))]


def test_what_is_forgotten_is_not_returned(strict: Grader, tokens_of: Callable[[str], bytes]) -> None:
    for trajectory, text in enumerate(["0", "hang", "1"]):
        strict.grade(trajectory, TRAIN, 0, tokens_of(text))
    assert verdicts(collect(strict, 1)) == {0: GRADED}
    assert strict.waiting_for() == "the grade of trajectory 1"
    strict.forget([1])
    assert verdicts(collect(strict, 1)) == {2: GRADED}
    for trajectory in (3, 4):
        strict.grade(trajectory, TRAIN, 0, tokens_of("hang"))
    strict.poll(time.monotonic())
    strict.forget_all()
    strict.encode(5, TRAIN, 7)
    assert collect(strict, 1) == [Outcome(5, tokens=tokens_of("train 7"))]


def test_what_a_verifier_prints_is_in_the_log(patient: Grader, grade: Grade, log: Path) -> None:
    assert [outcome.verdict for outcome in grade(patient, ["print", "raise"])] == [GRADED, RAISED]
    assert "a verifier that talks" in log.read_text()
    assert "Traceback" in log.read_text()


def test_the_overlong_penalty_is_for_training_alone(start: Start, tokens_of: Callable[[str], bytes]) -> None:
    """Eight tokens of ten, of which the last four are the interval: (6 - 8) / 4."""
    grader = start(task={"overlong_tokens": 4, "deadline_s": PATIENCE_S}, rollout={"max_response_tokens": 10})
    for trajectory, (purpose, response) in enumerate(
        [(TRAIN, "1......."), (EVALUATION, "1......."), (TRAIN, "1.....")]
    ):
        grader.grade(trajectory, purpose, 0, tokens_of(response.replace(".", " ")))
    outcomes = [(outcome.reward, outcome.score) for outcome in collect(grader, 3)]
    assert outcomes == [(0.5, 1.0), (1.0, None), (1.0, None)]  # the score is said where it is another number


def test_a_task_that_cannot_be_built_ends_it_with_its_text(start: Start, tmp_path: Path) -> None:
    grader = start(task_worker.main, task={"name": "jsonl", "path": str(tmp_path / "none.jsonl")})
    with pytest.raises(EngineError, match=r"task worker: ConfigError: task\.path: .*none\.jsonl: cannot be read"):
        collect(grader, 1)
    assert grader.channels() == []


def test_a_prompt_that_cannot_be_made_is_no_prompt_and_the_rest_goes_on(start: Start) -> None:
    """33 is too long; 666 ends the process that makes it."""
    grader = start(rollout={"max_prompt_tokens": 7})
    for trajectory, prompt in ((0, 3), (1, 33), (2, 666), (3, 4)):
        grader.encode(trajectory, TRAIN, prompt)
    short, long, deadly, other = collect(grader, 4)
    assert (short.trajectory, short.verdict) == (0, None)
    assert (long.trajectory, long.verdict, long.tokens) == (1, Verdict.NO_PROMPT, None)
    assert "train prompt 33 has 8 tokens; rollout.max_prompt_tokens allows 1 to 7" in long.reason
    assert (deadly.trajectory, deadly.verdict) == (2, Verdict.NO_PROMPT)
    assert "exit code 3" in deadly.reason
    assert (other.trajectory, other.verdict) == (3, None)
    assert grader.restarts == 0


def test_a_prompt_that_is_never_made_is_no_prompt_and_the_rest_goes_on(start: Start) -> None:
    """777 does not come back."""
    grader = start(task={"prompt_deadline_s": DEADLINE_S})
    for trajectory, prompt in ((0, 3), (1, 777), (2, 4)):
        grader.encode(trajectory, TRAIN, prompt)
    before, never, after = collect(grader, 3)
    assert (before.trajectory, before.verdict) == (0, None)
    assert (never.trajectory, never.verdict) == (1, Verdict.NO_PROMPT)
    assert "longer than 0.5 s" in never.reason
    assert (after.trajectory, after.verdict) == (2, None)
    assert grader.restarts == 0


def test_a_worker_that_dies_again_and_again_is_given_up(start: Start) -> None:
    grader = start(hostile_worker.dies_at_once)
    with pytest.raises(
        EngineError, match=f"lost {MAX_DEATHS + 1} times in a row while waiting for the task worker to start: it died"
    ):
        collect(grader, 1)
    assert grader.restarts == MAX_DEATHS


def test_a_worker_that_does_not_come_up_is_not_waited_for_without_bound(start: Start) -> None:
    grader = start(hostile_worker.never_up, job={"start_timeout_s": 0.3})
    pid = grader.pid
    with pytest.raises(EngineError, match=r"task worker: not up after job\.start_timeout_s = 0\.3 s"):
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
