"""Versions on their way through the relays, rule by rule: relays 4, 5, 6 and 7 unless said otherwise."""

from __future__ import annotations

import pytest
from tier import SHARES, Tier, brief

from laminar_hpc.control.distribution import Distribution
from laminar_hpc.control.relays import Relays
from laminar_hpc.errors import ProtocolError
from laminar_hpc.protocol.events import LinkStalled, RankLost, RelayHolds, RelayReady


@pytest.fixture
def tier() -> Tier:
    return Tier(4, 5, 6, 7)


def measured(tier: Tier, seconds: float = 2.0) -> Tier:
    """The same after version 0 was handed over in so many seconds and reached all relays; the clock stands at 100."""
    tier.published(0)
    tier.now += seconds
    tier.holds(0, *tier.incarnation)
    tier.now = 100.0
    return tier


# --- publication, release, overtaking -------------------------------------------------------------------------------


def test_a_version_is_broadcast_when_it_is_published_and_released_when_a_newer_one_is(tier):
    assert tier.published(0) == [("broadcast", 0, [4, 5, 6, 7])]
    assert tier.holds(0, 4, 5, 6, 7) == []
    assert tier.published(1) == [("release", 0), ("broadcast", 1, [4, 5, 6, 7])]


def test_a_broadcast_waits_for_all_relays_and_is_of_the_newest_version():
    distribution = Distribution(Relays(2))
    assert distribution.relay_ready(RelayReady(9, 0, "y"), 0.0) == []
    assert distribution.published(0, SHARES, 0.0) == []
    (release,) = distribution.published(1, SHARES, 1.0)
    assert brief([release]) == [("release", 0)]
    assert release.reason == "skipped: version 1 is published, and this one was still waiting"
    commands = distribution.relay_ready(RelayReady(2, 0, "x"), 2.0)
    assert brief(commands) == [("broadcast", 1, [2, 9])]
    assert [distribution.was_broadcast(version) for version in (0, 1)] == [False, True]


def test_the_master_is_on_a_trainers_node():
    tier = Tier(4, 5, 6, switches={"n4": "left", "n5": "right", "n6": "left"}, trainer_nodes=("n6",))
    assert tier.published(0) == [("broadcast", 0, [6, 4, 5])]


def test_the_next_version_starts_behind_the_one_that_the_master_holds(tier):
    measured(tier)
    tier.published(1)
    tier.now += 1.5
    assert tier.published(2) == []  # the hand-over of 1 is in its second half
    assert tier.holds(1, 4) == [("release", 1), ("broadcast", 2, [4, 5, 6, 7])]
    assert tier.distribution.late() == [(1, [5, 6, 7], [4, 5, 6, 7]), (2, [4, 5, 6, 7], [4, 5, 6, 7])]
    assert tier.holds(2, 4, 5) == tier.holds(1, 5) == []
    assert tier.distribution.late() == [(1, [6, 7], [4, 5, 6, 7]), (2, [6, 7], [4, 5, 6, 7])]


def test_of_several_that_wait_only_the_newest_is_sent(tier):
    measured(tier)
    tier.published(1)
    tier.now += 1.5
    tier.published(2)
    assert tier.published(3) == [("release", 2)]
    assert tier.published(4) == [("release", 3)]
    assert tier.holds(1, 4) == [("release", 1), ("broadcast", 4, [4, 5, 6, 7])]
    assert [tier.distribution.was_broadcast(version) for version in range(5)] == [True, True, False, False, True]


def test_a_newer_version_stops_one_whose_hand_over_has_just_begun_but_not_the_next_one_too(tier):
    measured(tier, seconds=2.0)
    tier.published(1)
    tier.now += 0.9
    assert tier.published(2) == [("drop", 1), ("release", 1), ("broadcast", 2, [4, 5, 6, 7])]
    tier.now += 0.1
    assert tier.published(3) == []  # the version before 2 was stopped
    assert tier.published(4) == [("release", 3)]
    tier.now += 2.0
    assert tier.holds(2, 4) == [("release", 2), ("broadcast", 4, [4, 5, 6, 7])]
    tier.now += 0.9
    assert tier.published(5) == [("drop", 4), ("release", 4), ("broadcast", 5, [4, 5, 6, 7])]


