"""Which of several faults of a config is named."""

from __future__ import annotations

from typing import Any

import pytest

from laminar_hpc.config.load import check_config
from laminar_hpc.errors import ConfigError


@pytest.mark.parametrize(
    ("faulty", "says"),
    [
        ({"modl": {"path": "m"}}, "unknown key modl; did you mean model?"),
        ({"model": {"pth": "m"}}, "unknown key model.pth; did you mean path?"),
        ({"jobs": {"rollouts": 2}}, "unknown key jobs; did you mean job?"),
        ({}, "model is required"),
    ],
)
def test_a_misspelt_name_goes_before_the_key_that_is_missing_for_it(faulty: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check_config({"run_dir": "r", **faulty}, "c.toml")
    assert str(refused.value).startswith(f"c.toml: {says}")
