"""From a TOML file and `--set` options to a checked Config. It opens that file alone."""

from __future__ import annotations

import difflib
import json
import os
import tomllib
from typing import Any

from pydantic import BaseModel, ValidationError

from laminar_hpc.config.schema import PUBLISHED_LENGTHS, Config
from laminar_hpc.errors import ConfigError


def load_config(path: str, overrides: list[str] | None = None) -> Config:
    """The config in the file at `path`, with `overrides` ("section.key=value", value as in TOML) put over it.

    Paths in it come back absolute; relative ones start from the working directory. ConfigError, one line, where anything
    is unknown, missing or out of bounds.
    """
    data = _read(path)
    for override in overrides or []:
        _put(data, override)
    return resolve_paths(check_config(data, path))


def load_modes(path: str, modes: list[str], overrides: list[str], run_dir: str) -> dict[str, Config]:
    """The config in the file at `path` for each of `modes`: the file, over it its table `compare.MODE`, over that `overrides`.

    Mode and run directory are those asked for, whatever the file says; `compare` is empty. Errors and paths as in `load_config`.
    """
    data = _read(path) | {"run_dir": run_dir}
    for override in overrides:
        _put(data, override)
    sections = check_config(data, path).model_dump()["compare"]
    configs = {}
    for mode in modes:
        whole = merged(data, sections.get(mode, {}))
        for override in overrides:
            _put(whole, override)
        whole = merged(whole, {"run_dir": run_dir, "control": {"mode": mode}}) | {"compare": {}}
        configs[mode] = resolve_paths(check_config(whole, f"{path}, mode {mode}"))
    return configs


def merged(under: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """Both tables as one: a value of `over` counts where both have one, and tables in them become one in the same way."""
    both = dict(under)
    for key, value in over.items():
        below = both.get(key)
        both[key] = merged(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return both


def _read(path: str) -> dict[str, Any]:
    try:
        with open(path, "rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # not only TOML's own errors: a number may have too many digits
        raise ConfigError(f"{path}: not valid TOML: {error}") from error


def check_config(data: dict[str, Any], source: str) -> Config:
    """`data` as a Config; ConfigError names `source`, the first wrong key and what is allowed there."""
    try:
        return Config.model_validate(data)
    except ValidationError as error:
        raise ConfigError(f"{source}: {_explain(error)}") from error


def _put(data: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        raise ConfigError(f"--set {override}: must be SECTION.KEY=VALUE, for example rollout.slots=64")
    table = data
    for part in parts[:-1]:
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            raise ConfigError(f"--set {override}: {part} is a value, not a section")
    table[parts[-1]] = _value(text.strip())


def _value(text: str) -> Any:
    """A TOML value; a word that is none is taken as a string, so that the shell's quotes need no second pair."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        return text


def _explain(error: ValidationError) -> str:
    errors = error.errors()
    # an unknown key first: where it is a misspelt one, the right one is missing for it
    first = next((one for one in errors if one["type"] == "extra_forbidden"), errors[0])
    location = [str(part) for part in first["loc"]]
    key = ".".join(location)
    if first["type"] == "extra_forbidden":
        section = _section(location[:-1])
        valid = list(section.model_fields) if section is not None else []
        near = difflib.get_close_matches(location[-1], valid, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        return f"unknown key {key}; {hint}valid keys here: {', '.join(valid)}"
    if first["type"] == "missing":
        return f"{key} is required"
    if first["type"] == "value_error":
        return str(first["ctx"]["error"])
    message = first["msg"][0].lower() + first["msg"][1:]
    return f"{key}: {message}, got {first['input']!r}"


def _section(location: list[str]) -> type[BaseModel] | None:
    section: type[BaseModel] = Config
    for part in location:
        field = section.model_fields.get(part)
        annotation = field.annotation if field else None
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            return None
        section = annotation
    return section


def key_lines(section: type[BaseModel] = Config, prefix: str = "") -> list[str]:
    """Every key with its default, a line each, as `--set` takes them."""
    lines = []
    for name, field in section.model_fields.items():
        inner = _section([*prefix.split(".")[:-1], name])
        if inner is not None:
            lines += key_lines(inner, f"{prefix}{name}.")
        else:
            default = "(required)" if field.is_required() else json.dumps(field.get_default(call_default_factory=True))
            lines.append(f"{prefix}{name} = {default}")
    return lines


def resolve_paths(config: Config) -> Config:
    """The config with every path in it absolute: what all ranks may open, whatever their working directory."""
    model = config.model.model_copy(update={"path": _absolute(config.model.path)})
    task_paths = {name: _absolute(getattr(config.task, name)) for name in ("path", "held_out_path")}
    task = config.task.model_copy(update=task_paths)
    paced = config.paced
    if paced.lengths not in PUBLISHED_LENGTHS:
        paced = paced.model_copy(update={"lengths": _absolute(paced.lengths)})
    return config.model_copy(
        update={"run_dir": _absolute(config.run_dir), "model": model, "task": task, "paced": paced}
    )


def _absolute(path: str) -> str:
    if "\0" in path:
        raise ConfigError(f"a path must not hold a NUL character, got {path!r}")
    return os.path.abspath(os.path.expanduser(path)) if path else path
