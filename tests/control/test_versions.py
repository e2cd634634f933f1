"""Versions from announcement to publication."""

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
        assert versions.publish(version.id, 1, ONE) == [Share(1, ONE)]
        assert versions.settled
    assert versions.newest_published == 19
    assert versions[18].step == 1
    assert 16 not in versions
    assert 20 not in versions


def test_a_version_is_published_when_every_trainer_has_its_shard():
    versions = Versions(0, 0, 2)
    versions.announce(0)
    assert versions.publish(0, 2, ONE) is None
    assert versions.publish(0, 2, TWO) is None
    assert versions.missing_trainers(versions[0], [1, 2]) == [1]
    assert versions.newest_published is None
    assert versions.publish(0, 1, TWO) == [Share(1, TWO), Share(2, ONE)]
    assert versions.publish(0, 1, TWO) is None
    assert versions.missing_trainers(versions[0], [1, 2]) == []
    assert versions.newest_published == 0


def test_shares_are_there_for_trainers_that_publish_nothing_and_without_verification():
    versions = Versions(0, 0, 2)
    versions.announce(0)
    assert versions.publish(0, 1, b"") is None
    assert versions.publish(0, 2, b"") == [Share(1, b""), Share(2, b"")]


@pytest.mark.parametrize(
    ("version", "digests", "message"),
    [
        (4, ONE, "rank 1 \\(trainer\\) published version 4, which was never announced"),
        (0, b"abc", "version 0 with 3 bytes of digests"),
    ],
)
def test_shares_that_cannot_be_are_refused(version, digests, message):
    versions = Versions(0, 0, 1)
    versions.announce(0)
    with pytest.raises(ProtocolError, match=message):
        versions.publish(version, 1, digests)
