"""A rollout's pull and a relay's lending, each alone."""

from __future__ import annotations

import pytest

from laminar_hpc.errors import ProtocolError
from laminar_hpc.process.memory import map_readonly, still_lent
from laminar_hpc.protocol.peer import Lease, LeaseRefused, LeaseRequest, LeaseReturn
from laminar_hpc.weights.epochs import Epochs
from laminar_hpc.weights.image import Image
from laminar_hpc.weights.pull import Lender, LentMemory, Puller

STAMPS = 8
"""Where the stamp of the first slot is."""


@pytest.fixture
def sent() -> list:
    return []


@pytest.fixture
def puller(sent: list) -> Puller:
    return Puller(rank=7, relay=2, send_mail=lambda rank, message: sent.append((rank, message)))


def lease(version: int, request: int = 1) -> Lease:
    return Lease(version, "/proc/1/fd/3", 0, request)


def test_a_pull(puller: Puller, sent: list) -> None:
    puller.request(4)
    assert puller.waiting_for == "version 4 or newer from relay rank 2"
    assert puller.lent(2, lease(6)) == lease(6)
    assert puller.waiting_for == ""
    assert puller.loaded() == 6
    assert sent == [(2, LeaseRequest(7, 4, 1)), (2, LeaseReturn(7, 6))]
    puller.request(7)


def test_one_pull_at_a_time(puller: Puller) -> None:
    puller.request(4)
    with pytest.raises(ProtocolError, match="rank 7: asks for version 5 in the middle of a pull"):
        puller.request(5)
    puller.lent(2, lease(4))
    with pytest.raises(ProtocolError, match="in the middle of a pull"):
        puller.request(5)


def test_what_a_relay_must_not_send(puller: Puller) -> None:
    puller.request(4)
    with pytest.raises(ProtocolError, match="rank 3 lends version 4, asked for was 4 from rank 2"):
        puller.lent(3, lease(4))
    with pytest.raises(ProtocolError, match="rank 2 lends version 3, asked for was 4"):
        puller.lent(2, lease(3))
    with pytest.raises(ProtocolError, match="without a lease"):
        puller.loaded()


def test_a_lost_worker_gives_its_lease_back(puller: Puller, sent: list) -> None:
    puller.request(4)
    puller.lent(2, lease(4))
    puller.drop()
    assert sent[-1] == (2, LeaseReturn(7, 4))
    puller.drop()
    assert len(sent) == 2
    puller.request(4)


def test_a_lease_for_a_lost_worker_goes_straight_back(puller: Puller, sent: list) -> None:
    puller.request(4)
    puller.drop()
    puller.request(5)
    assert puller.lent(2, lease(6)) is None
    assert sent[-1] == (2, LeaseReturn(7, 6))
    assert puller.lent(2, lease(5, 2)) == lease(5, 2)


def test_a_lender_waits_for_a_version_new_enough(sent: list) -> None:
    with Image.create(8, slots=2) as image:
        lender = Lender(image, lambda rank, message: sent.append((rank, message)), Epochs())
        lender.asked(LeaseRequest(rank=7, version=2, request=5))
        lender.asked(LeaseRequest(rank=8, version=1, request=6))
        for version in (1, 2):
            image.begin_fill(version)
            lender.poll()
            image.complete(version)
            lender.poll()
        assert sent == [
            (8, Lease(1, image.path, image.offset_of(1), 6, STAMPS, 1)),
            (7, Lease(2, image.path, image.offset_of(2), 5, STAMPS + 8, 1)),
        ]
        assert image.begin_fill(3) is None
        lender.returned(LeaseReturn(rank=8, version=1))
        assert image.begin_fill(3) is not None


def lose(lender: Lender, rank: int, epoch: int) -> None:
    lender._epochs.lost(rank, epoch)
    lender.drop(rank)


def test_a_lost_rollout_leaves_no_leases_and_no_requests(sent: list) -> None:
    with Image.create(8, slots=2) as image:
        lender = Lender(image, lambda rank, message: sent.append((rank, message)), Epochs())
        image.begin_fill(1)
        image.complete(1)
        lender.asked(LeaseRequest(rank=7, version=0))
        lender.poll()
        lender.asked(LeaseRequest(rank=7, version=2))
        lose(lender, 7, 3)
        assert image.leases(1) == 0
        image.begin_fill(2)
        image.complete(2)
        lender.poll()
        assert len(sent) == 1


def test_another_relay(puller: Puller, sent: list) -> None:
    puller.request(4)
    puller.attach(3)
    assert puller.waiting_for == ""
    puller.request(4)
    assert sent[-1] == (3, LeaseRequest(7, 4, 2))
    assert puller.lent(2, lease(4)) is None  # the answer to the first request
    assert sent[-1] == (2, LeaseReturn(7, 4))
    assert puller.lent(3, lease(5, 2)) == lease(5, 2)
    puller.attach(2)  # while a worker loads from what rank 3 has lent
    assert puller.lending
    assert puller.loaded() == 5
    assert sent[-1] == (3, LeaseReturn(7, 5))


