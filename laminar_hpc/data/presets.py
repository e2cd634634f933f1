"""The costs and the response lengths that a config's section `paced` names: published ones, or its own numbers."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from importlib import resources

import msgspec

from laminar_hpc.config.schema import PUBLISHED_LENGTHS, Config
from laminar_hpc.errors import ConfigError
from laminar_hpc.policy.costs import Costs, Points, wrong_with

STEP_OVERHEAD_S = 0.023
"""Fitted, with the 32B model's `kv_cache_tokens`, to one published run: tests/rollout/test_paced_lifecycle.py."""

OPERATIONS_PER_S = 0.4 * 989e12
"""Of a GPU that prefills: 40 % of an H800's dense bfloat16 peak."""

HOST_BYTES_PER_S = 25e9
"""Between a GPU and its host's memory: about what 16 lanes of PCIe 4 give."""

COLUMNS = ["tokens", "cdf"]


class _Preset(msgspec.Struct, frozen=True, kw_only=True):
    """Qwen2.5 of one size on `gpus` H800; README.md beside this file says where each number comes from.

    `decode`: the model and the TP of the published curve that it takes, `decode_scale` times slower.
    """

    gpus: int
    parameters: float
    kv_cache_tokens: int
    decode: tuple[str, int]
    decode_scale: float = 1.0
    trained_tokens_per_s: float
    publish_s: float
    load_s: float


_PRESETS = {
    "7b": _Preset(
        gpus=1,
        parameters=7.62e9,
        kv_cache_tokens=750_000,
        decode=("7b", 1),
        trained_tokens_per_s=137_235.4,
        publish_s=0.149,
        load_s=0.130,
    ),
    "32b": _Preset(
        gpus=4,
        parameters=32.8e9,
        kv_cache_tokens=640_000,
        decode=("32b", 4),
        trained_tokens_per_s=69_124.4,
        publish_s=0.64,
        load_s=0.558,
    ),
    "72b": _Preset(
        gpus=8,
        parameters=72.7e9,
        kv_cache_tokens=980_000,
        decode=("32b", 4),
        decode_scale=(72.7 / 8) / (32.8 / 4),
        trained_tokens_per_s=62_400.0,
        publish_s=1.40,
        load_s=1.283,
    ),
}


def preset_costs(model: str) -> Costs:
    """The costs of a model of `paced.model`: of one engine, and of the trainer that the published runs had beside it."""
    preset = _PRESETS[model]
    rows = [
        (float(row["batch"]), float(row["step_ms"]) * 1e-3 * preset.decode_scale)
        for row in _rows("decode_latency_h800.csv")
        if (row["model"], int(row["tp"])) == preset.decode
    ]
    return Costs(
        decode=Points(tuple(batch for batch, _ in rows), tuple(seconds for _, seconds in rows)),
        step_overhead_s=STEP_OVERHEAD_S,
        prefill_call_s=0.0,
        prefill_token_s=2 * preset.parameters / (preset.gpus * OPERATIONS_PER_S),
        kv_cache_tokens=preset.kv_cache_tokens,
        train_call_s=0.0,
        train_token_s=1 / preset.trained_tokens_per_s,
        publish_s=preset.publish_s,
        load_s=preset.load_s,
        switch_s=2 * 2 * preset.parameters / preset.gpus / HOST_BYTES_PER_S,
    )


def costs_of(config: Config) -> Costs:
    """The costs of a config: those of `paced.model`, with the numbers that the config sets over them."""
    paced, own = config.paced, {}
    for name in Costs.__struct_fields__:
        value = getattr(paced, name, None)
        if value is not None and name != "decode":
            own[name] = value
    if paced.decode:
        own["decode"] = Points(
            tuple(float(batch) for batch, _ in paced.decode), tuple(seconds for _, seconds in paced.decode)
        )
    if config.rollout.kv_cache_tokens:
        own["kv_cache_tokens"] = config.rollout.kv_cache_tokens
    if not config.control.colocated:
        own["switch_s"] = 0.0
    return msgspec.structs.replace(preset_costs(paced.model), **own)


def response_lengths(config: Config) -> Points:
    """Of the distribution `paced.lengths`: which share of responses (0 to 1) is no longer than so many tokens.

    As a function from that share to tokens. ConfigError where a file cannot be read, or is no such distribution.
    """
    chosen = config.paced.lengths or f"{config.paced.model}-math"
    if chosen in PUBLISHED_LENGTHS:
        rows = list(_rows(f"response_length_{chosen.replace('-', '_')}.csv"))
    else:
        rows = _read_file(chosen)
    return _distribution(rows, chosen)


def check_paced(config: Config) -> None:
    """ConfigError where `rollout.engine` is paced and its costs or lengths make no sense."""
    if config.rollout.engine != "paced":
        return
    batches = [float(batch) for batch, _ in config.paced.decode]
    wrong = wrong_with(batches, [seconds for _, seconds in config.paced.decode]) if batches else ""
    if wrong or len(set(batches)) < len(batches):
        raise ConfigError(f"paced.decode: {wrong or 'has two points for one batch'}")
    costs = costs_of(config)
    if costs.step_s(1) <= 0:
        raise ConfigError("paced.decode: a decode step must take some time, paced.step_overhead_s included, got 0 s")
    longest = config.rollout.max_prompt_tokens + config.rollout.max_response_tokens
    if longest > costs.kv_cache_tokens:
        raise ConfigError(
            f"rollout.kv_cache_tokens: the emulated KV cache has room for {costs.kv_cache_tokens} tokens, but "
            f"rollout.max_prompt_tokens + rollout.max_response_tokens is {longest}"
        )
    load_s = costs.load_s * config.paced.time_scale
    if load_s >= config.rollout.timeout_s:
        raise ConfigError(
            f"paced.load_s: a load takes {load_s:g} s of this machine; rollout.timeout_s, after which a silent engine is "
            f"started again, must be more, got {config.rollout.timeout_s:g}"
        )
    if config.timing_only or config.paced.lengths:
        response_lengths(config)


def _rows(name: str) -> Iterator[dict[str, str]]:
    """The rows of a CSV file beside this one."""
    text = (resources.files("laminar_hpc.data") / name).read_text(encoding="utf-8")
    return csv.DictReader(text.splitlines())


def _read_file(path: str) -> list[dict[str, str]]:
    try:
        with open(path, encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            columns, rows = reader.fieldnames, list(reader)
    except OSError as error:
        raise ConfigError(
            f"paced.lengths: must be one of {', '.join(PUBLISHED_LENGTHS)} or a CSV file; {path} cannot be read: "
            f"{error.strerror}"
        ) from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"paced.lengths: {path} is no CSV file: {error}") from error
    if columns != COLUMNS:
        raise ConfigError(f"paced.lengths: {path} must begin with the line tokens,cdf, got {columns}")
    return rows


def _distribution(rows: list[dict[str, str]], source: str) -> Points:
    try:
        tokens = tuple(float(row["tokens"]) for row in rows)
        shares = tuple(float(row["cdf"]) for row in rows)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"paced.lengths: {source} has a row that is not two numbers: {error}") from error
    wrong = wrong_with(shares, tokens)
    if not wrong and abs(shares[-1] - 1.0) > 1e-3:
        wrong = f"the last cdf must be 1, got {shares[-1]:g}"
    if wrong:
        raise ConfigError(f"paced.lengths: {source}: {wrong}")
    return Points(shares, tokens)