def test_the_reason_of_a_stop_has_both_times(tier):
    measured(tier)
    tier.published(1)
    tier.now += 0.5
    drop = tier.distribution.published(2, SHARES, tier.now)[0]
    assert drop.reason == (
        "stopped: version 2 is published 0.5 s after the hand-over of this one began, which takes 2 s"
    )


def test_the_first_version_is_never_stopped(tier):
    tier.published(0)
    assert tier.published(1) == []
    assert tier.holds(0, 4) == [("release", 0), ("broadcast", 1, [4, 5, 6, 7])]


def test_a_hand_over_that_changed_its_master_is_no_measure(tier):
    measured(tier, seconds=2.0)
    tier.published(1)
    tier.lose(4)
    tier.now += 50.0
    tier.holds(1, 5, 6, 7)
    tier.published(2)
    tier.now += 1.5  # over half of 2 s, far from half of 50 s
    assert tier.published(3) == []


def test_what_was_never_broadcast_cannot_be_held(tier):
    tier.published(0)
    with pytest.raises(
        ProtocolError, match=r"RelayHolds 1 from rank 4, incarnation 0, names version 1, which was never"
    ):
        tier.holds(1, 4)


def test_what_repeats_or_comes_late_changes_nothing(tier):
    measured(tier)
    tier.published(1)
    tier.holds(1, 4, 5)
    assert tier.holds(1, 4) == tier.holds(0, 5) == tier.ready(4) == []
    assert tier.distribution.late() == [(1, [6, 7], [4, 5, 6, 7])]


# --- losses ---------------------------------------------------------------------------------------------------------


def test_the_chain_closes_around_a_lost_relay_for_every_version_that_somebody_lacks(tier):
    measured(tier)
    tier.published(1)
    tier.holds(1, 4, 5)
    tier.now += 1.5
    tier.published(2)
    assert tier.lose(6) == [("forget", 6), ("broadcast", 1, [4, 5, 7]), ("broadcast", 2, [4, 5, 7])]
    assert tier.holds(1, 7) == []
    assert tier.lose(5) == [("forget", 5), ("broadcast", 2, [4, 7])]
    tier.holds(2, 4)
    assert tier.published(3) == [("release", 2), ("broadcast", 3, [4, 7])]


def test_the_reasons_name_the_rank_and_what_happened_to_it(tier):
    tier.published(0)
    forget, broadcast = tier.distribution.relay_lost(RankLost(5, 0, "signal 9"), 0.0)
    assert forget.reason == "relay rank 5 on node n5 was lost: signal 9"
    assert broadcast.reason == "relay rank 5 was lost"


def test_two_neighbours_at_once(tier):
    tier.published(0)
    assert tier.lose(5) == [("forget", 5), ("broadcast", 0, [4, 6, 7])]
    assert tier.lose(6) == [("forget", 6), ("broadcast", 0, [4, 7])]


def test_a_new_master_fetches_from_the_trainers_who_keep_the_newest(tier):
    measured(tier)
    tier.published(1)
    tier.holds(1, 4)  # 5, 6 and 7 do not have it, and it is not released
    assert tier.lose(4) == [("forget", 4), ("broadcast", 1, [5, 6, 7])]
    tier.now += 1.9
    assert tier.published(2) == []  # 1 is being handed over again, and in the second half of that
    assert tier.holds(1, 5) == [("release", 1), ("broadcast", 2, [5, 6, 7])]


def test_the_hand_over_to_a_new_master_begins_when_it_becomes_that(tier):
    measured(tier)
    tier.published(1)
    tier.now += 1.5
    tier.lose(4)
    tier.now += 0.9
    assert tier.published(2) == [("drop", 1), ("release", 1), ("broadcast", 2, [5, 6, 7])]


def test_without_its_master_a_released_version_goes_on_from_one_that_holds_it(tier):
    measured(tier)
    tier.published(1)
    tier.holds(1, 4)
    tier.stall(7, 6, 1)  # the chain of 1 becomes 4 5 7 6
    tier.holds(1, 5, 7)
    tier.published(2)
    assert tier.lose(4) == [("forget", 4), ("broadcast", 1, [5, 7, 6]), ("broadcast", 2, [5, 7, 6])]