def test_a_relay_that_was_stopped_may_answer_at_any_time_or_never(puller: Puller, sent: list) -> None:
    puller.request(4)
    puller.attach(3)
    assert puller.lent(2, lease(4)) is None  # nothing is wanted now
    puller.attach(2)
    puller.request(5)
    puller.drop()
    puller.request(5)
    assert puller.lent(2, lease(6, 3)) == lease(6, 3)
    assert puller.lent(2, lease(6, 2)) is None  # while the worker loads from the other one
    assert puller.loaded() == 6
    assert sent[-3:] == [(2, LeaseRequest(7, 5, 3)), (2, LeaseReturn(7, 6)), (2, LeaseReturn(7, 6))]


def test_leases_and_returns_of_ranks_that_are_gone_change_nothing(sent: list) -> None:
    with Image.create(8, slots=2) as image:
        lender = Lender(image, lambda rank, message: sent.append((rank, message)), Epochs())
        image.begin_fill(1)
        image.complete(1)
        lose(lender, 7, 3)
        lender.asked(LeaseRequest(rank=7, version=0))
        lender.poll()
        lender.returned(LeaseReturn(rank=7, version=1))
        assert sent == []
        assert image.leases(1) == 0


def test_a_rollout_that_was_taken_for_lost_asks_again_when_it_knows(puller: Puller, sent: list) -> None:
    """What it had asked for, and what it had been lent, are void; what it asks for in its next life is not."""
    with Image.create(8, slots=2) as image:
        lent: list = []
        lender = Lender(image, lambda _rank, message: lent.append(message), Epochs())
        image.begin_fill(1)
        image.complete(1)
        puller.request(1)
        lender.asked(sent[-1][1])
        lender.poll()
        puller.lent(2, lent[-1])
        lose(lender, 7, 4)
        assert image.leases(1) == 0
        lender.asked(LeaseRequest(7, 1, 2))  # under way when it was taken for lost
        puller.start_over(4)
        lender.returned(sent[-1][1])
        puller.request(1)
        lender.asked(sent[-1][1])
        lender.poll()
        assert len(lent) == 2
        assert puller.lent(2, lent[-1]) is not None
        assert image.leases(1) == 1


def test_exactly_one_version_is_lent_or_refused_at_once(puller: Puller, sent: list) -> None:
    with Image.create(8, slots=3) as image:
        said: list = []
        lender = Lender(image, lambda _rank, message: said.append(message), Epochs())
        for version in (1, 2):
            image.begin_fill(version)
            image.complete(version)
        image.begin_fill(3)
        for version in (0, 3, 1):  # retired, still coming, there
            puller.request(version, exactly=True)
            lender.asked(sent[-1][1])
            lender.poll()
            if isinstance(said[-1], LeaseRefused):
                assert puller.refused(said[-1])
                assert not puller.refused(said[-1])
                assert puller.waiting_for == ""
        assert said[:2] == [LeaseRefused(0, 1), LeaseRefused(3, 2)]
        assert (said[2].version, image.leases(1), image.leases(2)) == (1, 1, 0)
        assert puller.lent(2, said[2]) is not None
        assert puller.loaded() == 1


def test_a_refusal_that_comes_late_is_none(puller: Puller) -> None:
    puller.request(1, exactly=True)
    puller.drop()
    puller.request(2)
    assert not puller.refused(LeaseRefused(1, 1))
    assert puller.waiting_for == "version 2 or newer from relay rank 2"


def test_a_reader_whose_lease_was_taken_back_can_tell() -> None:
    with Image.create(8, slots=2) as image:
        for version in (1, 2):
            image.begin_fill(version)
            image.complete(version)
        image.hold(7, 1)
        lease = image.lent(1)
        assert image.begin_fill(3) is None
        assert still_lent(lease.path, lease.stamp_offset, lease.stamp)
        image.drop_borrower(7)
        assert still_lent(lease.path, lease.stamp_offset, lease.stamp)
        image.begin_fill(3)
        assert not still_lent(lease.path, lease.stamp_offset, lease.stamp)
        other = image.lent(2)
        assert still_lent(other.path, other.stamp_offset, other.stamp)


def test_lent_memory_outlives_the_relay() -> None:
    image = Image.create(8, slots=2)
    image.begin_fill(1)[:] = 5
    image.complete(1)
    memory = LentMemory()
    kept = memory.keep(Lease(1, image.path, image.offset_of(1)))
    image.close()
    with map_readonly(kept.path, kept.offset, 8) as mapped:
        assert list(mapped) == [5] * 8
    with pytest.raises(FileNotFoundError):
        memory.keep(Lease(2, "/proc/self/fd/1048577", 0))
    memory.close()
