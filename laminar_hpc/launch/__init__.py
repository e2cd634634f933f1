"""From a config to a running job, on this machine."""
