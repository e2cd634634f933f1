"""The MPI job: one loop a role, and the frame they run in."""
