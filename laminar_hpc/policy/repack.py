"""Repack: which rollouts of one version give their last trajectories to others, and start on newer weights.

Late in a batch a few long trajectories keep each rollout busy, though a decode step of three costs nearly what one of thirty
does. Putting the rest of several rollouts onto one of them empties the others. The idea, and best fit, are Laminar's (arXiv
2510.12633); five things differ from its algorithm as printed:

* a destination never becomes a source, and what it has taken over counts from then on. As printed, uses of 10, 45 and 50
  with a limit of 100 end at 105: 10 goes onto 50, and then 50, counted as 50, onto 45;
* a load is the tokens that a rollout holds and those that come until the next check, so that no plan makes a destination
  preempt before it can be looked at again;
* whether a rollout is in its tail is not judged here by a falling use of the cache. The caller names the candidates: one
  version, nothing waiting;
* a move is made only where it saves more time than it costs;
* nor where it delays anybody by more than is allowed: what is saved is a rollout's time, and paid with that of the
  trajectories that go on in a larger batch, the longest above all.

The problem: of candidates with loads, trajectories and limits choose sources and one destination for each of them, no
destination being a source, such that no destination passes its limits, and the most is gained. `Costs` says what a move
gains; without it every source counts the same. It contains bin packing, so it is not solved exactly: sources are tried as the
q smallest candidates, for many q and by two measures of size, and each such set is packed onto the others, largest first,
each onto the one that is then fullest. The best of these plans is taken.

What a move gains, in rollout-seconds. With n trajectories a decode step takes t(n) seconds. The source would go on for Rs
steps and the destination for Rd. Once together, one step of n_s + n_d trajectories stands for a step of each, as long as both
have something left; after that nothing is shared, and nothing is lost. Against that stands the prefill of the moved tokens
(p seconds each), during which the destination decodes nothing:

    gain = min(Rs, Rd) * (t(n_s) + t(n_d) - t(n_s + n_d)) - p * tokens

and for as long as something is shared, each side's steps are those of the larger batch. So its trajectories end later by

    delay = min(Rs, Rd) * (t(n_s + n_d) - t(n of its side)) + p * tokens

So two rollouts that both have long to go are worth a merger, one that is about to be empty is not. Where t is a line, a + b n,
the bracket is a, what a step costs whatever its batch: then it does not matter that batches shrink meanwhile.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Sequence

import msgspec

ALL_SIZES = 24
"""Up to so many candidates, every number of sources is tried; beyond, `SIZES` of them."""

SIZES = 5

LOOK_AT = 32
"""How many destinations with room for a source's tokens are looked at for one with room for its trajectories too."""

STEP_FACTOR = 1.5
"""A batch is too large where its decode step takes more than so many times that of `REFERENCE_BATCH`."""

REFERENCE_BATCH = 8


class Candidate(msgspec.Struct, frozen=True):
    """A rollout in its tail: `trajectories`, of which `kv_tokens` are in its KV cache, which has room for `capacity_tokens`.

    `remaining_steps` is for how many decode steps it is expected to go on by itself, `slack_s` by how much later all of its
    trajectories may end.
    """

    rank: int
    trajectories: int
    kv_tokens: int
    capacity_tokens: int
    remaining_steps: float = 0.0
    slack_s: float = math.inf


class Limits(msgspec.Struct, frozen=True):
    """What no destination may pass.

    `kv_share` is the share of its KV cache (Laminar's C_max), `batch` its trajectories (B), and `growth_tokens` how many
    tokens come to each trajectory until the next check.
    """

    kv_share: float
    batch: int
    growth_tokens: float = 0.0


