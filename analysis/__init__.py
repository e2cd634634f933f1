"""From a run's record to checks, tables, figures and one page. Reads through laminar_hpc.record alone."""
