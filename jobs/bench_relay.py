"""What MPI starts on every rank for the relay bench: a manager, a trainer and the relays.

    mpiexec -n RANKS ... python -m laminar_hpc.jobs.bench_relay --run-dir DIR --relays 8 --nbytes 25e6
    srun -n RANKS ... python jobs/bench_relay.py --run-dir DIR --attempt 1 --part publish --relays 8 --nbytes 256e6

RANKS is 2 more than the relays; the first three ranks (manager, trainer, first relay) belong on one node, and each other
one on a node of its own. The way of a rank goes on in laminar_hpc/runtime/relay_bench/program.py.
"""

import sys

from laminar_hpc.runtime.relay_bench.program import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