class Costs(msgspec.Struct, frozen=True):
    """What a move gains and costs: seconds of a decode step of n trajectories, and of the prefill of one token."""

    step_s: Callable[[int], float]
    prefill_token_s: float

    def gain_s(self, source: Candidate, trajectories: int, remaining_steps: float) -> float:
        """Rollout-seconds saved where `source` goes onto a rollout of `trajectories`, which has `remaining_steps` to go."""
        step_s = self.step_s
        shared = step_s(source.trajectories) + step_s(trajectories) - step_s(source.trajectories + trajectories)
        return min(source.remaining_steps, remaining_steps) * shared - self.prefill_token_s * source.kv_tokens

    def delays_s(self, source: Candidate, trajectories: int, remaining_steps: float) -> tuple[float, float]:
        """By how much later the trajectories of `source` then end, and those of that rollout."""
        step_s, prefill_s = self.step_s, self.prefill_token_s * source.kv_tokens
        steps, both_s = min(source.remaining_steps, remaining_steps), step_s(source.trajectories + trajectories)
        return (
            steps * (both_s - step_s(source.trajectories)) + prefill_s,
            steps * (both_s - step_s(trajectories)) + prefill_s,
        )


class Move(msgspec.Struct, frozen=True):
    """All trajectories of `source` go on at `destination`; `gain_s` is None where gains were not asked for.

    The source's trajectories, and the destination's, are expected to end so much later.
    """

    source: int
    destination: int
    trajectories: int
    tokens: int
    gain_s: float | None
    reason: str
    source_delay_s: float = 0.0
    destination_delay_s: float = 0.0


class _Sized(msgspec.Struct, frozen=True):
    """A candidate with its load at the next check, what it has room for then, and that load as shares of its limits."""

    candidate: Candidate
    load_tokens: float
    room_tokens: float
    room_trajectories: int
    kv_share: float
    both_shares: float


class _Destination(msgspec.Struct, eq=False):
    """A candidate that others are put onto, as it will be then."""

    rank: int
    trajectories: int
    room_trajectories: int
    remaining_steps: float
    slack_s: float


class _Worth(msgspec.Struct, frozen=True):
    """What a move gains, in rollout-seconds (None: that was not asked for), and by how much each side is delayed."""

    gain_s: float | None = None
    source_delay_s: float = 0.0
    destination_delay_s: float = 0.0


class _Plan(msgspec.Struct, eq=False):
    """Moves, and what they are worth: the gain where gains are asked for, else how many there are."""

    moves: list[tuple[Candidate, _Destination, _Worth]] = []
    worth: float = 0.0
    tokens: int = 0


def plan(
    candidates: Iterable[Candidate], limits: Limits, costs: Costs | None = None, most: int | None = None
) -> list[Move]:
    """The moves to make now, `most` at most; `costs` is what they must be worth (None: each releases a rollout, that is all).

    Candidates hold one version and have nothing waiting; one that is past its limits already takes no part.
    """
    taking_part = [one for one in (_size(one, limits) for one in candidates if one.trajectories) if _has_room(one)]
    most = len(taking_part) if most is None else most
    best = _Plan()
    for measure in (_kv_share, _both_shares):
        ordered = sorted(taking_part, key=measure)
        for count in _counts(_bound(ordered)):
            tried = _pack(ordered[:count], ordered[count:], costs, most)
            if (tried.worth, -tried.tokens) > (best.worth, -best.tokens):
                best = tried
    return [_move(source, destination, worth) for source, destination, worth in best.moves]


def largest_batch(
    step_s: Callable[[int], float], most: int, factor: float = STEP_FACTOR, reference: int = REFERENCE_BATCH
) -> int:
    """The largest batch, `most` at most, whose decode step takes at most `factor` times that of `reference` trajectories.

    `step_s(n)` are the seconds of a step of n trajectories, and do not fall with n.
    """
    bound_s = factor * step_s(reference)
    low, high = min(reference, most), most
    while low < high:
        middle = (low + high + 1) // 2
        if step_s(middle) <= bound_s:
            low = middle
        else:
            high = middle - 1
    return low


def _size(one: Candidate, limits: Limits) -> _Sized:
    load = one.kv_tokens + one.trajectories * limits.growth_tokens
    share = load / one.capacity_tokens
    return _Sized(
        one,
        load,
        limits.kv_share * one.capacity_tokens - load,
        limits.batch - one.trajectories,
        share,
        share + one.trajectories / limits.batch,
    )


