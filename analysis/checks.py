"""The ledger of a run, checked on its record: what must hold of every trajectory, prompt, weight version and step.

A record that ends in mid-run (a kill, a run that goes on) may leave things open; they are counted, and no fault.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from itertools import pairwise

import numpy as np

from laminar_hpc.record import schema
from laminar_hpc.record.lineage import Lineage, read_lineage
from laminar_hpc.record.reader import Rows, Run
from laminar_hpc.record.status import MOST_LAG, was_killed

from .series import columns, counted, groups_without_signal, lag_of, trained_on, trajectories

DETAILS = 20
"""Violations and open things that a check names; the others are counted."""


class Result(str, Enum):
    """What a check found."""

    HOLDS = "holds"
    VIOLATED = "violated"
    NOTHING = "nothing to check"


@dataclass(frozen=True)
class Check:
    """A rule, whether it holds, the figure that says on how much, and what is wrong or open."""

    rule: str
    result: Result
    figure: str
    details: list[str] = field(default_factory=list)


def run_checks(run: Run) -> list[Check]:
    """All checks."""
    lineage = read_lineage(run)
    return [
        one_version_per_trajectory(run, lineage),
        one_version_per_group(run),
        prompts_accounted_for(run),
        samples_match_steps(run),
        pulls_match_publications(run),
        versions_never_go_back(run),
        staleness_bound(run),
    ]


def warnings(run: Run) -> list[str]:
    """What breaks no rule, but makes the run pointless."""
    found = []
    _, equal = groups_without_signal(run)
    if len(equal) and equal.all():
        found.append("no group had differing rewards: nothing can be learned")
    rows = run.table("pacing")
    for rank in np.unique(rows["rank"]):
        lag = lag_of(rows[rows["rank"] == rank])
        if lag > MOST_LAG:
            found.append(f"emulated time lagged by {lag:.1%} on rank {rank}: times of this run do not count")
    return found


def one_version_per_trajectory(run: Run, lineage: Lineage) -> Check:
    """All tokens of a trajectory come from one version: by its outcome, by the orders given and by the rollout's word.

    Where a pipeline mixes versions: from none outside the span that its outcome names.
    """
    rows, mixes = trained_on(run), _mixes(run)
    wrong, confirmed = [], 0
    spans: dict[tuple[int, int], tuple[int, int]] = {}
    for attempt, trajectory, version, newest in columns(rows, "attempt", "trajectory", "version", "newest_version"):
        key = (attempt, trajectory)
        last = newest if mixes else version
        spans[key] = (version, last)
        versions = {version} | lineage.ordered.get(key, set()) | {lineage.finished.get(key, last)}
        confirmed += key in lineage.ordered and key in lineage.finished
        if version == schema.MISSING:
            wrong.append(f"trajectory {trajectory} has no version")
        elif min(versions) < version or max(versions) > last:
            wrong.append(f"trajectory {trajectory} has versions {_list(versions)}")
    wrong += [
        f"trajectory {id} ended {times} times" for (_, id), times in _repeats(run.table("trajectories"), "trajectory")
    ]
    for (attempt, trajectory), versions in _recorded_token_versions(run).items():
        first, last = spans.get((attempt, trajectory), (min(versions), min(versions)))
        if min(versions) < first or max(versions) > last:
            wrong.append(f"the recorded tokens of trajectory {trajectory} are from versions {_list(versions)}")
    figure = f"{len(rows):,} trained on; orders and answers on record agree for {confirmed:,}"
    rule = (
        "every trajectory comes from the versions of its span"
        if mixes
        else "every trajectory comes from one weight version"
    )
    return _check(rule, len(rows), wrong, figure)


def _mixes(run: Run) -> bool:
    """Whether the pipeline lets the tokens of a trajectory come from several versions."""
    return bool(run.setting("mode").get("refresh") == "interrupted")


def one_version_per_group(run: Run) -> Check:
    """All trained-on members of a group come from, or begin under, the version that its outcome names."""
    consumed = columns(_consumed_groups(run), "attempt", "group", "version")
    outcomes = {(attempt, group): version for attempt, group, version in consumed}
    members: dict[tuple[int, int], set[int]] = defaultdict(set)
    for attempt, group, version in columns(trained_on(run), "attempt", "group", "version"):
        members[attempt, group].add(version)
    wrong = []
    for key, versions in members.items():
        if len(versions) > 1:
            wrong.append(f"group {key[1]} has versions {_list(versions)}")
        elif key in outcomes and {outcomes[key]} != versions:
            wrong.append(f"group {key[1]} is recorded as version {outcomes[key]}, its members as {_list(versions)}")
    figure = f"{counted(len(members), 'group')} trained on"
    return _check("every group comes from one weight version", len(members), wrong, figure)


def prompts_accounted_for(run: Run) -> Check:
    """Each prompt that was handed out is consumed once, or returned or discarded with a reason, or open at the end.

    A group's number is its own in all attempts. Where an attempt goes on from a checkpoint, what the one before had done
    after it is void: the last end of a group counts, and a group that only earlier attempts know was handed out again.
    """
    groups = run.table("groups")
    states = schema.TABLES["groups"].column("state").names
    last_end = dict(columns(groups, "group", "state"))  # rows come attempt by attempt
    counts = Counter(states[state] for state in last_end.values())
    wrong = [f"group {group} ended {times} times" for (_, group), times in _repeats(groups, "group")]
    for group, code, reason in columns(groups, "group", "state", "reason"):
        if states[code] not in ("consumed", "discarded", "returned"):
            wrong.append(f"group {group} ended as {states[code]}")
        elif states[code] != "consumed" and not reason:
            wrong.append(f"group {group} was {states[code]} without a reason")
    newest = run.attempts[-1]
    attempt_of = {group: attempt for attempt, group in columns(run.table("hand_outs"), "attempt", "group")}
    handed_out, ended = set(attempt_of), set(last_end)
    consumed = {int(group) for group in _consumed_groups(run)["group"]}
    wrong += [f"group {group} was consumed and never handed out" for group in sorted(consumed - handed_out)]
    wrong += [f"group {group} was handed out twice" for (_, group), _n in _repeats(run.table("hand_outs"), "group")]
    orphans = {int(group) for group in trained_on(run)["group"]} - consumed
    unended = sorted(handed_out - ended)
    void = [group for group in unended if attempt_of[group] < newest and not _kept_open(run)]
    still_open = [f"group {group} (attempt {attempt_of[group]}) is open" for group in unended if group not in set(void)]
    if _ended_in_order(run):
        wrong += [f"group {group} has trajectories that were trained on, but was not consumed" for group in orphans]
        wrong += still_open
        still_open = []
    figure = f"{_by_purpose(run)} handed out: {counts['consumed']:,} consumed, {counts['returned']:,} returned, "
    going_on = run.status is not None and not run.status.over and not was_killed(run.status)
    if going_on:
        still_open = []  # what is being worked on
    figure += (
        f"{counts['discarded']:,} discarded, {len(unended) - len(void):,} open {'now' if going_on else 'at the end'}"
    )
    if void:
        figure += f", {len(void):,} void, as a later attempt went on from before them"
    rule = "every prompt handed out is consumed once, returned, or discarded with a reason"
    return _check(rule, len(handed_out | ended), wrong, figure, still_open)


def samples_match_steps(run: Run) -> Check:
    """A step trained on as many trajectories, with as many tokens, as were consumed for it."""
    samples: Counter[tuple[int, int]] = Counter()
    tokens: Counter[tuple[int, int]] = Counter()
    rows = trajectories(run, "train", "consumed")  # of steps that were done again, too
    for attempt, step, prompt, response in columns(rows, "attempt", "step", "prompt_tokens", "response_tokens"):
        samples[attempt, step] += 1
        tokens[attempt, step] += prompt + response
    wrong = []
    rows = run.table("steps")
    for row in rows:
        key = (int(row["attempt"]), int(row["step"]))
        step_tokens = int(row["prompt_tokens"]) + int(row["response_tokens"])
        if (samples[key], tokens[key]) != (int(row["samples"]), step_tokens):
            wrong.append(
                f"step {key[1]} reports {_trajectories(int(row['samples']))} and {counted(step_tokens, 'token')}, "
                f"{samples[key]:,} and {tokens[key]:,} were consumed for it"
            )
    rule = "every step trained on exactly what was consumed for it"
    return _check(rule, len(rows), wrong, counted(len(rows), "step"))


def pulls_match_publications(run: Run) -> Check:
    """What a rollout holds after a pull is, bit for bit, what the trainers published as that version."""
    rule = "every pull loaded what was published as that version"
    publications = run.table("publications")
    wrong = [
        f"version {version} was published {n} times" for version, n in Counter(publications["version"]).items() if n > 1
    ]
    whole = {file.attempt for file in run.files if file.role == "manager" and file.closed_unix_s is not None}
    published = {int(row["version"]): int(row["digest"]) for row in publications}
    still_open: list[str] = []
    compared = 0
    pulls = run.table("pulls")
    for row in pulls:
        version, digest = int(row["version"]), int(row["digest"])
        who = f"rank {row['rank']} at {row['time_s']:.1f} s: version {version}"
        if version not in published:
            (wrong if int(row["attempt"]) in whole else still_open).append(f"{who} has no publication on record")
        elif digest and published[version]:
            compared += 1
            if digest != published[version]:
                wrong.append(f"{who} has digest {digest:016x}, published was {published[version]:016x}")
    figure = f"{compared:,} of {counted(len(pulls), 'pull')} compared, {counted(len(published), 'version')}"
    return _check(rule, compared, wrong, figure, still_open)


def versions_never_go_back(run: Run) -> Check:
    """A rollout's versions only rise or stay."""
    wrong = []
    pulls = run.table("pulls")
    for rank in np.unique(pulls["rank"]):
        versions = pulls["version"][pulls["rank"] == rank]
        for before, after in pairwise(versions):
            if after < before:
                wrong.append(f"rank {rank} went from version {before} back to {after}")
    figure = f"{counted(len(pulls), 'pull')} of {counted(len(np.unique(pulls['rank'])), 'rollout')}"
    return _check("versions held by a rollout never go back", len(pulls), wrong, figure)


