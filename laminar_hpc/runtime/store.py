"""The payload of trajectories: tokens and log-probabilities, append-only, keyed by trajectory id.

One shard, at the manager. The controller never looks in here: it knows how many tokens there are, the store which.
"""

from __future__ import annotations

import msgspec

from laminar_hpc.errors import ProtocolError
from laminar_hpc.protocol.peer import Append, Fetch, Fetched
from laminar_hpc.protocol.trajectory import Block, Source, TrajectorySpec


class Store:
    """Blocks of each trajectory, in order and without gaps.

    Only the owner of a trajectory may append to it; what another rank, or an earlier incarnation of the owner, still had
    under way is dropped. A block that repeats tokens the store has already is dropped too.
    """

    def __init__(self) -> None:
        self._blocks: dict[int, list[Block]] = {}
        self._owner: dict[int, tuple[int, int]] = {}

    def __len__(self) -> int:
        return len(self._owner)

    def assign(self, spec: TrajectorySpec, rank: int, incarnation: int) -> None:
        """From now on this rank appends to the trajectory, behind the response tokens that it is told to go on from.

        Later ones, which the owner before has streamed without word of it, are dropped: they will be generated again.
        """
        self._owner[spec.id] = (rank, incarnation)
        kept: list[Block] = []
        room = spec.resume_tokens
        for block in self._blocks.get(spec.id, []) if room else []:
            if block.source is not Source.PROMPT:
                block = _head(block, room)
                room -= block.count
            if block.count:
                kept.append(block)
        self._blocks[spec.id] = kept

    def append(self, message: Append) -> None:
        """Take blocks in; ProtocolError where one leaves a gap."""
        for block in message.blocks:
            if self._owner.get(block.trajectory) != (message.rank, message.incarnation):
                continue
            blocks = self._blocks[block.trajectory]
            end = blocks[-1].end if blocks else 0
            if block.offset > end:
                raise ProtocolError(
                    f"rank {message.rank} (rollout): trajectory {block.trajectory} appended at token {block.offset}, "
                    f"but the store has {end}"
                )
            if block.offset == end and block.count:
                blocks.append(block)

    def owns_all(self, rank: int, trajectories: list[int]) -> bool:
        """Whether `rank` is the owner of all of these."""
        return all(self._owner.get(trajectory, (None, 0))[0] == rank for trajectory in trajectories)

    def fetch(self, message: Fetch) -> Fetched:
        """All blocks of the trajectories asked for; ProtocolError where one is unknown."""
        missing = [trajectory for trajectory in message.trajectories if trajectory not in self._blocks]
        if missing:
            raise ProtocolError(f"rank {message.rank} asks for trajectory {missing[0]}, which the store does not hold")
        return Fetched(message.request, [list(self._blocks[trajectory]) for trajectory in message.trajectories])

    def restore(self, blocks: list[Block]) -> None:
        """Take over a trajectory of an earlier attempt, with all its blocks; nobody owns it."""
        self._blocks[blocks[0].trajectory] = blocks

    def blocks(self, trajectory: int) -> list[Block]:
        """The blocks of one trajectory; empty where the store has none."""
        return self._blocks.get(trajectory, [])

    def drop(self, trajectory: int) -> None:
        """Forget a trajectory; one that is not there is no error."""
        self._blocks.pop(trajectory, None)
        self._owner.pop(trajectory, None)


def _head(block: Block, tokens: int) -> Block:
    """The first tokens of a block."""
    if block.count <= tokens:
        return block
    return msgspec.structs.replace(block, tokens=block.tokens[: 4 * tokens], logprobs=block.logprobs[: 4 * tokens])