def test_a_relay_that_holds_a_version_comes_to_the_front_of_its_chain_alone(tier):
    measured(tier)
    tier.published(1)
    tier.lose(4)  # 5 is the master, and 6 had got more than 5 from 4
    tier.holds(1, 6)
    assert tier.lose(5) == [("forget", 5), ("broadcast", 1, [6, 7])]
    tier = measured(Tier(4, 5, 6, 7))
    tier.published(1)
    tier.holds(1, 4)
    tier.stall(5, 4, 1)  # the link between 4 and 5 is broken: 5 6 7 4
    tier.holds(1, 7)
    assert tier.lose(5) == [("forget", 5), ("broadcast", 1, [7, 6, 4])]
    assert tier.published(2) == [("release", 1), ("broadcast", 2, [6, 7, 4])]


def test_a_version_that_nobody_holds_any_more_is_dropped_and_the_next_one_repairs_everything(tier):
    measured(tier)
    tier.published(1)
    tier.holds(1, 4)
    assert tier.published(2) == [("release", 1), ("broadcast", 2, [4, 5, 6, 7])]
    assert tier.lose(4) == [("forget", 4), ("drop", 1), ("broadcast", 2, [5, 6, 7])]
    assert tier.holds(2, 5, 6, 7) == []
    assert tier.distribution.late() == []


def test_a_version_that_all_the_others_hold_is_not_sent_again(tier):
    measured(tier)
    assert tier.lose(5) == [("forget", 5)]
    assert tier.lose(4) == [("forget", 4)]
    assert tier.published(1) == [("release", 0), ("broadcast", 1, [6, 7])]


def test_a_loss_that_leaves_the_holder_at_the_front_lets_the_next_version_start(tier):
    measured(tier)
    tier.published(1)
    tier.lose(4)
    tier.holds(1, 6, 7)
    tier.now += 1.5
    assert tier.published(2) == []
    assert tier.lose(5) == [("forget", 5), ("release", 1), ("broadcast", 2, [6, 7])]


def test_what_the_master_lacks_is_not_handed_over_whoever_else_has_it(tier):
    measured(tier)
    tier.published(1)
    tier.lose(4)  # 6 had got more than 5 from 4
    tier.now += 1.5
    assert tier.published(2) == []
    assert tier.holds(1, 6) == []
    assert tier.holds(1, 5) == [("release", 1), ("broadcast", 2, [5, 6, 7])]


def test_a_relay_lost_before_the_others_have_reported_is_not_in_the_first_chain():
    tier = Tier()
    tier.distribution = Distribution(Relays(3))
    tier.ready(4)
    tier.published(0)
    tier.ready(5)
    assert tier.lose(4) == [("forget", 4)]
    assert tier.ready(6) == [("broadcast", 0, [5, 6])]


def test_the_job_ends_with_the_last_relay(tier):
    measured(tier)
    for rank in (4, 5, 6):
        assert tier.lose(rank) == [("forget", rank)]
    assert tier.lose(7) == [("forget", 7), ("end", "failed")]


def test_the_last_relay_is_one_that_neither_another_nor_a_spare_of_its_node_can_follow():
    tier = Tier()
    tier.distribution = Distribution(Relays(2))
    ends_without = tier.distribution.relays.ends_without
    tier.ready(4, "n4")
    assert not ends_without(4)  # another one is still to report
    tier.ready(5, "n5")
    assert not ends_without(4)
    tier.lose(5)
    assert ends_without(4)
    assert not ends_without(5)  # it is lost already
    tier.spare(20, "n4")
    assert not ends_without(4)
    assert tier.lose(20) == []
    assert ends_without(4)
    tier.hear(5)  # called back: it is on its way
    assert not ends_without(4)


def test_losses_are_heard_once_and_only_of_the_present_incarnation(tier):
    measured(tier)
    tier.lose(5)
    assert tier.lose(5) == []
    tier.hear(5)
    tier.ready(5)
    tier.incarnation[5] = 0
    assert tier.lose(5) == tier.holds(0, 5) == tier.stall(5, 4, 0) == []
    tier.incarnation[5] = 1
    assert tier.lose(5) == [("forget", 5)]


# --- relays that join -----------------------------------------------------------------------------------------------


