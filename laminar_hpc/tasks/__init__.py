"""Prompts, verifiable rewards, and the worker process in which foreign task code runs."""
