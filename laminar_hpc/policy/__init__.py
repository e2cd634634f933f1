"""Pure decisions: what to do, from plain data alone."""
