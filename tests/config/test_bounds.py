"""Numbers so large that something underneath overflows are refused by the config."""

from __future__ import annotations

import datetime
from typing import Any, get_type_hints

import pytest
from pydantic import BaseModel

from laminar_hpc.config.load import check_config
from laminar_hpc.config.schema import Config, Cost, Seconds
from laminar_hpc.errors import ConfigError
from laminar_hpc.process.channel import Channel, wait_any

LONGEST_S = 1e6


def times() -> list[tuple[str, str]]:
    """Section and key of everything in seconds."""
    found = []
    for section, kind in get_type_hints(Config).items():
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            hints = get_type_hints(kind, include_extras=True)
            found += [(section, key) for key, hint in hints.items() if hint in (Seconds, Cost | None)]
    return found


def config_with(section: str, key: str, value: Any) -> Config:
    values = {"run_dir": "unused", "model": {"path": "unused"}}
    if key == "heartbeat_s":  # the silence that is borne must be longer
        values["job"] = {"silence_timeout_s": LONGEST_S}
    return check_config(values | {section: values.get(section, {}) | {key: value}}, "here")


def test_all_keys_in_seconds_are_found() -> None:
    names = {
        key for kind in get_type_hints(Config).values() if hasattr(kind, "model_fields") for key in kind.model_fields
    }
    assert {key for _, key in times()} == {key for key in names if key.endswith("_s")}


@pytest.mark.parametrize(("section", "key"), [*times(), ("control", "ahead")])
def test_a_million_is_the_most(section: str, key: str) -> None:
    if key != "heartbeat_s":
        assert getattr(getattr(config_with(section, key, LONGEST_S), section), key) == LONGEST_S
    with pytest.raises(ConfigError, match=rf"{section}\.{key}: .* less than or equal to 1000000"):
        config_with(section, key, 1.01e6)


def test_a_million_seconds_are_no_overflow() -> None:
    driver, stream = Channel.pair()
    Channel(stream, waits=True).close()
    assert wait_any([driver], LONGEST_S) == [driver]  # at once: the other end is closed
    assert datetime.timedelta(seconds=LONGEST_S).days == 11
