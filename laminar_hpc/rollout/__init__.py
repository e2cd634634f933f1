"""Inference engines behind one interface, and the worker process that runs one."""