def test_a_spare_takes_over_and_catches_up_at_the_end_of_the_chain(tier):
    assert tier.spare(20, "n5") == tier.spare(21, "n5") == tier.spare(22, "n6") == []
    measured(tier)
    assert tier.lose(5) == [("forget", 5), ("take over", 20)]
    assert tier.distribution.late() == []
    assert tier.ready(20, "n5") == [("broadcast", 0, [4, 6, 7, 20])]
    assert tier.holds(0, 20) == []
    assert tier.published(1) == [("release", 0), ("broadcast", 1, [4, 6, 7, 20])]
    assert tier.lose(20) == [("forget", 20), ("broadcast", 1, [4, 6, 7]), ("take over", 21)]


def test_one_that_joins_gets_the_newest_complete_version_and_those_under_way_and_no_older_one(tier):
    tier.spare(20, "n5")
    measured(tier)
    tier.published(1)
    tier.holds(1, 4, 6)  # 5 and 7 lack it
    tier.published(2)
    tier.holds(2, 4)
    tier.published(3)
    assert tier.lose(5) == [
        ("forget", 5),
        ("broadcast", 1, [4, 6, 7]),
        ("broadcast", 2, [4, 6, 7]),
        ("broadcast", 3, [4, 6, 7]),
        ("take over", 20),
    ]
    assert tier.ready(20, "n5") == [("broadcast", 2, [4, 6, 7, 20]), ("broadcast", 3, [4, 6, 7, 20])]


def test_a_spare_that_reports_after_the_loss_is_called_at_once(tier):
    measured(tier)
    tier.lose(5)
    assert tier.spare(20, "n5") == [("take over", 20)]
    assert tier.spare(20, "n5") == tier.spare(21, "n5") == []


def test_a_spare_that_is_lost_on_its_way_is_followed_by_the_next(tier):
    tier.spare(20, "n5")
    tier.spare(21, "n5")
    measured(tier)
    tier.lose(5)
    assert tier.lose(20) == [("take over", 21)]
    assert tier.ready(20, "n5") == []
    assert tier.lose(21) == []
    assert tier.distribution.relays.called == []


def test_a_spare_that_is_lost_while_it_waits_is_not_called(tier):
    tier.spare(20, "n5")
    measured(tier)
    assert tier.lose(20) == []
    assert tier.lose(5) == [("forget", 5)]
    assert tier.hear(20) == [("take over", 20)]  # it was only silent, and has nothing to begin anew


def test_a_relay_that_speaks_again_is_taken_back_in_a_new_incarnation(tier):
    measured(tier)
    tier.lose(5)
    assert tier.hear(5) == [("readmit", 5, 1)]
    assert tier.hear(5) == []
    assert tier.ready(5) == [("broadcast", 0, [4, 6, 7, 5])]
    tier.holds(0, 5)
    assert tier.published(1) == [("release", 0), ("broadcast", 1, [4, 5, 6, 7])]


def test_what_a_lost_relay_had_said_before_is_dropped(tier):
    measured(tier)
    tier.published(1)
    tier.lose(5)
    assert tier.holds(1, 5) == tier.stall(5, 4, 1) == tier.ready(5) == []
    assert tier.distribution.late() == [(1, [4, 6, 7], [4, 6, 7])]
    tier.hear(5)
    early = RelayReady(5, 0, "n5")
    assert tier.distribution.relay_ready(early, tier.now) == []
    tier.ready(5)
    assert tier.distribution.relay_holds(RelayHolds(5, 0, 1, 0.1, b""), tier.now) == []


def test_a_node_that_has_a_relay_takes_no_other_back_until_it_has_lost_that_one(tier):
    tier.spare(20, "n5")
    measured(tier)
    tier.lose(5)
    assert tier.hear(5) == []
    tier.ready(20, "n5")
    assert tier.hear(5) == []
    assert tier.lose(20) == [("forget", 20), ("readmit", 5, 1)]
    assert tier.lose(5) == []  # of the incarnation before
    tier.incarnation[5] = 1
    assert tier.lose(5) == []  # it was not back yet
    assert tier.distribution.relays.called == []


