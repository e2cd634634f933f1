"""Asynchronous reinforcement-learning post-training of language models as one Slurm/MPI job."""

__version__ = "0.3.0"
