"""Prints what each rank knows of the others. Arguments: LAMINAR_NODE of each rank, "-" for none."""

import os
import sys

from laminar_hpc.mpi.world import NODE_VARIABLE, open_world

key = sys.argv[1 + int(os.environ["OMPI_COMM_WORLD_RANK"])]
if key != "-":
    os.environ[NODE_VARIABLE] = key
world = open_world()
print(world.rank, world.size, "Open MPI" in world.library, *world.node_of_rank(), flush=True)
assert world.hostname
assert world.finish(clean=True, timeout_s=20.0)
assert world.mpi.Is_finalized()
