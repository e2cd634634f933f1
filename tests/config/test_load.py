"""Which of several faults of a config is named."""

from __future__ import annotations

import json
from typing import Any

import pytest

from laminar_hpc.config.load import check_config, key_lines
from laminar_hpc.config.schema import Config
from laminar_hpc.errors import ConfigError


@pytest.mark.parametrize(
    ("faulty", "says"),
    [
        ({"modl": {"path": "m"}}, "unknown key modl; did you mean model?"),
        ({"model": {"pth": "m"}}, "unknown key model.pth; did you mean path?"),
        ({"jobs": {"rollouts": 2}}, "unknown key jobs; did you mean job?"),
        ({}, "model.path is required"),
    ],
)
def test_a_misspelt_name_goes_before_the_key_that_is_missing_for_it(faulty: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check_config({"run_dir": "r", **faulty}, "c.toml")
    assert str(refused.value).startswith(f"c.toml: {says}")


def test_every_key_is_listed_with_its_default_and_all_of_them_can_be_set() -> None:
    lines = key_lines()
    assert "run_dir = (required)" in lines
    assert 'control.mode = "laminar"' in lines
    assert "task.parameters = {}" in lines
    values: dict[str, Any] = {"run_dir": "r", "model": {"path": "m"}}
    for line in lines:
        key, _, text = line.partition(" = ")
        section, _, name = key.rpartition(".")
        if text not in ("(required)", "null"):
            (values.setdefault(section, {}) if section else values)[name] = json.loads(text)
    assert values["model"].pop("path") == ""  # needed by all that have a model
    values["model"]["path"] = "m"
    assert check_config(values, "here") == check_config({"run_dir": "r", "model": {"path": "m"}}, "here")
    sections = [value for value in Config(**values).model_dump().values() if isinstance(value, dict)]
    assert len(lines) == 2 + sum(map(len, sections))  # run_dir and compare are in none
