"""The image's slots: its invariants in storms of random calls, and what it refuses."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from laminar_hpc.errors import ProtocolError
from laminar_hpc.weights.image import Image, SlotState

NBYTES = 5000


def paint(version: int) -> int:
    """The byte that version `version` consists of, never that of a fresh or half-written slot."""
    return 2 + version % 200


class ImageStorm(RuleBasedStateMachine):
    """An image beside plain sets that say what it should hold."""

    @initialize(slots=st.integers(2, 4))
    def create(self, slots: int) -> None:
        self.image = Image.create(NBYTES, slots)
        self.slots = slots
        self.version = 0
        self.filling: set[int] = set()
        self.ready: set[int] = set()
        self.leases: list[tuple[int, int]] = []

    def leased(self, version: int) -> bool:
        return any(version == held for _, held in self.leases)

    @rule()
    def begin_fill(self) -> None:
        self.version += 1
        newest = max(self.ready, default=None)
        retirable = {v for v in self.ready if v != newest and not self.leased(v)}
        buffer = self.image.begin_fill(self.version)
        full = len(self.filling) + len(self.ready) == self.slots
        assert (buffer is None) == (full and not retirable)
        if buffer is not None:
            if full:
                self.ready.remove(min(retirable))
            self.filling.add(self.version)
            buffer[: NBYTES // 2] = 1

    @precondition(lambda self: self.filling)
    @rule(data=st.data())
    def complete(self, data: st.DataObject) -> None:
        version = data.draw(st.sampled_from(sorted(self.filling)))
        self.image.bytes_of(version)[:] = paint(version)
        self.image.complete(version)
        self.filling.remove(version)
        self.ready.add(version)

    @rule(borrower=st.integers(1, 3), back=st.integers(-1, 2))
    def lease(self, borrower: int, back: int) -> None:
        newest = max(self.ready, default=None)
        at_least = (newest or 0) - back
        expected = newest if newest is not None and newest >= at_least else None
        assert self.image.lease(borrower, at_least) == expected
        if expected is not None:
            self.leases.append((borrower, expected))

    @precondition(lambda self: self.filling)
    @rule(borrower=st.integers(1, 3))
    def hold_a_filling_version(self, borrower: int) -> None:
        version = max(self.filling)
        self.image.hold(borrower, version)
        self.leases.append((borrower, version))

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(self.leases))
        self.image.give_back(*lease)
        self.leases.remove(lease)

    @rule(borrower=st.integers(1, 3))
    def drop_borrower(self, borrower: int) -> None:
        self.image.drop_borrower(borrower)
        self.leases = [lease for lease in self.leases if lease[0] != borrower]

    @rule(borrower=st.integers(1, 3), version=st.integers(0, 40))
    def give_back_what_was_not_lent(self, borrower: int, version: int) -> None:
        if (borrower, version) not in self.leases:
            with pytest.raises(ProtocolError, match=f"version {version}"):
                self.image.give_back(borrower, version)

    @invariant()
    def holds_what_it_should(self) -> None:
        if not hasattr(self, "image"):
            return
        assert self.image.newest == max(self.ready, default=None)
        for version in self.ready:
            assert self.image.state(version) is SlotState.READY
            assert (self.image.bytes_of(version) == paint(version)).all()
        for version in self.ready | self.filling:
            assert self.image.leases(version) == sum(held == version for _, held in self.leases)
        assert all(held in self.ready | self.filling for _, held in self.leases)

    def teardown(self) -> None:
        if hasattr(self, "image"):
            self.image.close()


TestImageStorm = ImageStorm.TestCase
TestImageStorm.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@pytest.fixture
def image():
    with Image.create(NBYTES, slots=2) as image:
        yield image


def fill(image: Image, version: int) -> None:
    buffer = image.begin_fill(version)
    assert buffer is not None
    buffer[:] = paint(version)
    image.complete(version)


def test_the_class_example(image: Image) -> None:
    fill(image, 1)
    assert image.lease(borrower=9, at_least=0) == 1
    fill(image, 2)
    assert image.begin_fill(3) is None
    image.give_back(9, 1)
    assert image.begin_fill(3) is not None
    assert image.newest == 2
    assert image.state(1) is SlotState.EMPTY


def test_slots_do_not_overlap_and_begin_on_pages() -> None:
    with Image.create(1, slots=3) as image:
        for version in range(3):
            fill(image, version)
        offsets = [image.offset_of(version) for version in range(3)]
        assert len(set(offsets)) == 3
        assert all(offset % 4096 == 0 for offset in offsets)
        assert [image.bytes_of(version).tolist() for version in range(3)] == [[paint(0)], [paint(1)], [paint(2)]]


def test_an_image_may_have_no_bytes() -> None:
    with Image.create(0, slots=2) as image:
        fill(image, 1)
        assert image.bytes_of(1).nbytes == 0


@pytest.mark.parametrize("version", [1, 2])
def test_versions_go_up(image: Image, version: int) -> None:
    fill(image, 2)
    with pytest.raises(ProtocolError, match=rf"version {version} cannot be filled; held are 2 \(ready"):
        image.begin_fill(version)


def test_a_version_fills_once(image: Image) -> None:
    image.begin_fill(1)
    with pytest.raises(ProtocolError, match=r"version 1 cannot be filled; held are 1 \(filling"):
        image.begin_fill(1)


def test_misuse_names_version_and_state(image: Image) -> None:
    fill(image, 1)
    with pytest.raises(ProtocolError, match=r"version 1 is complete already; held are 1 \(ready, lent to nobody\)"):
        image.complete(1)
    with pytest.raises(ProtocolError, match="version 7 is not held"):
        image.bytes_of(7)
    with pytest.raises(ProtocolError, match="rank 4 gives back version 1 without a lease"):
        image.give_back(4, 1)


@pytest.mark.parametrize(("nbytes", "slots"), [(10, 1), (-1, 2)])
def test_impossible_images(nbytes: int, slots: int) -> None:
    with pytest.raises(ValueError, match=f"{slots} slots of {nbytes} bytes"):
        Image.create(nbytes, slots)


def test_closing_twice_is_harmless_and_using_it_then_is_not() -> None:
    image = Image.create(NBYTES, slots=2)
    kept = image.begin_fill(1)
    image.close()
    image.close()
    assert kept is not None
    kept[:] = np.arange(NBYTES) % 256  # the memory lives as long as a view of it
    with pytest.raises(ProtocolError, match="closed"):
        image.bytes_of(1)
