"""The simulator: the job's own controller, driven in virtual time by the costs of hardware that is not there."""
