"""The records that cross a rank's or a process's border: plain data, the same on the wire, in the log and in replay."""
