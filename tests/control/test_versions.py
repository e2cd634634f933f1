"""Versions from announcement to broadcast."""

from __future__ import annotations

import pytest

from laminar_hpc.control.versions import Versions
from laminar_hpc.errors import ProtocolError
from laminar_hpc.protocol.commands import Share

ONE, TWO = b"aaaaaaaa", b"bbbbbbbbcccccccc"


def test_ids_count_up_from_the_first_and_stand_for_attempt_and_step():
    versions = Versions(attempt=3, first_version=17, trainers=1)
    for step in range(3):
        version = versions.announce(step)
        assert (version.id, version.attempt, version.step) == (17 + step, 3, step)
        assert not versions.settled
        assert versions.publish(version.id, 1, 0, ONE)
        assert versions.settled
    assert versions.newest_published == 19
    assert versions[18].step == 1
    assert 16 not in versions
    assert 20 not in versions


def test_a_version_is_published_when_every_trainer_has_its_share():
    versions = Versions(0, 0, 2)
    versions.announce(0)
    assert not versions.publish(0, 2, 2, ONE)
    assert not versions.publish(0, 2, 7, TWO)
    assert versions.missing_trainers(versions[0], [1, 2]) == [1]
    assert versions.newest_published is None
    assert versions.broadcasts([5]) == []
    assert versions.publish(0, 1, 0, TWO)
    assert not versions.publish(0, 1, 0, TWO)
    assert versions.newest_published == 0


def test_a_broadcast_has_shares_and_digests_in_chunk_order_and_happens_once():
    versions = Versions(0, 0, 3)
    versions.announce(0)
    versions.publish(0, 1, 2, ONE)
    versions.publish(0, 3, 3, b"")  # a trainer may have nothing to publish
    versions.publish(0, 2, 0, TWO)
    (broadcast,) = versions.broadcasts([5, 6])
    assert broadcast.shares == [Share(2, 0, 2), Share(1, 2, 1)]
    assert broadcast.digests == TWO + ONE
    assert (broadcast.version, broadcast.chain) == (0, [5, 6])
    assert versions.broadcasts([5, 6]) == []


def test_versions_that_waited_for_relays_go_out_oldest_first():
    versions = Versions(0, 0, 1)
    for step in range(3):
        versions.announce(step)
        versions.publish(step, 1, 0, ONE)
    assert [command.version for command in versions.broadcasts([5])] == [0, 1, 2]


@pytest.mark.parametrize(
    ("version", "first_chunk", "digests", "message"),
    [
        (4, 0, ONE, "rank 1 \\(trainer\\) published version 4, which was never announced"),
        (0, 0, b"abc", "version 0 with 3 bytes of digests"),
        (0, 1, ONE, "version 0: the share of rank 1 \\(trainer\\) has 1 chunks from chunk 1 on, where chunk 0 was due"),
    ],
)
def test_shares_that_cannot_be_are_refused(version, first_chunk, digests, message):
    versions = Versions(0, 0, 1)
    versions.announce(0)
    with pytest.raises(ProtocolError, match=message):
        versions.publish(version, 1, first_chunk, digests)


def test_shares_that_overlap_are_refused():
    versions = Versions(0, 0, 2)
    versions.announce(0)
    versions.publish(0, 1, 0, TWO)
    with pytest.raises(ProtocolError, match=r"version 0: .* rank 2 .* from chunk 1 on, where chunk 2 was due"):
        versions.publish(0, 2, 1, TWO)