def test_while_somebody_is_called_the_job_goes_on_and_versions_wait():
    tier = Tier(4)
    tier.spare(20, "n4")
    tier.published(0)
    tier.holds(0, 4)
    assert tier.lose(4) == [("forget", 4), ("take over", 20)]
    assert tier.published(1) == []
    assert tier.published(2) == [("release", 1)]
    assert tier.ready(20, "n4") == [("broadcast", 0, [20])]
    assert tier.holds(0, 20) == [("release", 0), ("broadcast", 2, [20])]


def test_with_the_last_relay_and_the_spare_on_its_way_the_job_ends():
    tier = Tier(4)
    tier.spare(20, "n4")
    tier.published(0)
    tier.lose(4)
    assert tier.lose(20) == [("end", "failed")]


def test_a_relay_that_nobody_has_asked_for_is_refused(tier):
    tier.spare(20, "n5")
    with pytest.raises(
        ProtocolError, match="rank 20 reports as a relay, incarnation 0, which nobody has asked it to be"
    ):
        tier.ready(20, "n5")
    with pytest.raises(
        ProtocolError, match="rank 4 reports as a relay, incarnation 1, which nobody has asked it to be"
    ):
        tier.distribution.relay_ready(RelayReady(4, 1, "n4"), 0.0)
    with pytest.raises(ProtocolError, match="rank 9 reports as a relay, but all have reported"):
        tier.ready(9)
    with pytest.raises(ProtocolError, match="rank 9 speaks as a relay or spare, but has never reported as one"):
        tier.lose(9)


def test_a_node_has_one_relay():
    relays = Relays(2)
    relays.report(RelayReady(4, 0, "n4"))
    with pytest.raises(ProtocolError, match="rank 5 reports as the relay of node n4, which has one already"):
        relays.report(RelayReady(5, 0, "n4"))


# --- links that stall -----------------------------------------------------------------------------------------------


def test_a_stalled_source_goes_to_the_end_of_the_chain_and_of_chains_to_come(tier):
    measured(tier)
    tier.published(1)
    assert tier.stall(6, 5, 1) == [("sever", 5, 6), ("broadcast", 1, [4, 6, 7, 5])]
    tier.holds(1, 4, 6, 7, 5)
    assert tier.published(2) == [("release", 1), ("broadcast", 2, [4, 6, 7, 5])]


def test_a_source_that_has_complained_itself_lately_is_a_victim(tier):
    measured(tier)
    tier.published(1)
    tier.stall(6, 5, 1)  # 4 6 7 5
    assert tier.stall(7, 6, 1) == []
    tier.now += 5.1
    assert tier.stall(7, 6, 1) == [("sever", 6, 7), ("broadcast", 1, [4, 7, 5, 6])]


def test_complaints_that_come_out_of_order_end_at_the_right_relay(tier):
    measured(tier)
    tier.published(1)
    assert tier.stall(7, 6, 1) == [("sever", 6, 7), ("broadcast", 1, [4, 5, 7, 6])]  # 6 only waited for 5
    assert tier.stall(6, 5, 1) == [("sever", 5, 6), ("broadcast", 1, [4, 7, 6, 5])]
    assert tier.stall(6, 5, 1) == []
    tier.holds(1, 4, 5, 6, 7)
    assert tier.published(2) == [("release", 1), ("broadcast", 2, [4, 6, 7, 5])]


def test_a_master_that_stalls_is_followed_by_the_next_which_fetches_from_the_trainers(tier):
    measured(tier)
    tier.published(1)
    assert tier.stall(5, 4, 1) == [("sever", 4, 5), ("broadcast", 1, [5, 6, 7, 4])]
    assert tier.holds(1, 4) == []  # it is not the master any more
    assert tier.published(2) == [("drop", 1), ("release", 1), ("broadcast", 2, [5, 6, 7, 4])]


def test_the_only_holder_out_of_reach_is_as_good_as_none(tier):
    measured(tier)
    tier.published(1)
    tier.holds(1, 4)
    tier.published(2)
    assert tier.stall(5, 4, 1) == [("sever", 4, 5), ("drop", 1), ("broadcast", 2, [5, 6, 7, 4])]


def test_all_versions_that_take_the_link_go_round_it(tier):
    measured(tier)
    tier.published(1)
    tier.holds(1, 4, 5)
    tier.published(2)
    assert tier.stall(6, 5, 1) == [("sever", 5, 6), ("broadcast", 1, [4, 6, 7, 5]), ("broadcast", 2, [4, 6, 7, 5])]


