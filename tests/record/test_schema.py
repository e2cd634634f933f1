"""The schema describes everything, and says the same as the protocol's records."""

from __future__ import annotations

from enum import Enum

import numpy as np
import pytest

from laminar_hpc.protocol.commands import GroupOutcome, ReportEvaluation, ReportStep, TrajectoryOutcome
from laminar_hpc.protocol.trajectory import Purpose, Source, State, Stop, Verdict
from laminar_hpc.record import schema

ALL_COLUMNS = {f"{table.name}.{column.name}": column for table in schema.TABLES.values() for column in table.columns}


@pytest.mark.parametrize("column", ALL_COLUMNS.values(), ids=ALL_COLUMNS.keys())
def test_every_column_has_a_fixed_type_a_unit_and_a_description(column: schema.Column) -> None:
    assert column.unit
    assert column.description
    dtype = np.dtype(column.dtype)
    assert dtype.kind in "iufS"
    assert dtype.itemsize > 0
    if column.names:
        assert dtype == np.uint8
        assert len(set(column.names)) == len(column.names)


def test_names_are_unique_over_tables_and_streams() -> None:
    names = [name for table in schema.TABLES.values() for name in (table.name, *(s.name for s in table.streams))]
    assert len(set(names)) == len(names)
    for table in schema.TABLES.values():
        assert len(set(table.names)) == len(table.names)


@pytest.mark.parametrize(
    ("names", "protocol"),
    [
        (schema.PURPOSES, Purpose),
        (schema.SOURCES, Source),
        (schema.STATES, State),
        (schema.STOPS, Stop),
        (schema.VERDICTS, Verdict),
    ],
)
def test_enumerations_are_those_of_the_protocol(names: tuple[str, ...], protocol: type[Enum]) -> None:
    assert [name for name in names if name != schema.NONE] == [member.value for member in protocol]


@pytest.mark.parametrize(
    ("table", "record", "left_out", "added"),
    [
        ("trajectories", TrajectoryOutcome, set(), set()),
        ("groups", GroupOutcome, set(), set()),
        ("steps", ReportStep, {"reason", "metrics"}, set(schema.METRICS)),
        ("evaluations", ReportEvaluation, {"reason"}, {"time_s"}),
    ],
)
def test_columns_are_the_fields_of_the_protocols_record(
    table: str, record: type, left_out: set[str], added: set[str]
) -> None:
    fields = set(record.__struct_fields__) - left_out | added
    assert set(schema.TABLES[table].names) == fields


def test_each_role_has_its_tables() -> None:
    assert [table.name for table in schema.tables_of("relay")] == ["relay_versions", "phases"]
    assert schema.tables_of("spare") == schema.tables_of("relay")  # it may become one
    assert [table.name for table in schema.tables_of("trainer")] == ["pacing", "phases"]
    assert [table.name for table in schema.tables_of("rollout")] == ["pulls", "engine", "pacing", "phases"]
    with pytest.raises(ValueError, match="unknown role 'cook'; roles with a record are manager"):
        schema.tables_of("cook")


def test_phases_of_all_roles_are_in_the_enumeration() -> None:
    assert {phase for phases in schema.PHASES.values() for phase in phases} == set(schema.ALL_PHASES)


def test_file_name() -> None:
    assert schema.file_name("rollout", 3, 0) == "attempt-0.rank-00003.rollout.h5"
