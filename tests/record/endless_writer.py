"""Writes events and pulls for ever, or until the disk refuses, and says after each flush how many rows are in the file.

    endless_writer.py PATH ROLE [FILE_SIZE_LIMIT_BYTES]

Row i of `events` is at time i and holds b"<i>" repeated i % 50 times; row i of `pulls` is version i at time i.
"""

from __future__ import annotations

import resource
import sys
from itertools import count

from laminar_hpc.errors import RecordError
from laminar_hpc.record.writer import RecordWriter

ROWS_A_FLUSH = 23


def main(path: str, role: str, limit: str = "") -> None:
    if limit:
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(limit), int(limit)))
    try:
        writer = RecordWriter(path, role, 0, 0, {"config": "{}"}, flush_s=1.0)
    except RecordError as error:
        print("refused", error, flush=True)
        return
    written = 0
    try:
        for row in count():
            if role == "manager":
                writer.add_stream("events", float(row), b"<%d>" % row * (row % 50))
            else:
                writer.add("pulls", version=row, time_s=float(row), wait_s=0.0, copy_s=0.0, pause_s=0.0, digest=row)
            if row % ROWS_A_FLUSH == ROWS_A_FLUSH - 1:
                writer.flush()
                written = row + 1
                print(written, flush=True)
    except RecordError as error:
        print("refused", error, flush=True)
    try:
        writer.add("failures" if role == "manager" else "pulls")
    except RecordError as error:
        print("refused", error, flush=True)
    writer.close()


main(*sys.argv[1:])
