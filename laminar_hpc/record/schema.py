"""Every name in a run's HDF5 files: tables, columns, types, units and what they mean. Nobody else spells one.

SCHEMA_VERSION goes up by one with every change that would make an older reader wrong.

    1  first layout: one compound dataset for each table, byte streams beside `events`, `commands` and `tokens`
    2  `checkpoints`, `relay_events`, `what` in `relay_versions`, files of spares; in `pulls` `copy_s`, and `pause_s` for
       `load_s`; `publications` come when their digest is known
    3  `moves`

A table is one compound dataset, so its columns are always equally long, also after a kill. There are no variable-length
types: text is UTF-8 in a fixed number of bytes, enumerations are HDF5 enums over one byte (new names go to the end).
What is absent is NaN in a float column, MISSING in a signed integer column, 0 in a digest, "" in text and "none" in an
enumeration. Tables are flushed in the order in which they stand here, so that after a kill the rows that others lean on
are there: an event before its commands, a hand-out before its trajectories, those before their group.
"""

from __future__ import annotations

import re

import msgspec
import numpy as np

SCHEMA_VERSION = 3

MISSING = -1
"""In a signed integer column: there is no value."""

NONE = "none"
"""In an enumeration: there is no value."""

INSTANT = "s after the clock's zero"
"""Unit of a moment. The clock is that of the file, and its zero is the attribute `clock_zero_unix_s`."""

PHASES = {
    "manager": ("work", "idle"),
    "trainer": ("start", "train", "repeat", "publish", "wait"),
    "relay": ("start", "transfer", "idle"),
    "rollout": ("start", "generate", "pull", "grade", "idle"),
    "spare": ("start", "transfer", "idle"),
}
"""What each role spends its time on. Their keys are the roles that write a file."""

ALL_PHASES = ("work", "idle", "train", "publish", "wait", "transfer", "generate", "pull", "grade", "start", "repeat")
PURPOSES = ("train", "evaluation")
SOURCES = ("prompt", "model", "tool")
STATES = ("waiting", "generating", "at_tool", "finished", "consumed", "discarded", "returned")
STOPS = (NONE, "end_token", "length")
VERDICTS = (NONE, "graded", "raised", "deadline", "no_prompt")
RECEPTIONS = ("complete", "given up")
RELAY_EVENTS = (
    "broadcast",
    "rerouted",
    "skipped",
    "stopped",
    "dropped",
    "stalled",
    "severed",
    "lost",
    "taken_over",
    "readmitted",
    "joined",
    "attached",
)

CHECKPOINT_ENDS = ("complete", "given up")

BENCH = "bench"
"""The role of a file that `laminar bench relay` writes; it has no phases."""

BENCH_TRANSPORTS = ("mpi", "nixl")
BENCH_WAYS = ("relays", "copy", "bcast", "star", "chain", "gloo", "file")
BENCH_FAULTS = ("middle", "last", "master", "pair", "link", "stop")

METRICS = {
    "loss": ("1", "loss of the step"),
    "entropy": ("nat", "mean entropy of the policy over the trained tokens"),
    "clip_fraction_low": ("1", "share of trained tokens whose ratio was cut off at the lower bound"),
    "clip_fraction_high": ("1", "share of trained tokens whose ratio was cut off at the upper bound"),
    "kl_behaviour": ("nat", "KL divergence from the policy that generated the tokens, estimated on them"),
    "ratio_max": ("1", "largest ratio of the policy to the one that generated the token"),
    "grad_norm": ("1", "norm of the gradient before clipping"),
    "learning_rate": ("1", "learning rate of the optimizer step"),
    "skipped": ("1", "share of the step's mini-batches without an optimizer step"),
}
"""A step's metrics that have a column in `steps`: unit and meaning. Others go to `step_metrics`."""


class Column(msgspec.Struct, frozen=True):
    """A column. `dtype` is numpy's, little-endian; `names` are those of an enumeration, by code."""

    name: str
    dtype: str
    unit: str
    description: str
    names: tuple[str, ...] = ()
    nullable: bool = False


class Stream(msgspec.Struct, frozen=True):
    """A flat array beside a table; the table's rows say which part is theirs."""

    name: str
    dtype: str
    unit: str
    description: str