def staleness_bound(run: Run) -> Check:
    """At consumption no trajectory is staler than mode and eviction allow."""
    rows = trained_on(run)
    staleness = rows["staleness_consumption"]
    worst = int(staleness.max(initial=0))
    mode = run.setting("mode")
    if not mode:
        return Check("the staleness bound is kept", Result.NOTHING, f"largest {worst}, mode not on record")
    bound = _allowed_staleness(run)
    eviction = run.config.get("control", {}).get("eviction", "none")
    pipeline = f"mode {mode['name']}" + (f", eviction {eviction}" if eviction != "none" else "")
    figure = f"largest {worst} of {_trajectories(len(rows))}"
    if bound is None:
        rule = f"staleness is measured ({pipeline} sets no bound)"
        return _check(rule, len(rows), [], figure)
    wrong = [
        f"trajectory {row['trajectory']} was {counted(row['staleness_consumption'], 'version')} old in step {row['step']}"
        for row in rows[staleness > bound]
    ]
    return _check(f"staleness at consumption is at most {bound} ({pipeline})", len(rows), wrong, figure)


def _allowed_staleness(run: Run) -> int | None:
    """The bound in versions, None for none. Older files do not have it of the run, only that of its mode."""
    recorded = run.metadata.get("staleness_bound")
    bound: int | None = run.setting("mode")["staleness_bound"] if recorded is None else json.loads(recorded)
    return bound


