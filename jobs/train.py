"""What MPI starts on every rank.

    mpiexec -n RANKS ... python -m laminar_hpc.jobs.train --run-dir DIR          a directory that `laminar run` has made
    srun ... python jobs/train.py --config FILE.toml [--set SECTION.KEY=VALUE]   rank 0 makes the run directory

The way of a rank goes on in laminar_hpc/runtime/job.py.
"""

import sys

from laminar_hpc.runtime.job import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