class Table(msgspec.Struct, frozen=True):
    """A table, the roles whose files have it, and the streams that its rows point into."""

    name: str
    roles: tuple[str, ...]
    description: str
    columns: tuple[Column, ...]
    streams: tuple[Stream, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the columns."""
        return tuple(column.name for column in self.columns)

    @property
    def dtype(self) -> np.dtype[np.void]:
        """The rows as a numpy structured type, enumerations as their codes."""
        return np.dtype([(column.name, column.dtype) for column in self.columns])

    def column(self, name: str) -> Column:
        """The column of that name; KeyError where there is none."""
        for column in self.columns:
            if column.name == name:
                return column
        raise KeyError(name)

    def code(self, column: str, name: str) -> int:
        """The number that stands for `name` in an enumeration."""
        return self.column(column).names.index(name)


def _instant(name: str, description: str, nullable: bool = False) -> Column:
    return Column(name, "<f8", INSTANT, description, nullable=nullable)


def _real(name: str, unit: str, description: str, nullable: bool = False) -> Column:
    return Column(name, "<f8", unit, description, nullable=nullable)


def _seconds(name: str, description: str) -> Column:
    return Column(name, "<f8", "s", description)


def _id(name: str, description: str) -> Column:
    return Column(name, "<i8", "id", description)


def _count(name: str, unit: str, description: str, nullable: bool = False) -> Column:
    return Column(name, "<i4", unit, description, nullable=nullable)


def _total(name: str, unit: str, description: str) -> Column:
    return Column(name, "<u8", unit, description)


def _digest(description: str) -> Column:
    return Column("digest", "<u8", "id", description + " (0: not taken)", nullable=True)


def _text(name: str, nbytes: int, description: str) -> Column:
    return Column(name, f"S{nbytes}", "text", description)


def _choice(name: str, names: tuple[str, ...], description: str) -> Column:
    return Column(name, "u1", "enumeration", description, names=names, nullable=names[0] == NONE)


_VERSION = _count("version", "version", "weight version")
_STEP = _count("step", "step", "training step, 1 first")
_OFFSET = _total("offset", "B", "where its bytes begin in the stream")
_NBYTES = Column("nbytes", "<u4", "B", "how many bytes it has there")
_NUMBER_OF_BYTES = _total("nbytes", "B", "how many bytes")
_REPETITION = _count("repetition", "1", "0 first")
_TRANSPORT = _choice("transport", BENCH_TRANSPORTS, "what carried the relays' chunks")

TABLES: dict[str, Table] = {
    table.name: table
    for table in (
        Table(
            "events",
            ("manager",),
            "Every event that the controller was given, in order; the row number is the event's index",
            (_instant("time_s", "`now` as the controller got it"), _OFFSET, _NBYTES),
            (Stream("events_bytes", "u1", "B", "the events as MessagePack, one after the other"),),
        ),
        Table(
            "commands",
            ("manager",),
            "Every command that the controller gave, in order",
            (
                _instant("time_s", "`now` of the event that caused it"),
                _OFFSET,
                _NBYTES,
                _total("cause", "index", "row in `events` of the event that caused it"),
            ),
            (Stream("commands_bytes", "u1", "B", "the commands as MessagePack, one after the other"),),
        ),
        Table(
            "hand_outs",
            ("manager",),
            "Every prompt that was handed out; a hand-out makes a group",
            (
                _id("group", "number of the hand-out"),
                _id("prompt", "index into the prompts of `purpose`"),
                _choice("purpose", PURPOSES, "what it was handed out for"),
                _instant("handed_out_s", "when"),
            ),
        ),
        Table(
            "trajectories",
            ("manager",),
            "How each trajectory ended",
            (
                _id("trajectory", "the trajectory"),
                _id("group", "the hand-out it belongs to"),
                _id("prompt", "index into the prompts of `purpose`"),
                _count("sample", "1", "its place in the group, 0 first"),
                _choice("purpose", PURPOSES, "what it was generated for"),
                _choice("state", STATES, "consumed, discarded or returned"),
                _text("reason", 48, "why it ended so"),
                _count("version", "version", "weights that generated it, or its beginning", nullable=True),
                _count("newest_version", "version", "weights that generated its end", nullable=True),
                _count("spans", "1", "how many versions its tokens come from"),
                _total("prefilled_tokens", "token", "tokens prefilled again, where it went on elsewhere or later"),
                _count("rank", "rank", "rollout that generated its end", nullable=True),
                _count("prompt_tokens", "token", "length of the prompt"),
                _count("response_tokens", "token", "length of the response"),
                _real("reward", "1", "reward; counts only where `verdict` is graded"),
                _choice("verdict", VERDICTS, "what became of grading"),
                _choice("stop", STOPS, "why generation ended"),
                _instant("begun_s", "when it was first given to a rollout"),
                _instant("finished_s", "when its end reached the manager", nullable=True),
                _instant("settled_s", "when it was consumed, discarded or returned"),
                _count("staleness_finish", "version", "versions published between its own and its end", nullable=True),
                _count(
                    "staleness_consumption",
                    "version",
                    "versions published between its own and the moment a batch took it",
                    nullable=True,
                ),
                _count("step", "step", "the step that trained on it", nullable=True),
            ),
        ),
        Table(
            "groups",
            ("manager",),
            "How each prompt that was handed out ended",
            (
                _id("group", "number of the hand-out"),
                _id("prompt", "index into the prompts of `purpose`"),
                _choice("purpose", PURPOSES, "what it was handed out for"),
                _choice("state", STATES, "consumed, discarded or returned"),
                _text("reason", 48, "why it ended so"),
                _count("version", "version", "weights that generated its members", nullable=True),
                _count("step", "step", "the step that trained on it", nullable=True),
                _count("trajectories", "1", "its members that ended as it did"),
                _instant("handed_out_s", "when it was handed out"),
                _instant("settled_s", "when it was consumed, discarded or returned"),
            ),
        ),
        Table(
            "steps",
            ("manager",),
            "Every training step",
            (
                _STEP,
                _count("version", "version", "weight version that the step made"),
                _instant("started_s", "when its first mini-batch was handed to the trainers"),
                _instant("finished_s", "when its last mini-batch was done"),
                _seconds("train_s", "time spent on its mini-batches"),
                _count("samples", "1", "trajectories trained on"),
                _total("prompt_tokens", "token", "prompt tokens of these trajectories"),
                _total("response_tokens", "token", "response tokens of these trajectories"),
                _real("reward_mean", "1", "mean reward"),
                _real("reward_std", "1", "standard deviation of the reward"),
                _real("staleness_finish_mean", "version", "mean staleness when they finished"),
                _count("staleness_finish_max", "version", "largest staleness when they finished"),
                _real("staleness_consumption_mean", "version", "mean staleness when they were taken"),
                _count("staleness_consumption_max", "version", "largest staleness when they were taken"),
                *(_real(name, unit, text, nullable=True) for name, (unit, text) in METRICS.items()),
            ),
        ),
        Table(
            "step_metrics",
            ("manager",),
            "Metrics of a step that have no column in `steps`",
            (_STEP, _text("name", 48, "the metric"), _real("value", "1", "its value over the step")),
        ),
        Table(
            "evaluations",
            ("manager",),
            "Every evaluation on the held-out prompts",
            (
                _instant("time_s", "when it was complete"),
                _VERSION,
                _count("step", "step", "training steps behind that version"),
                _count("prompts", "1", "held-out prompts"),
                _count("graded", "1", "responses that were graded"),
                _real("accuracy", "1", "share of graded responses with the full reward"),
                _real("reward_mean", "1", "mean reward of graded responses"),
                _total("response_tokens", "token", "length of all responses together"),
            ),
        ),
        Table(
            "publications",
            ("manager",),
            "Every weight version that the trainers published",
            (
                _VERSION,
                _count("attempt", "1", "the attempt that published it"),
                _count("step", "step", "training steps behind it (0: the checkpoint)"),
                _instant("time_s", "when all trainers held their shards"),
                _digest("digest of the image, by the first relay that held it; not taken of one that no relay held"),
                _total("nbytes", "B", "size of the image"),
                _seconds("stall_s", "how long the trainers stood still for it"),
            ),
        ),
        Table(
            "relay_events",
            ("manager",),
            "What happened to broadcasts and relays, and why",
            (
                _instant("time_s", "when it was decided, or became known"),
                _choice("what", RELAY_EVENTS, "what happened"),
                _count("version", "version", "the weight version it happened to", nullable=True),
                _count("relay", "rank", "the relay or spare that it is about; of a chain the first", nullable=True),
                _count("rollout", "rank", "the rollout that was attached to the relay", nullable=True),
                _text("reason", 160, "why"),
            ),
        ),
        Table(
            "checkpoints",
            ("manager",),
            "Every checkpoint that was begun, when it is known what became of it",
            (
                _count("step", "1", "the step after which it was taken"),
                _instant("begun_s", "when it was asked for"),
                _instant("time_s", "when it was complete, or given up"),
                _choice("what", CHECKPOINT_ENDS, "what became of it"),
                _seconds("stall_s", "how long the slowest trainer stood still for it"),
                _total("nbytes", "byte", "length of all parts"),
                _text("reason", 160, "why it was given up"),
            ),
        ),
        Table(
            "moves",
            ("manager",),
            "Every move of a rollout's last trajectories to another one: what was expected, and what came of it",
            (
                _count("move", "1", "number of the move, 0 first"),
                _VERSION,
                _count("source", "rank", "the rollout that was to be emptied"),
                _count("destination", "rank", "the rollout that was to go on"),
                _text("reason", 112, "what was planned"),
                _text("ending", 56, "what became of it: moved, or why not"),
                _count("trajectories", "1", "trajectories that the destination has taken"),
                _total("tokens", "token", "tokens that it read again, prompts of those included that ended there"),
                _instant("planned_s", "when the source was told"),
                _instant("handed_over_s", "when it had given them up", nullable=True),
                _instant("resumed_s", "when the first of them had a new token at the destination", nullable=True),
                _instant("released_s", "when the source was empty", nullable=True),
                _instant("loaded_s", "when the source had newer weights, if that was what it did next", nullable=True),
                _count("loaded_version", "version", "these weights", nullable=True),
                _real("prefill_s", "s", "from hand-over to first token, without decode steps", nullable=True),
                _real("expected_gain_s", "s", "time of a rollout that it was to save, less its cost", nullable=True),
                _real("gain_s", "s", "what it saved, from the steps that both then had left", nullable=True),
            ),
        ),
        Table(
            "failures",
            ("manager",),
            "Every worker or rank that was lost",
            (
                _instant("time_s", "when the manager learned of it"),
                _count("rank", "rank", "the rank that was lost; absent where the whole job ended so", nullable=True),
                _text("text", 96, "what happened"),
            ),
        ),
        Table(
            "waits",
            ("manager",),
            "Who waited for whom when the job stalled",
            (
                _instant("time_s", "when it was noted"),
                _count("rank", "rank", "the rank that waited"),
                _text("waiting_for", 96, "for whom or what"),
                _seconds("since_s", "for how long already"),
            ),
        ),
        Table(
            "tokens",
            ("manager",),
            "Tokens of consumed trajectories, where the config asks for them: one row for each block",
            (
                _id("trajectory", "the trajectory"),
                _count("position", "token", "place of the first token in the trajectory, 0 first"),
                _choice("source", SOURCES, "where the tokens come from"),
                _count("version", "version", "weights that generated them", nullable=True),
                _total("offset", "token", "where its tokens begin in the streams"),
                _count("tokens", "token", "how many tokens it has there"),
            ),
            (
                Stream("token_ids", "<i4", "id", "tokens, one block after the other"),
                Stream("token_logprobs", "<f4", "nat", "log-probability each was sampled with; NaN where it was not"),
            ),
        ),
        Table(
            "relay_versions",
            ("relay", "spare"),
            "Every version that this relay received, or gave up for a newer one",
            (
                _VERSION,
                _instant("time_s", "when it was complete and checked, or given up"),
                _choice("what", RECEPTIONS, "which of these"),
                _seconds("seconds", "from when the relay was told of it until it was complete; else 0"),
                _total("nbytes", "B", "size of the image; 0 where it was given up"),
                _total("memory_bytes", "B", "what the relay has of its node's memory, all slots together"),
            ),
        ),
        Table(
            "pulls",
            ("rollout",),
            "Every version that this rollout loaded",
            (
                _VERSION,
                _instant("time_s", "when the engine held it"),
                _seconds("wait_s", "from the request to the relay's lease"),
                _seconds("copy_s", "from there until it was in memory of this node; 0 where the relay is on it"),
                _seconds("pause_s", "how long the engine stood still to load it"),
                _digest("digest of the weights as they lie in the engine"),
            ),
        ),
        Table(
            "engine",
            ("rollout",),
            "How full the inference engine was, and what it did since the last row",
            (
                _instant("time_s", "when"),
                _real("kv_use", "1", "used share of the KV cache"),
                _count("running", "1", "trajectories being decoded"),
                _count("waiting", "1", "trajectories without a place in the KV cache"),
                _count("generated_tokens", "token", "tokens generated since the last row"),
                _seconds("busy_s", "time in the engine since the last row"),
            ),
        ),
        Table(
            "pacing",
            ("trainer", "rollout"),
            "How well this rank's emulated engine or trainer kept to its schedule since the last row",
            (
                _instant("time_s", "when"),
                _seconds("scheduled_s", "how long trajectories, loads and steps were to take, one after the other"),
                _seconds("late_s", "by how much later than scheduled each was done, altogether"),
                _seconds("worst_s", "by how much the latest one was, so far"),
            ),
        ),
        Table(
            "bench_pings",
            (BENCH,),
            "Messages between the hosts of the first two relays, by themselves",
            (_NUMBER_OF_BYTES, _seconds("seconds", "half of a round trip")),
        ),
        Table(
            "bench_broadcasts",
            (BENCH,),
            "Every timed broadcast of the same bytes from the trainer's host to the relays, all ways in turn",
            (
                _choice("way", BENCH_WAYS, "the relays, one copy between neighbours, or what a user would do without"),
                _TRANSPORT,
                _count("relays", "1", "relays that received it"),
                _NUMBER_OF_BYTES,
                _count("chunks", "1", "chunks it was cut into; 1 where the way has none"),
                _REPETITION,
                _seconds("seconds", "from the trainer's start, bytes in hand, until the last receiver had all of it"),
                _real(
                    "publish_s",
                    "s",
                    "before that: from the request to publish until the trainer held it",
                    nullable=True,
                ),
                _real("formula_s", "s", "what the formula says, by the pings of this run", nullable=True),
            ),
        ),
        Table(
            "bench_publishes",
            (BENCH,),
            "A trainer's stall beside a plain copy of the same bytes in the same process, in pairs",
            (
                _TRANSPORT,
                _count("relays", "1", "relays of the chain behind it"),
                _NUMBER_OF_BYTES,
                _REPETITION,
                _seconds("publish_s", "how long the worker stood still for the publication"),
                _seconds("copy_s", "how long a plain copy took it"),
            ),
        ),
        Table(
            "bench_pulls",
            (BENCH,),
            "A rollout's load from its node's image beside a plain copy of the same bytes, in pairs",
            (
                _count("readers", "1", "workers that did it at once"),
                _NUMBER_OF_BYTES,
                _REPETITION,
                _seconds("pull_s", "mapping and loading, the slowest reader's"),
                _seconds("copy_s", "a plain copy, the slowest reader's"),
            ),
        ),
        Table(
            "bench_failures",
            (BENCH,),
            "Every fault that was made in the middle of a broadcast",
            (
                _choice("fault", BENCH_FAULTS, "which relay was killed, or what else was done"),
                _TRANSPORT,
                _count("relays", "1", "relays of the chain"),
                _NUMBER_OF_BYTES,
                _count("chunks", "1", "chunks of the image"),
                _REPETITION,
                _real("at", "1", "when, as a share of the time that the relay behind it takes to get everything"),
                _real("noticed_s", "s", "from the fault until the manager noticed", nullable=True),
                _real("moved_s", "s", "from then until the relay behind had its next chunk", nullable=True),
                _real("complete_s", "s", "from noticing until all survivors had the newest version", nullable=True),
                _count("survivors", "1", "relays that are left"),
                _count(
                    "complete", "1", "of these, relays that hold the newest version complete, with the right digest"
                ),
                _count("lost_publications", "1", "publications that the trainer could not make, or that no relay got"),
            ),
        ),
        Table(
            "phases",
            tuple(PHASES),
            "What this rank spent its time on since the last row of the phase",
            (
                _instant("time_s", "when"),
                _choice("phase", ALL_PHASES, "on what"),
                _seconds("seconds", "how long"),
            ),
        ),
    )
}

CLOSED = "closed_unix_s"
"""Scalar dataset: when the writer closed the file (Unix time); NaN while it is open, and for ever after a kill."""

METADATA = "metadata"
"""Group for what is too long for an attribute: one byte array for each key."""

IDENTITY = ("schema_version", "role", "rank", "attempt")
"""Attributes of every file; the metadata are attributes too, up to ATTRIBUTE_BYTES."""

ATTRIBUTE_BYTES = 32 * 1024
"""Longer metadata go to the group METADATA: HDF5 keeps an attribute in an object header of at most 64 KiB."""

COLUMNS = "columns"
"""Attribute of a table's dataset: unit and description of each column, as JSON."""


def tables_of(role: str) -> list[Table]:
    """The tables in the files of this role, in the order in which they are flushed."""
    if role not in PHASES and role != BENCH:
        raise ValueError(f"unknown role {role!r}; roles with a record are {', '.join((*PHASES, BENCH))}")
    return [table for table in TABLES.values() if role in table.roles]


def attempt_of(name: str) -> int | None:
    """The attempt that a file of this name is of; None where it is no record's name."""
    match = re.fullmatch(r"attempt-(\d+)\.rank-\d+\.[a-z_]+\.h5", name)
    return None if match is None else int(match[1])


def file_name(role: str, rank: int, attempt: int) -> str:
    """Name of a rank's file; it lies in `run_dir`/records."""
    return f"attempt-{attempt}.rank-{rank:05d}.{role}.h5"
