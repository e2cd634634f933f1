"""The image between real processes: what one maps while another one writes."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest

from laminar_hpc.process.memory import map_readonly, map_writable
from laminar_hpc.weights.image import Image

NBYTES = 300_001

READER = """
import sys
from laminar_hpc.process.memory import map_readonly

for line in sys.stdin:
    path, offset, version, nbytes = line.split()
    with map_readonly(path, int(offset), int(nbytes)) as image:
        same = all(bool((image == int(version) % 251).all()) for _ in range(20))
        writable = image.flags.writeable
    print(version, "whole" if same and not writable else "MIXED", flush=True)
"""

WRITER = """
import sys
from laminar_hpc.process.memory import map_writable

path, offset, nbytes = sys.argv[1:]
with map_writable(path, int(offset), int(nbytes)) as slot:
    slot[:] = 77
"""

OWNER = """
import sys
from laminar_hpc.weights.image import Image

image = Image.create(4096, slots=2)
image.begin_fill(1)[:] = 5
image.complete(1)
print(image.path, image.offset_of(1), flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def python(source: str, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", source, *map(str, arguments)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def has_spoken(process: subprocess.Popen[str], timeout_s: float) -> bool:
    return bool(select.select([process.stdout], [], [], timeout_s)[0])


def test_a_reader_never_sees_a_mixture() -> None:
    version = answers = skipped = overtaken = 0
    lent: int | None = None
    with Image.create(NBYTES, slots=3) as image, python(READER) as reader:
        assert reader.stdin is not None
        assert reader.stdout is not None
        while answers < 60:
            version += 1
            buffer = image.begin_fill(version)
            if buffer is None:
                skipped += 1
            else:
                buffer[:] = version % 251
                image.complete(version)
            if lent is None:
                lent = image.lease(borrower=1, at_least=0)
                assert lent is not None
                print(image.path, image.offset_of(lent), lent, NBYTES, file=reader.stdin, flush=True)
                waited_until = version + 5000
            elif has_spoken(reader, timeout_s=0.0 if version < waited_until else 20.0):
                assert reader.stdout.readline().split() == [str(lent), "whole"]
                overtaken += image.newest != lent
                image.give_back(1, lent)
                lent = None
                answers += 1
    assert skipped == 0  # one reader never stands in the way with three slots
    assert overtaken > 0  # newer versions were written while one was read


def test_a_trainers_worker_writes_where_it_is_told() -> None:
    with Image.create(NBYTES, slots=2) as image:
        image.begin_fill(1)
        other = image.begin_fill(2)
        assert other is not None
        with python(WRITER, image.path, image.offset_of(1), NBYTES) as writer:
            assert writer.wait(timeout=30) == 0
        assert (image.bytes_of(1) == 77).all()
        assert not other.any()


def test_a_lease_cannot_be_written_to() -> None:
    with Image.create(NBYTES, slots=2) as image:
        image.begin_fill(1)
        with map_readonly(image.path, image.offset_of(1), NBYTES) as leased:
            with pytest.raises(ValueError, match="read-only"):
                leased[0] = 1
            with pytest.raises(ValueError, match="WRITEABLE"):
                leased.flags.writeable = True


@pytest.mark.parametrize("nbytes", [0, 1, 2, 3])
def test_smallest_mappings(nbytes: int) -> None:
    with Image.create(nbytes, slots=2) as image:
        image.begin_fill(1)
        with map_writable(image.path, image.offset_of(1), nbytes) as slot:
            slot[:] = np.arange(1, nbytes + 1)
        assert image.bytes_of(1).tolist() == list(range(1, nbytes + 1))
        with map_readonly(image.path, image.offset_of(1), nbytes) as leased:
            assert leased.tolist() == list(range(1, nbytes + 1))


def test_memory_is_gone_with_its_owner_but_not_under_a_reader() -> None:
    with python(OWNER) as owner:
        assert owner.stdout is not None
        path, offset = owner.stdout.readline().split()
        assert os.stat(path).st_mode & 0o777 == 0o600
        with map_readonly(path, int(offset), 4096) as leased:
            owner.send_signal(signal.SIGKILL)
            owner.wait(timeout=10)
            assert (leased == 5).all()
        assert not os.path.exists(path)
        with pytest.raises(FileNotFoundError), map_readonly(path, 0, 4096):
            pass


def test_size_is_fixed() -> None:
    with Image.create(NBYTES, slots=2) as image, open(image.path, "r+b") as file, pytest.raises(PermissionError):
        os.ftruncate(file.fileno(), 0)
