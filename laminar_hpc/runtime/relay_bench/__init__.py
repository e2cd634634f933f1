"""`laminar bench relay`, as MPI starts it: the relays of a job without its rest, and what to compare them with."""
