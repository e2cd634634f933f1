"""The controller and its parts: pure state, driven by events alone."""
