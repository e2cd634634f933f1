"""Assembly of blocks, the cut into micro-batches, and padding."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from laminar_hpc.errors import ProtocolError
from laminar_hpc.protocol.peer import TrainOn
from laminar_hpc.protocol.trajectory import Block, Source
from laminar_hpc.trainer.api import Sequence
from laminar_hpc.trainer.batch import assemble, micro_batches, own_sequences, pad


def block(offset: int, tokens: list[int], source: Source = Source.MODEL, trajectory: int = 42) -> Block:
    """A block; the log-probability of the model's token t is -t / 8."""
    logprobs = np.array([-token / 8 for token in tokens], dtype="<f4") if source is Source.MODEL else np.empty(0, "<f4")
    return Block(trajectory, offset, source, 1, np.array(tokens, dtype="<i4").tobytes(), logprobs.tobytes())


def sequence(length: int) -> Sequence:
    """A sequence without meaning."""
    return Sequence(np.ones(length, np.int64), np.zeros(length, np.float32), np.ones(length, np.bool_), 0.0)


def test_blocks_are_joined_by_offset_and_masked_by_source() -> None:
    blocks = [
        block(5, [8]),
        block(0, [2, 3], Source.PROMPT),
        block(2, [4, 5]),
        block(4, [6], Source.TOOL),
    ]
    found = assemble(42, blocks, 0.5)
    assert found.tokens.tolist() == [2, 3, 4, 5, 6, 8]
    assert found.tokens.dtype == np.int64
    assert found.loss_mask.tolist() == [False, False, True, True, False, True]
    assert found.behaviour_logprobs.tolist() == [0.0, 0.0, -0.5, -0.625, 0.0, -1.0]
    assert found.advantage == 0.5


@pytest.mark.parametrize(
    ("blocks", "text"),
    [
        (
            [block(0, [1], Source.PROMPT), block(2, [3])],
            "offset 2 leaves a gap after the tokens before it, which end at 1",
        ),
        ([block(0, [1, 2], Source.PROMPT), block(1, [3])], "offset 1 overlaps the tokens before it, which end at 2"),
        ([block(1, [3])], "offset 1 leaves a gap"),
        ([block(0, [3])], "no token before it"),
        ([], "no blocks"),
        ([block(0, [1], Source.PROMPT, trajectory=7)], "belongs to trajectory 7"),
        (
            [block(0, [1], Source.PROMPT), Block(42, 1, Source.MODEL, 1, b"\0" * 8, b"\0" * 4)],
            "2 tokens, but 1 log-prob",
        ),
    ],
)
def test_blocks_that_do_not_fit_name_the_trajectory(blocks: list[Block], text: str) -> None:
    with pytest.raises(ProtocolError, match=text) as raised:
        assemble(42, blocks, 0.0)
    assert "trajectory 42" in str(raised.value)


def test_advantages_come_from_whole_groups() -> None:
    # trajectories 10 and 11 are one group, rewards 1 and 0: advantages +-1/sqrt(2); only 11 is trained here
    own = [[block(0, [1], Source.PROMPT, 11), block(1, [9], Source.MODEL, 11)]]
    message = TrainOn(1, 0, 1, [10, 11], [4, 4], [1.0, 0.0], [11], own)
    (found,) = own_sequences(message)
    assert found.advantage == pytest.approx(-0.707106, abs=2e-6)
    assert found.tokens.tolist() == [1, 9]


def test_a_trajectory_without_a_reward_is_named() -> None:
    with pytest.raises(ProtocolError, match="trajectory 12 has no reward"):
        own_sequences(TrainOn(1, 0, 1, [10, 11], [4, 4], [1.0, 0.0], [12], [[]]))


def test_blocks_are_needed_for_each_own_trajectory() -> None:
    with pytest.raises(ProtocolError, match="1 trajectories, but blocks of 0"):
        own_sequences(TrainOn(1, 0, 1, [10, 11], [4, 4], [1.0, 0.0], [11], []))


def test_micro_batches_by_hand() -> None:
    lengths = [3, 10, 4, 4, 9]
    found = micro_batches([sequence(length) for length in lengths], max_tokens=20)
    # longest first: 10 and 9 make 2 * 10, then 4, 4, 3 make 3 * 4
    assert [[len(s.tokens) for s in batch] for batch in found] == [[10, 9], [4, 4, 3]]


@given(st.lists(st.integers(1, 50), max_size=30), st.integers(1, 200))
def test_micro_batches_hold_each_sequence_once_within_the_limit(lengths: list[int], limit: int) -> None:
    sequences = [sequence(length) for length in lengths]
    batches = micro_batches(sequences, limit)
    assert sorted(id(s) for batch in batches for s in batch) == sorted(map(id, sequences))
    for batch in batches:
        longest = max(len(s.tokens) for s in batch)
        assert len(batch) == 1 or len(batch) * longest <= limit
    firsts = [len(batch[0].tokens) for batch in batches]
    for batch, following in zip(batches, firsts[1:], strict=False):  # no batch had room for the next sequence
        assert (len(batch) + 1) * max(len(batch[0].tokens), following) > limit


def test_padding_is_on_the_right_and_untrained() -> None:
    long = assemble(42, [block(0, [2, 3], Source.PROMPT), block(2, [4])], 1.0)
    short = assemble(42, [block(0, [5], Source.PROMPT), block(1, [6])], -2.0)
    found = pad([short, long])
    assert found.tokens.tolist() == [[5, 6, 0], [2, 3, 4]]
    assert found.loss_mask.tolist() == [[False, True, False], [False, False, True]]
    assert found.behaviour_logprobs.tolist() == [[0.0, -0.75, 0.0], [0.0, 0.0, -0.5]]
    assert found.advantages.tolist() == [-2.0, 1.0]
    assert (found.proximal_logprobs, found.reference_logprobs) == (None, None)


def test_a_version_is_that_of_all_of_the_models_tokens() -> None:
    def found(*versions: int | None) -> int | None:
        blocks = [block(0, [2, 3], Source.PROMPT)]
        for place, version in enumerate(versions):
            blocks.append(msgspec.structs.replace(block(2 + place, [4]), version=version))
        return assemble(42, blocks, 0.0).version

    assert found(5, 5) == 5  # the prompt's block says 1
    assert found(5, 6) is None
    assert found(5, None) is None
    assert found(None) is None
    assert found() is None


def test_sequences_of_the_trainers_own_version_are_marked() -> None:
    three = [msgspec.structs.replace(sequence(2), version=version) for version in (4, 5, None)]
    assert pad(three, version=5).same_version.tolist() == [False, True, False]
    assert pad(three).same_version.tolist() == [False, False, False]  # an unknown version is nobody's


def test_scores_are_padded_with_their_sequences() -> None:
    def scored(values: list[float]) -> Sequence:
        scores = np.array(values, np.float32)
        return msgspec.structs.replace(sequence(len(values)), proximal_logprobs=scores, reference_logprobs=2 * scores)

    found = pad([scored([-1.0]), scored([-0.5, -0.25])])
    assert found.proximal_logprobs is not None
    assert found.reference_logprobs is not None
    assert found.proximal_logprobs.tolist() == [[-1.0, 0.0], [-0.5, -0.25]]
    assert found.reference_logprobs.tolist() == [[-2.0, 0.0], [-1.0, -0.5]]
    with pytest.raises(ValueError, match="all sequences of a micro-batch must be scored, or none, got 1 of 2"):
        pad([scored([-1.0]), sequence(1)])
