from laminar_hpc.policy.restarts import LONGEST_BACK_OFF_S, WINDOW_S, RestartLimit


def test_the_first_is_made_good_at_once_and_each_further_one_waits_twice_as_long():
    limit = RestartLimit(7)
    assert [limit.lost(float(now)) for now in range(7)] == [
        0.0,
        2.0,
        4.0,
        8.0,
        16.0,
        LONGEST_BACK_OFF_S,
        LONGEST_BACK_OFF_S,
    ]
    assert limit.lost(7.0) is None


def test_what_is_long_ago_does_not_count():
    limit = RestartLimit(1)
    assert limit.lost(0.0) == 0.0
    assert limit.lost(WINDOW_S + 1) == 0.0
    assert limit.lost(WINDOW_S + 2) is None


def test_none_may_be_allowed():
    assert RestartLimit(0).lost(5.0) is None
