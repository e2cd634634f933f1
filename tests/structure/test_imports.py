"""What importing a part of the package brings with it, seen from a fresh interpreter."""

from __future__ import annotations

import json
import subprocess
import sys

from source_tree import package_modules

EXTRAS = ["torch", "transformers", "safetensors", "tokenizers", "mpi4py", "xxhash", "reasoning_gym", "matplotlib"]


def modules_in(*folders: str) -> list[str]:
    """Names of all modules of these folders (or single modules) of the package."""
    return [module.name for module in package_modules() if module.folder in folders]


def run_python(script: str) -> str:
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def loaded_by(names: list[str], watched: list[str]) -> list[str]:
    """For each module that brings a watched one, or cannot be imported, a line; they are imported in this order."""
    assert names
    script = (
        "import importlib, json, sys\n"
        "found = []\n"
        f"for name in {names!r}:\n"
        f"    missing = [m for m in {watched!r} if m not in sys.modules]\n"
        "    try: importlib.import_module(name)\n"
        "    except Exception as error: found.append(f'{name} cannot be imported: {error!r}')\n"
        "    found += [f'{name} loads {m}' for m in missing if m in sys.modules]\n"
        "print(json.dumps(found))"
    )
    lines: list[str] = json.loads(run_python(script))
    return lines


def test_no_process_but_an_engine_worker_loads_torch_and_no_import_initialises_mpi() -> None:
    names = modules_in("cli", "launch", "runtime", "jobs", "mpi", "record", "tasks", "weights", "process", "analysis")
    lines = loaded_by(names, ["torch", "transformers", "mpi4py.MPI"])
    assert not lines, "\n".join(lines)


def test_the_command_starts_without_what_its_subcommands_need() -> None:
    lines = loaded_by(["laminar_hpc.cli"], [*EXTRAS, "h5py", "numpy"])
    assert not lines, "\n".join(lines)


def test_the_pure_core_is_light() -> None:
    names = modules_in("protocol", "errors", "policy", "control")
    lines = loaded_by(names, [*EXTRAS, "h5py", "numpy", "pydantic", "laminar_hpc.config"])
    assert not lines, "\n".join(lines)


def test_a_module_that_loads_too_much_is_named() -> None:
    assert loaded_by(["json", "no_such_module"], ["json.decoder", "torch"])[-1].startswith(
        "no_such_module cannot be imported"
    )
    assert loaded_by(["wave"], ["wave"]) == ["wave loads wave"]


def test_the_core_without_extras_decides_and_reads_records() -> None:
    names = [
        *modules_in("cli", "protocol", "errors", "policy", "control", "config", "record"),
        "laminar_hpc.weights.manifest",
    ]
    script = (
        f"import importlib, sys\nsys.modules.update(dict.fromkeys({EXTRAS!r}))\n"
        f"print(len([importlib.import_module(name) for name in {names!r}]))"
    )
    assert run_python(script).strip() == str(len(names))