def _has_room(one: _Sized) -> bool:
    return one.room_tokens >= 0 and one.room_trajectories >= 0


def _kv_share(one: _Sized) -> tuple[float, int]:
    return one.kv_share, one.candidate.rank


def _both_shares(one: _Sized) -> tuple[float, int]:
    return one.both_shares, one.candidate.rank


def _bound(ordered: Sequence[_Sized]) -> int:
    """How many of the first ones fit into the room of the others, were it in one piece, and one more; it pays to try no more."""
    tokens, trajectories = 0.0, 0
    room_tokens = math.fsum(one.room_tokens for one in ordered)
    room = sum(one.room_trajectories for one in ordered)
    for count, one in enumerate(ordered):
        tokens += one.load_tokens
        trajectories += one.candidate.trajectories
        room_tokens -= one.room_tokens
        room -= one.room_trajectories
        if tokens > room_tokens or trajectories > room:
            return min(count + 1, len(ordered) - 1)
    return len(ordered) - 1


def _counts(largest: int) -> list[int]:
    """The numbers of sources to try."""
    if largest < ALL_SIZES:
        return list(range(1, largest + 1))
    return [largest * part // SIZES for part in range(1, SIZES + 1)]


def _pack(sources: Sequence[_Sized], others: Sequence[_Sized], costs: Costs | None, most: int) -> _Plan:
    """Each source, largest first, onto the fullest destination that has room and where it is worth it; `most` of them."""
    rooms = [(one.room_tokens, place, _destination(one)) for place, one in enumerate(others)]
    rooms.sort()
    found = _Plan()
    for source in reversed(sources):
        if len(found.moves) >= most:
            break
        one, load = source.candidate, source.load_tokens
        first = bisect_left(rooms, (load, -1))
        for index in range(first, min(first + LOOK_AT, len(rooms))):
            room, place, destination = rooms[index]
            if one.trajectories > destination.room_trajectories:
                continue
            worth = _Worth() if costs is None else _worth(one, destination, costs)
            if worth is None:
                continue
            del rooms[index]
            insort(rooms, (room - load, place, destination))
            _put(one, destination, worth)
            found.moves.append((one, destination, worth))
            found.worth += 1.0 if worth.gain_s is None else worth.gain_s
            found.tokens += one.kv_tokens
            break
    return found


def _worth(source: Candidate, destination: _Destination, costs: Costs) -> _Worth | None:
    """None where a move gains nothing, or delays somebody by too much."""
    trajectories, steps = destination.trajectories, destination.remaining_steps
    gain_s = costs.gain_s(source, trajectories, steps)
    own_s, other_s = costs.delays_s(source, trajectories, steps)
    if gain_s <= 0.0 or own_s > source.slack_s or other_s > destination.slack_s:
        return None
    return _Worth(gain_s, own_s, other_s)


def _destination(one: _Sized) -> _Destination:
    own = one.candidate
    return _Destination(own.rank, own.trajectories, one.room_trajectories, own.remaining_steps, own.slack_s)


def _put(source: Candidate, destination: _Destination, worth: _Worth) -> None:
    destination.slack_s = min(destination.slack_s - worth.destination_delay_s, source.slack_s - worth.source_delay_s)
    destination.trajectories += source.trajectories
    destination.room_trajectories -= source.trajectories
    destination.remaining_steps = max(destination.remaining_steps, source.remaining_steps)


def _move(source: Candidate, destination: _Destination, worth: _Worth) -> Move:
    gain = "" if worth.gain_s is None else f", {worth.gain_s:.3g} s gained"
    reason = (
        f"{source.trajectories} trajectories with {source.kv_tokens} tokens onto rollout {destination.rank}, "
        f"which then has {destination.trajectories}{gain}"
    )
    return Move(
        source.rank,
        destination.rank,
        source.trajectories,
        source.kv_tokens,
        worth.gain_s,
        reason,
        worth.source_delay_s,
        worth.destination_delay_s,
    )
