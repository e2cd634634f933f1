"""MPI behind three small interfaces: the world of ranks, mail, and transfers of weights."""
