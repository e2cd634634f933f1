"""Evaluation rounds."""

from __future__ import annotations

from laminar_hpc.control.evaluation import Round, Rounds


def draw(rounds: Rounds, one: Round, version: int, group: int) -> int:
    prompt = rounds.draw(one, version)
    rounds.note_group(one, prompt, group)
    return prompt


def test_a_round_is_bound_to_the_version_that_first_draws_from_it():
    rounds = Rounds()
    rounds.open(4, 3)
    assert rounds.drawable(3) is None
    one = rounds.drawable(5)
    assert draw(rounds, one, 5, 100) == 0
    assert rounds.drawable(4) is None
    assert rounds.drawable(6) is None
    assert rounds.drawable(5) is one
    assert rounds.bound_to(5) == [one]


def test_rounds_are_handed_out_one_after_the_other():
    rounds = Rounds()
    rounds.open(0, 2)
    rounds.open(4, 1)
    first = rounds.drawable(9)
    assert first.version == 0
    draw(rounds, first, 9, 100)
    draw(rounds, first, 9, 101)
    second = rounds.drawable(9)
    assert second.version == 4
    draw(rounds, second, 9, 102)
    assert rounds.handing_out is None
    assert rounds.drawable(9) is None


def test_a_round_is_complete_when_all_its_prompts_are_answered():
    rounds = Rounds()
    rounds.open(0, 2)
    one = rounds.drawable(0)
    draw(rounds, one, 0, 100)
    assert rounds.finish(100) is None
    draw(rounds, one, 0, 101)
    assert rounds.finish(101) is one
    assert rounds.open_rounds == []


def test_a_round_that_starts_over_keeps_its_groups_and_asks_every_prompt_again():
    rounds = Rounds()
    rounds.open(0, 2)
    one = rounds.drawable(0)
    draw(rounds, one, 0, 100)
    draw(rounds, one, 0, 101)
    rounds.finish(100)
    rounds.start_over(one)
    assert rounds.drawable(3) is one
    assert [rounds.draw(one, 3), rounds.draw(one, 3)] == [0, 1]
    assert one.groups == {0: 100, 1: 101}
    assert rounds.finish(100) is None
    assert rounds.finish(101) is one


def test_a_round_that_was_begun_ends_although_an_older_one_starts_over():
    rounds = Rounds()
    rounds.open(0, 1)
    rounds.open(2, 2)
    old = rounds.drawable(1)
    draw(rounds, old, 1, 100)
    new = rounds.drawable(2)
    draw(rounds, new, 2, 101)
    rounds.start_over(old)  # nobody holds version 1 any more
    draw(rounds, rounds.drawable(3), 3, 100)  # a third version answers it
    assert rounds.drawable(2) is new
    draw(rounds, new, 2, 102)
    assert rounds.drawable(2) is None
