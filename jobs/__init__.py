"""Entry programs and configs, installed as laminar_hpc.jobs."""
