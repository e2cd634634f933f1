"""Training engines behind one interface, the loss, and the worker process that runs one."""
