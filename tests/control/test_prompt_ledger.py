"""Prompt order and the account of hand-outs."""

from __future__ import annotations

from collections import Counter

from laminar_hpc.control.prompts import PromptLedger
from laminar_hpc.control.settings import Settings
from laminar_hpc.protocol.trajectory import Purpose, State


def ledger(**changes: int) -> PromptLedger:
    job = {"train_prompts": 6, "seed": 1, **changes}
    return PromptLedger(
        Settings(mode="laminar", steps=9, prompts=2, group_size=2, trainers=1, relays=1, rollouts=1, **job)
    )


def test_each_epoch_has_every_prompt_once_in_an_order_of_its_own():
    one = ledger()
    drawn = [one.draw_training(0.0).prompt for _ in range(12)]
    assert sorted(drawn[:6]) == sorted(drawn[6:]) == list(range(6))
    assert drawn[:6] != drawn[6:]


def test_the_order_depends_on_the_seed_alone_and_not_on_evaluations_between():
    one, other = ledger(), ledger()
    first = [one.draw_training(0.0) for _ in range(6)]
    second = []
    for prompt in range(6):
        other.draw_evaluation(prompt, 0.0)
        second.append(other.draw_training(0.0))
    assert [group.prompt for group in first] == [group.prompt for group in second]
    assert [one.noise_seed(group, 1) for group in first] == [other.noise_seed(group, 1) for group in second]
    orders = {tuple(group.prompt for group in (ledger(seed=seed).draw_training(0.0),)) for seed in range(20)}
    assert len(orders) > 1


def test_noise_seeds_differ_between_samples_hand_outs_and_purposes():
    one = ledger()
    groups = [one.draw_training(0.0), one.draw_training(0.0), one.draw_evaluation(0, 0.0), one.draw_evaluation(1, 0.0)]
    seeds = Counter(one.noise_seed(group, sample) for group in groups for sample in range(3))
    assert len(seeds) == 12
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_the_same_held_out_prompt_has_the_same_noise_in_every_round():
    one = ledger()
    assert one.noise_seed(one.draw_evaluation(3, 0.0), 0) == one.noise_seed(one.draw_evaluation(3, 9.0), 0)


def test_group_numbers_are_hand_out_numbers():
    one = ledger()
    groups = [one.draw_training(1.0), one.draw_evaluation(4, 2.0), one.draw_training(3.0)]
    assert [group.id for group in groups] == [0, 1, 2]
    assert [group.handed_out_s for group in groups] == [1.0, 2.0, 3.0]


def test_counts_follow_each_group_to_its_end():
    one = ledger()
    a, b, c = (one.draw_training(0.0) for _ in range(3))
    one.draw_evaluation(0, 0.0)
    assert (one.kept, one.open_groups) == (3, 3)
    one.take(a)
    assert (one.kept, one.open_groups) == (3, 2)
    one.close(a, State.CONSUMED)
    one.close(b, State.DISCARDED)
    assert (one.kept, one.open_groups) == (2, 1)
    one.close(c, State.RETURNED)
    assert (one.kept, one.open_groups) == (2, 0)
    assert one.closed[Purpose.TRAIN] == {State.CONSUMED: 1, State.DISCARDED: 1, State.RETURNED: 1}
    assert [group.purpose for group in one.groups.values()] == [Purpose.EVALUATION]