def _check(rule: str, checked: int, wrong: list[str], figure: str, still_open: list[str] | None = None) -> Check:
    """The result of a rule that was looked at in `checked` places; none at all says nothing about it."""
    named = wrong or still_open or []
    details = named[:DETAILS] + ([f"and {len(named) - DETAILS:,} more"] if len(named) > DETAILS else [])
    if wrong:
        figure += f"; {counted(len(wrong), 'violation')}"
    result = Result.VIOLATED if wrong else Result.HOLDS if checked else Result.NOTHING
    return Check(rule, result, figure, details)


def _trajectories(count: int) -> str:
    return counted(count, "trajectory", "trajectories")


def _by_purpose(run: Run) -> str:
    """How many prompts were handed out for training, and how many for evaluation."""
    names = schema.TABLES["groups"].column("purpose").names
    tables = (run.table("hand_outs"), run.table("groups"))
    purposes = {group: p for rows in tables for group, p in columns(rows, "group", "purpose")}
    counts = Counter(names[purpose] for purpose in purposes.values())
    return f"{counts['train']:,} training and {counted(counts['evaluation'], 'evaluation prompt')}"


def _kept_open(run: Run) -> bool:
    """Whether groups of earlier attempts may still be open: the last attempt goes on with those of its checkpoint."""
    return not (run.status is not None and run.status.over)


def _ended_in_order(run: Run) -> bool:
    """Whether nothing may be open: the job finished and the manager closed its record."""
    return run.closed and run.status is not None and run.status.state == "finished"


def _consumed_groups(run: Run) -> Rows:
    table = schema.TABLES["groups"]
    groups = run.table("groups")
    consumed = groups["state"] == table.code("state", "consumed")
    chosen: Rows = groups[consumed & (groups["purpose"] == table.code("purpose", "train"))]
    return chosen


def _keys(rows: Rows, column: str) -> set[tuple[int, int]]:
    return set(columns(rows, "attempt", column))


def _repeats(rows: Rows, column: str) -> list[tuple[tuple[int, int], int]]:
    counts = Counter(columns(rows, "attempt", column))
    return [(key, times) for key, times in counts.items() if times > 1]


def _recorded_token_versions(run: Run) -> dict[tuple[int, int], set[int]]:
    versions: dict[tuple[int, int], set[int]] = defaultdict(set)
    for block in run.tokens():
        if block.version is not None:
            versions[block.attempt, block.trajectory].add(block.version)
    return versions


def _list(versions: Iterable[int]) -> str:
    return ", ".join(str(version) for version in sorted(versions))
