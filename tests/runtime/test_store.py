"""The store: who may append, what a repeat does, and from where a new owner goes on."""

from __future__ import annotations

import numpy as np
import pytest

from laminar_hpc.errors import ProtocolError
from laminar_hpc.protocol.peer import Append, Fetch
from laminar_hpc.protocol.trajectory import Block, Purpose, Source, TrajectorySpec
from laminar_hpc.runtime.store import Store

A, B = 5, 6


def spec(resume_tokens: int = 0, id: int = 7) -> TrajectorySpec:
    return TrajectorySpec(id, 3, 1, 0, Purpose.TRAIN, 99, resume_tokens)


def block(offset: int, *tokens: int, source: Source = Source.MODEL) -> Block:
    logprobs = np.full(len(tokens), -0.5, "<f4").tobytes() if source is Source.MODEL else b""
    version = 2 if source is Source.MODEL else None
    return Block(7, offset, source, version, np.array(tokens, "<i4").tobytes(), logprobs)


def tokens_of(store: Store) -> list[int]:
    blocks = store.blocks(7)
    assert all(len(one.logprobs) == (len(one.tokens) if one.source is Source.MODEL else 0) for one in blocks)
    return np.frombuffer(b"".join(one.tokens for one in blocks), "<i4").tolist()


@pytest.fixture
def store() -> Store:
    """Two prompt tokens and, in two blocks, four response tokens, from rank A."""
    store = Store()
    store.assign(spec(), A, 0)
    store.append(Append(A, 0, [block(0, 10, 11, source=Source.PROMPT)]))
    store.append(Append(A, 0, [block(2, 20, 21), block(4, 22, 23)]))
    return store


def test_blocks_come_back_in_order(store: Store) -> None:
    assert tokens_of(store) == [10, 11, 20, 21, 22, 23]
    answer = store.fetch(Fetch(B, 4, [7]))
    assert (answer.request, answer.blocks) == (4, [store.blocks(7)])


def test_a_repeat_changes_nothing(store: Store) -> None:
    store.append(Append(A, 0, [block(2, 20, 21)]))
    store.append(Append(A, 0, [block(0, 10, 11, source=Source.PROMPT)]))
    assert tokens_of(store) == [10, 11, 20, 21, 22, 23]


def test_a_gap_is_refused_and_named(store: Store) -> None:
    with pytest.raises(
        ProtocolError, match=r"rank 5 \(rollout\): trajectory 7 appended at token 8, but the store has 6"
    ):
        store.append(Append(A, 0, [block(8, 1)]))


@pytest.mark.parametrize(("rank", "incarnation"), [(B, 0), (A, 1)])
def test_only_the_owner_appends(store: Store, rank: int, incarnation: int) -> None:
    store.append(Append(rank, incarnation, [block(6, 66)]))
    assert tokens_of(store) == [10, 11, 20, 21, 22, 23]


@pytest.mark.parametrize(
    ("resume", "kept"),
    [(0, []), (1, [20]), (2, [20, 21]), (3, [20, 21, 22]), (4, [20, 21, 22, 23])],
)
def test_a_new_owner_goes_on_from_what_it_was_told(store: Store, resume: int, kept: list[int]) -> None:
    store.assign(spec(resume), B, 0)
    begun = [10, 11, *kept] if kept else []
    assert tokens_of(store) == begun
    store.append(Append(A, 0, [block(6, 66)]))  # late, from the owner before
    if kept:
        store.append(Append(B, 0, [block(2 + resume, 77)]))
        assert tokens_of(store) == [*begun, 77]
    else:
        store.append(Append(B, 0, [block(0, 10, 11, source=Source.PROMPT), block(2, 77)]))
        assert tokens_of(store) == [10, 11, 77]


def test_what_is_dropped_is_gone(store: Store) -> None:
    store.drop(7)
    store.drop(7)
    assert len(store) == 0
    store.append(Append(A, 0, [block(0, 1, source=Source.PROMPT)]))
    with pytest.raises(ProtocolError, match="rank 6 asks for trajectory 7"):
        store.fetch(Fetch(B, 1, [7]))


def test_who_owns_what_is_asked_for() -> None:
    """A rollout that was given up may ask for what others have by now, or for what is settled."""
    store = Store()
    store.assign(spec(), A, 0)
    store.assign(spec(id=8), A, 0)
    assert store.owns_all(A, [7, 8])
    store.assign(spec(), B, 0)
    assert not store.owns_all(A, [7, 8])
    assert store.owns_all(A, [8])
    store.drop(8)
    assert not store.owns_all(A, [8])