def test_what_goes_the_other_way_over_a_severed_link_is_asked_for_again(tier):
    measured(tier)
    tier.published(1)
    tier.stall(6, 5, 1)
    tier.holds(1, 4)
    assert tier.stall(5, 7, 1) == [("sever", 7, 5), ("broadcast", 1, [4, 6, 5, 7])]
    assert tier.published(2) == [("release", 1), ("broadcast", 2, [4, 5, 6, 7])]
    assert tier.stall(6, 5, 2) == [("sever", 5, 6), ("broadcast", 1, [4, 6, 5, 7]), ("broadcast", 2, [4, 6, 7, 5])]


def test_where_a_trainer_sends_nothing_each_relay_is_the_master_once(tier):
    measured(tier)
    tier.published(1)
    assert tier.stall(4, 1, 1) == [("sever", 1, 4), ("sever", 2, 4), ("broadcast", 1, [5, 6, 7, 4])]
    assert tier.stall(4, 1, 1) == []  # said before it heard so
    assert tier.stall(5, 1, 1) == [("sever", 1, 5), ("sever", 2, 5), ("broadcast", 1, [6, 7, 4, 5])]
    assert tier.stall(7, 6, 1) == [("sever", 6, 7), ("broadcast", 1, [7, 4, 5, 6])]
    tier.holds(1, 7)
    assert tier.stall(7, 1, 1) == []
    assert tier.published(2) == [("release", 1), ("broadcast", 2, [7, 4, 5, 6])]
    chain = [7, 4, 5, 6]
    for master in (7, 4, 5, 6, 7):
        chain = [*chain[1:], master]
        assert tier.stall(master, 1, 2) == [("sever", 1, master), ("sever", 2, master), ("broadcast", 2, chain)]


def test_where_all_relays_are_slow_their_order_is_as_if_none_were():
    switches = {"n4": "left", "n5": "right", "n6": "left", "n7": "right"}
    tier = measured(Tier(4, 5, 6, 7, switches=switches))
    assert tier.published(1)[-1] == ("broadcast", 1, [4, 6, 5, 7])
    for master in (4, 6, 5, 7):
        assert ("sever", 1, master) in tier.stall(master, 1, 1)
    tier.holds(1, 4)
    assert tier.published(2) == [("release", 1), ("broadcast", 2, [4, 6, 5, 7])]


def test_a_relay_that_was_just_lost_is_not_taken_for_a_trainer(tier):
    measured(tier)
    tier.published(1)
    assert tier.lose(4) == [("forget", 4), ("broadcast", 1, [5, 6, 7])]
    assert tier.stall(5, 4, 1) == []  # said before it heard so


def test_a_relay_behind_a_master_that_waits_for_a_trainer_has_to_wait_too():
    tier = measured(Tier(4, 5))
    tier.published(1)
    assert tier.stall(4, 1, 1) == [("sever", 1, 4), ("sever", 2, 4), ("broadcast", 1, [5, 4])]
    tier.now += 5.1
    assert tier.stall(5, 1, 1) == [("sever", 1, 5), ("sever", 2, 5), ("broadcast", 1, [4, 5])]
    assert tier.stall(5, 4, 1) == [("sever", 4, 5), ("broadcast", 1, [5, 4])]  # 4 has not complained for long
    assert tier.stall(4, 5, 1) == []  # 5 has, just now


def test_a_master_without_another_relay_asks_its_trainers_again():
    tier = measured(Tier(4))
    tier.published(1)
    for _ in range(3):
        assert tier.stall(4, 1, 1) == [("sever", 1, 4), ("sever", 2, 4), ("broadcast", 1, [4])]


def test_complaints_of_what_is_over_are_void(tier):
    measured(tier)
    tier.published(1)
    assert tier.stall(6, 5, 9) == []
    tier.holds(1, 4, 5, 6)
    assert tier.stall(6, 5, 1) == []
    assert tier.stall(4, 5, 1) == []  # 5 is behind it
    tier.lose(5)
    assert tier.distribution.link_stalled(LinkStalled(7, 0, 1, 5), tier.now) == []


# --- rollouts -------------------------------------------------------------------------------------------------------


