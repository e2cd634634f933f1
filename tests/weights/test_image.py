"""The image's slots: its invariants in storms of random calls, and what it refuses."""

from __future__ import annotations

import mmap

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from laminar_hpc.errors import ProtocolError
from laminar_hpc.weights.image import Image, Pin, SlotState

NBYTES = 5000


def paint(version: int) -> int:
    """The byte that version `version` consists of, never that of a fresh or half-written slot."""
    return 2 + version % 200


class SlotModel:
    """What one slot should be."""

    def __init__(self) -> None:
        self.version: int | None = None
        self.state = SlotState.EMPTY
        self.pins: list[Pin] = []


class ImageStorm(RuleBasedStateMachine):
    """An image beside a plain list of slots that says what it should hold."""

    @initialize(slots=st.integers(2, 4))
    def create(self, slots: int) -> None:
        self.image = Image.create(NBYTES, slots)
        self.models = [SlotModel() for _ in range(slots)]
        self.version = 0
        self.leases: list[tuple[int, int]] = []

    def versions(self, *states: SlotState) -> set[int]:
        return {model.version for model in self.models if model.version is not None and model.state in states}

    def leased(self, version: int | None) -> bool:
        return any(version == held for _, held in self.leases)

    def usable(self) -> list[SlotModel]:
        """The slots that the next version may take: any that is free, else the oldest one that can be retired."""
        idle = [model for model in self.models if not model.pins and not self.leased(model.version)]
        free = [model for model in idle if model.state in (SlotState.EMPTY, SlotState.DROPPED)]
        newest = max(self.versions(SlotState.READY), default=None)
        retirable = [model for model in idle if model.state is SlotState.READY and model.version != newest]
        return free or sorted(retirable, key=lambda model: model.version or 0)[:1]

    def fill(self, version: int, allowed: list[SlotModel]) -> None:
        buffer = self.image.begin_fill(version)
        assert (buffer is None) == (not allowed)
        if buffer is not None:
            unit = mmap.ALLOCATIONGRANULARITY  # the stamps take one of them, each slot as many as it needs
            taken = self.models[(self.image.offset_of(version) - unit) // (-(-NBYTES // unit) * unit)]
            assert taken in allowed
            taken.version, taken.state = version, SlotState.FILLING
            buffer[: NBYTES // 2] = 1

    @rule()
    def begin_fill(self) -> None:
        self.version += 1
        self.fill(self.version, self.usable())

    @precondition(lambda self: self.versions(SlotState.DROPPED))
    @rule(data=st.data())
    def begin_to_fill_again(self, data: st.DataObject) -> None:
        """What was given up: its own slot, or, where somebody touches that, another one; not while it is lent by its name."""
        version = data.draw(st.sampled_from(sorted(self.versions(SlotState.DROPPED))))
        if version <= max(self.versions(SlotState.READY), default=-1):
            return
        own = next(model for model in self.models if model.version == version)
        allowed = [] if self.leased(version) else self.usable() if own.pins else [own]
        if allowed:
            own.version = None
        self.fill(version, allowed)

    @precondition(lambda self: len(self.models) < 6)
    @rule()
    def add_slot(self) -> None:
        memory = self.image.add_slot()
        assert memory is not None
        assert not memory.any()
        self.models.append(SlotModel())

    @precondition(lambda self: self.versions(SlotState.FILLING))
    @rule(data=st.data(), drop=st.booleans())
    def complete_or_drop(self, data: st.DataObject, drop: bool) -> None:
        version = data.draw(st.sampled_from(sorted(self.versions(SlotState.FILLING))))
        model = next(model for model in self.models if model.version == version)
        if drop:
            self.image.drop(version)
            model.state = SlotState.DROPPED
        else:
            self.image.bytes_of(version)[:] = paint(version)
            self.image.complete(version)
            model.state = SlotState.READY

    @precondition(lambda self: self.versions(SlotState.FILLING, SlotState.READY))
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        version = data.draw(st.sampled_from(sorted(self.versions(SlotState.FILLING, SlotState.READY))))
        next(model for model in self.models if model.version == version).pins.append(self.image.pin(version))

    @precondition(lambda self: any(model.pins for model in self.models))
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        model = data.draw(st.sampled_from([model for model in self.models if model.pins]))
        pin = model.pins.pop()
        pin.release()
        pin.release()

    @rule(borrower=st.integers(1, 3), back=st.integers(-1, 2))
    def lease(self, borrower: int, back: int) -> None:
        newest = max(self.versions(SlotState.READY), default=None)
        at_least = (newest or 0) - back
        expected = newest if newest is not None and newest >= at_least else None
        assert self.image.lease(borrower, at_least) == expected
        if expected is not None:
            self.leases.append((borrower, expected))

    @precondition(lambda self: self.versions(SlotState.FILLING))
    @rule(borrower=st.integers(1, 3))
    def hold_a_filling_version(self, borrower: int) -> None:
        version = max(self.versions(SlotState.FILLING))
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
        ready = self.versions(SlotState.READY)
        assert self.image.newest == max(ready, default=None)
        assert self.image.slots == len(self.models)
        for version in ready:
            assert (self.image.bytes_of(version) == paint(version)).all()
        for model in self.models:
            if model.version is not None:
                assert self.image.state(model.version) is model.state
                assert self.image.leases(model.version) == sum(held == model.version for _, held in self.leases)
        assert sorted(self.image.versions) == sorted(self.versions(SlotState.FILLING, SlotState.READY))
        assert {held for _, held in self.leases} <= {model.version for model in self.models}

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
