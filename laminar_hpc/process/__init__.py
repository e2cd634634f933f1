"""Worker processes: started from a clean forkserver, spoken to over a pipe, gone when their driver is gone."""
