"""A good record passes every check; each kind of violation is found by its check, and by that one alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from laminar_hpc.analysis.checks import Check, Result, run_checks, warnings
from laminar_hpc.protocol.trajectory import Block, Source
from laminar_hpc.record import schema
from laminar_hpc.record.reader import open_run
from laminar_hpc.record.writer import RecordWriter

MakeLedger = Callable[..., Any]

ONE_VERSION = "every trajectory comes from one weight version"
ONE_GROUP_VERSION = "every group comes from one weight version"
PROMPTS = "every prompt handed out is consumed once, returned, or discarded with a reason"
SAMPLES = "every step trained on exactly what was consumed for it"
PULLS = "every pull loaded what was published as that version"
FORWARD = "versions held by a rollout never go back"
BOUND = "staleness at consumption is at most 0 (mode sync)"


def by_rule(checks: list[Check]) -> dict[str, Check]:
    return {check.rule: check for check in checks}


@pytest.mark.parametrize("mode", ["laminar", "sync"])
def test_a_good_record_passes(tmp_path: Path, make_ledger: MakeLedger, mode: str) -> None:
    checks = run_checks(make_ledger(10, mode).write(tmp_path / "run"))
    assert [check.rule for check in checks if check.result is not Result.HOLDS] == []
    assert [detail for check in checks for detail in check.details] == []
    figures = {check.rule: check.figure for check in checks}
    # 10 steps of 4 groups of 4, and one prompt that is returned; 2 rollouts pull 11 versions each
    assert figures[ONE_VERSION] == "160 trained on; orders and answers on record agree for 160"
    assert figures[ONE_GROUP_VERSION] == "40 groups trained on"
    assert (
        figures[PROMPTS]
        == "41 training and 0 evaluation prompts handed out: 40 consumed, 1 returned, 0 discarded, 0 open at the end"
    )
    assert figures[PULLS] == "22 of 22 pulls compared, 11 versions"
    assert (BOUND in figures) == (mode == "sync")


@pytest.mark.parametrize(("newest", "holds"), [(2, True), (1, False)])
def test_where_versions_mix_tokens_come_from_none_outside_the_span(
    tmp_path: Path, make_ledger: MakeLedger, newest: int, holds: bool
) -> None:
    """A trajectory that began under version 0 went on under 1 and then 2, and says that 2, or 1, was its newest."""
    ledger = make_ledger(10, "partial")
    first = ledger.commands[0]
    row = next(row for row in ledger.table("trajectories") if row["trajectory"] == first.trajectories[0].id)
    row.update(newest_version=newest, spans=3)
    for version in (1, 2):
        resumed = msgspec.structs.replace(first.trajectories[0], resume_tokens=5)
        ledger.commands.append(msgspec.structs.replace(first, version=version, trajectories=[resumed]))
    place = next(i for i, one in enumerate(ledger.events) if one.trajectory == first.trajectories[0].id)
    ledger.events[place] = msgspec.structs.replace(ledger.events[place], version=2)
    check = by_rule(run_checks(ledger.write(tmp_path / "run")))["every trajectory comes from the versions of its span"]
    assert check.result is (Result.HOLDS if holds else Result.VIOLATED)


def another_version(ledger: Any) -> None:
    for row in ledger.table("trajectories")[32:36]:
        row["version"] += 1
    ledger.table("groups")[8]["version"] += 1


def no_version(ledger: Any) -> None:
    for row in ledger.table("trajectories")[:4]:
        row["version"] = None
    ledger.table("groups")[0]["version"] = None
    ledger.commands.clear()
    ledger.events.clear()


def resumed_under_another_version(ledger: Any) -> None:
    first = ledger.commands[0]
    resumed = msgspec.structs.replace(first.trajectories[0], resume_tokens=5)
    ledger.commands.append(msgspec.structs.replace(first, version=first.version + 1, trajectories=[resumed]))


def finished_under_another_version(ledger: Any) -> None:
    ledger.events[3] = msgspec.structs.replace(ledger.events[3], version=9)


def ended_twice(ledger: Any) -> None:
    again = dict(ledger.table("trajectories")[5], state="discarded", reason="repeated")
    ledger.table("trajectories").append(again)


def mixed_group(ledger: Any) -> None:
    row = ledger.table("trajectories")[33]
    row["version"] += 1
    ledger.commands.clear()
    ledger.events.clear()


def group_says_otherwise(ledger: Any) -> None:
    ledger.table("groups")[8]["version"] += 1


def consumed_twice(ledger: Any) -> None:
    ledger.table("groups").append(dict(ledger.table("groups")[3]))


def discarded_without_reason(ledger: Any) -> None:
    ledger.table("groups")[-1].update(state="discarded", reason="")


def lost_prompt(ledger: Any) -> None:
    ledger.table("groups").pop()


def unknown_prompt(ledger: Any) -> None:
    ledger.table("hand_outs").pop(0)


def handed_out_twice(ledger: Any) -> None:
    ledger.table("hand_outs").append(dict(ledger.table("hand_outs")[0]))


def never_consumed(ledger: Any) -> None:
    ledger.table("groups")[3].update(state="discarded", reason="stale", step=None)


def trained_on_something_else(ledger: Any) -> None:
    ledger.table("trajectories")[0]["response_tokens"] += 1


def trained_on_too_few(ledger: Any) -> None:
    ledger.table("steps")[4]["samples"] += 1


def wrong_weights(ledger: Any) -> None:
    ledger.table("pulls", 4)[2]["digest"] ^= 1


def unpublished_weights(ledger: Any) -> None:
    ledger.table("publications").pop()


def published_twice(ledger: Any) -> None:
    ledger.table("publications").append(dict(ledger.table("publications")[2]))


def went_back(ledger: Any) -> None:
    pulls = ledger.table("pulls", 3)
    pulls[4], pulls[5] = pulls[5], pulls[4]


@pytest.mark.parametrize(
    ("bend", "rule", "detail"),
    [
        (another_version, ONE_VERSION, "trajectory 32 has versions "),
        (no_version, ONE_VERSION, "trajectory 0 has no version"),
        (resumed_under_another_version, ONE_VERSION, "trajectory 0 has versions 0, 1"),
        (finished_under_another_version, ONE_VERSION, "trajectory 3 has versions 0, 9"),
        (ended_twice, ONE_VERSION, "trajectory 5 ended 2 times"),
        (mixed_group, ONE_GROUP_VERSION, "group 8 has versions 0, 1"),
        (group_says_otherwise, ONE_GROUP_VERSION, "group 8 is recorded as version 1, its members as 0"),
        (consumed_twice, PROMPTS, "group 3 ended 2 times"),
        (discarded_without_reason, PROMPTS, "group 40 was discarded without a reason"),
        (lost_prompt, PROMPTS, "group 40 (attempt 0) is open"),
        (unknown_prompt, PROMPTS, "group 0 was consumed and never handed out"),
        (handed_out_twice, PROMPTS, "group 0 was handed out twice"),
        (never_consumed, PROMPTS, "group 3 has trajectories that were trained on, but was not consumed"),
        (trained_on_something_else, SAMPLES, "step 1 reports 16 trajectories and "),
        (trained_on_too_few, SAMPLES, "step 5 reports 17 trajectories and "),
        (
            wrong_weights,
            PULLS,
            "rank 4 at 4.3 s: version 2 has digest 8000000000000003, published was 8000000000000002",
        ),
        (unpublished_weights, PULLS, "rank 3 at 20.3 s: version 10 has no publication on record"),
        (published_twice, PULLS, "version 2 was published 2 times"),
        (went_back, FORWARD, "rank 3 went from version 5 back to 4"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_each_violation_is_found(
    tmp_path: Path, make_ledger: MakeLedger, bend: Callable[[Any], None], rule: str, detail: str
) -> None:
    ledger = make_ledger(10)
    bend(ledger)
    checks = run_checks(ledger.write(tmp_path / "run"))
    assert [check.rule for check in checks if check.result is Result.VIOLATED] == [rule]
    found = by_rule(checks)[rule]
    assert found.details[0].startswith(detail)
    assert "violation" in found.figure


def test_the_bound_of_the_mode(tmp_path: Path, make_ledger: MakeLedger) -> None:
    ledger = make_ledger(10, "sync")
    ledger.table("trajectories")[20]["staleness_consumption"] = 1
    check = by_rule(run_checks(ledger.write(tmp_path / "run")))[BOUND]
    assert check.result is Result.VIOLATED
    assert check.details == ["trajectory 20 was 1 version old in step 2"]


@pytest.mark.parametrize(("allowed", "result"), [(2, Result.HOLDS), (1, Result.VIOLATED)])
def test_the_bound_of_the_eviction(tmp_path: Path, make_ledger: MakeLedger, allowed: int, result: Result) -> None:
    ledger = make_ledger(3)
    ledger.control |= {"eviction": "stale", "max_staleness": allowed}
    rule = f"staleness at consumption is at most {allowed} (mode laminar, eviction stale)"
    check = by_rule(run_checks(ledger.write(tmp_path / "run")))[rule]
    # from step 3 on, the first of 4 groups of 4 is two versions old
    assert (check.result, len(check.details)) == (result, 0 if result is Result.HOLDS else 4)


def test_a_file_without_a_bound_of_its_own_has_its_modes(tmp_path: Path, make_ledger: MakeLedger) -> None:
    ledger = make_ledger(3, "sync")
    ledger.metadata = {"staleness_bound": None, "mode": '{"name": "sync", "staleness_bound": 0}'}
    ledger.table("trajectories")[20]["staleness_consumption"] = 1
    check = by_rule(run_checks(ledger.write(tmp_path / "run")))[BOUND]
    assert check.result is Result.VIOLATED


@pytest.mark.parametrize(("closed", "state"), [(False, "finished"), (True, "stopped"), (False, "")])
def test_what_is_open_when_a_record_ends_in_mid_run_is_listed_and_no_fault(
    tmp_path: Path, make_ledger: MakeLedger, closed: bool, state: str
) -> None:
    ledger = make_ledger(10)
    ledger.closed, ledger.state = closed, state
    del ledger.table("groups")[-3:]
    check = by_rule(run_checks(ledger.write(tmp_path / "run")))[PROMPTS]
    assert check.result is Result.HOLDS
    assert check.figure.endswith("38 consumed, 0 returned, 0 discarded, 3 open at the end")
    assert check.details == [f"group {group} (attempt 0) is open" for group in (38, 39, 40)]


def test_what_is_open_while_the_run_goes_on_is_counted_and_not_listed(tmp_path: Path, make_ledger: MakeLedger) -> None:
    ledger = make_ledger(10)
    ledger.closed, ledger.state = False, "running"
    del ledger.table("groups")[-3:]
    check = by_rule(run_checks(ledger.write(tmp_path / "run")))[PROMPTS]
    assert check.result is Result.HOLDS
    assert check.figure.endswith("38 consumed, 0 returned, 0 discarded, 3 open now")
    assert check.details == []


def test_a_pull_whose_publication_was_not_flushed_yet_is_no_fault(tmp_path: Path, make_ledger: MakeLedger) -> None:
    ledger = make_ledger(3)
    ledger.closed = False
    ledger.table("publications").pop()
    check = by_rule(run_checks(ledger.write(tmp_path / "run")))[PULLS]
    assert check.result is Result.HOLDS
    assert len(check.details) == 2


def test_pulls_without_digests_are_not_called_good(tmp_path: Path, make_ledger: MakeLedger) -> None:
    ledger = make_ledger(3)
    for rank in (3, 4):
        for row in ledger.table("pulls", rank):
            row["digest"] = None
    check = by_rule(run_checks(ledger.write(tmp_path / "run")))[PULLS]
    assert check.result is Result.NOTHING


def test_evaluation_prompts_are_counted_apart(tmp_path: Path, make_ledger: MakeLedger) -> None:
    ledger = make_ledger(10)
    for number in (100, 101):  # one is open, of the other the hand-out was not flushed
        row = {"group": number, "prompt": number, "purpose": "evaluation", "handed_out_s": 1.0}
        if number == 100:
            ledger.table("hand_outs").append(row)
        else:
            ended = {"state": "consumed", "reason": "evaluation of version 0", "trajectories": 1, "settled_s": 2.0}
            ledger.table("groups").append(row | ended | {"version": 0, "step": None})
    ledger.closed = False
    check = by_rule(run_checks(ledger.write(tmp_path / "run")))[PROMPTS]
    assert check.figure.startswith("41 training and 2 evaluation prompts handed out: 41 consumed, 1 returned")


@pytest.mark.parametrize(("differing", "warned"), [(0, True), (1, False)])
def test_a_run_without_any_signal_is_warned_of(
    tmp_path: Path, make_ledger: MakeLedger, differing: int, warned: bool
) -> None:
    ledger = make_ledger(4)
    for row in ledger.table("trajectories"):
        row["reward"] = float(row["group"] % 2)  # groups differ from each other, their members do not
    for row in ledger.table("trajectories")[:differing]:
        row["reward"] = 0.5
    run = ledger.write(tmp_path / "run")
    assert warnings(run) == (["no group had differing rewards: nothing can be learned"] if warned else [])


def test_before_any_group_there_is_nothing_to_warn_of(tmp_path: Path, make_ledger: MakeLedger) -> None:
    assert warnings(make_ledger(0).write(tmp_path / "run")) == []


def test_many_violations_are_counted_and_some_named(tmp_path: Path, make_ledger: MakeLedger) -> None:
    ledger = make_ledger(10)
    for row in ledger.table("groups"):
        row.update(state="discarded", reason="")
    check = by_rule(run_checks(ledger.write(tmp_path / "run")))[PROMPTS]
    assert check.figure.endswith("; 81 violations")  # 41 without a reason, 40 trained on without being consumed
    assert len(check.details) == 21
    assert check.details[-1] == "and 61 more"


def test_recorded_tokens_of_two_versions_are_found(tmp_path: Path) -> None:
    (tmp_path / "records").mkdir()
    path = tmp_path / "records" / schema.file_name("manager", 0, 0)
    token, logprob = np.array([1], "<i4").tobytes(), np.array([-1.0], "<f4").tobytes()
    with RecordWriter(str(path), "manager", 0, 0, {}, 1.0) as writer:
        writer.add_block(Block(3, 0, Source.PROMPT, None, token))
        for offset, version in enumerate((4, 5), start=1):
            writer.add_block(Block(3, offset, Source.MODEL, version, token, logprob))
    check = by_rule(run_checks(open_run(str(tmp_path))))[ONE_VERSION]
    assert check.result is Result.VIOLATED
    assert check.details == ["the recorded tokens of trajectory 3 are from versions 4, 5"]