def test_rollouts_of_a_lost_relay_read_from_the_nearest_one():
    switches = {"n4": "left", "n5": "right", "n6": "left", "n7": "right"}
    tier = measured(Tier(4, 5, 6, 7, switches=switches))
    for rollout, relay in ((10, 5), (11, 5), (12, 6)):
        assert tier.rollout(rollout, relay) == []
    # the same switch first: 7; then, in the order 4 6 5 7, 6 is next to 5
    assert tier.lose(5) == [("forget", 5), ("attach", 10, 7, "remote"), ("attach", 11, 7, "remote")]
    assert tier.lose(7) == [("forget", 7), ("attach", 10, 6, "remote"), ("attach", 11, 6, "remote")]
    assert tier.lose(6) == [
        ("forget", 6),
        ("attach", 12, 4, "remote"),
        ("attach", 10, 4, "remote"),
        ("attach", 11, 4, "remote"),
    ]


def test_rollouts_come_home_when_the_relay_of_their_node_has_caught_up(tier):
    tier.spare(20, "n5")
    measured(tier)
    tier.rollout(10, 5)
    assert tier.lose(5) == [("forget", 5), ("take over", 20), ("attach", 10, 4, "remote")]
    tier.published(1)
    tier.holds(1, 4)
    assert tier.ready(20, "n5") == [("broadcast", 1, [4, 6, 7, 20])]
    assert tier.holds(1, 20) == [("attach", 10, 20, "home")]
    assert tier.holds(1, 6) == []


def test_a_home_that_is_behind_is_no_reason_to_leave(tier):
    tier.spare(20, "n5")
    measured(tier)
    tier.rollout(10, 5)
    tier.lose(5)
    tier.ready(20, "n5")
    tier.published(1)
    tier.holds(1, 4)
    assert tier.holds(0, 20) == []
    assert tier.holds(1, 20) == [("attach", 10, 20, "home")]


def test_rollouts_without_any_relay_wait_for_one():
    tier = Tier(4)
    tier.spare(20, "n4")
    tier.published(0)
    tier.holds(0, 4)
    tier.rollout(10, 4)
    assert tier.lose(4) == [("forget", 4), ("take over", 20)]
    assert tier.ready(20, "n4") == [("broadcast", 0, [20]), ("attach", 10, 20, "home")]


def test_a_lost_rollout_is_attached_when_it_reports_again(tier):
    measured(tier)
    tier.rollout(10, 5)
    tier.distribution.readers.lose(10)
    assert tier.lose(5) == [("forget", 5)]
    assert tier.rollout(10, 5, incarnation=1) == [("attach", 10, 4, "remote")]


def test_a_rollout_that_missed_its_attachment_is_told_again(tier):
    measured(tier)
    tier.rollout(10, 5)
    tier.lose(5)
    tier.distribution.readers.lose(10)
    assert tier.rollout(10, 5, incarnation=1) == [("attach", 10, 4, "remote")]


def test_a_rollout_that_reports_after_the_loss_of_its_relay_is_attached_at_once(tier):
    measured(tier)
    tier.lose(5)
    assert tier.rollout(10, 5) == [("attach", 10, 4, "remote")]


def test_a_rollout_that_reports_before_its_relay_waits_for_it():
    tier = Tier()
    tier.distribution = Distribution(Relays(2))
    assert tier.rollout(10, 4) == []
    assert tier.ready(5) == tier.ready(4) == []
    assert tier.distribution.readers.of(4) == [10]


# --- three slots are enough -----------------------------------------------------------------------------------------


def test_a_trainer_with_three_slots_never_waits_however_the_hand_over_goes(tier):
    """The versions that trainers hold are those published and not released; one more is being written."""
    kept: list[int] = []
    measured(tier)
    kept.append(0)

    def follow(found: list[tuple]) -> None:
        for what, *fields in found:
            if what == "release":
                kept.remove(fields[0])
        assert len(kept) <= 2

    for version in range(1, 40):
        tier.now += (0.4, 1.2, 3.0)[version % 3]
        kept.append(version)
        follow(tier.published(version))
        if version % 5 == 0:
            follow(tier.holds(max(one for one in range(version + 1) if tier.distribution.was_broadcast(one)), 4))
    assert len(kept) == 2
