"""Ways to leave. Argument: alone (rank 0 waits for a rank that never comes), broken, hang."""

import os
import signal
import sys
import time

from laminar_hpc.mpi.world import open_world

way = sys.argv[1]
world = open_world()
if way == "alone" and world.rank == 0:
    begun_s = time.monotonic()
    assert not world.finish(clean=True, timeout_s=0.5)
    assert 0.5 <= time.monotonic() - begun_s < 5.0
    print("left alone", flush=True)
    os._exit(0)
elif way == "broken":
    assert not world.finish(clean=False, timeout_s=60.0)
    print("left at once", flush=True)
    os._exit(0)
signal.pause()
