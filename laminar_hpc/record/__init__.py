"""What a run leaves behind: one HDF5 file for each rank and attempt, and a status file. The only importer of h5py."""
