"""How trajectories and groups leave the books: collected into one `Settle` command."""

from __future__ import annotations

from laminar_hpc.control.pool import Trajectory
from laminar_hpc.control.prompts import Group
from laminar_hpc.control.state import JobState
from laminar_hpc.protocol.commands import GroupOutcome, Settle, TrajectoryOutcome
from laminar_hpc.protocol.trajectory import State


class Settlement:
    """Ends trajectories and groups, each once, at one moment."""

    def __init__(self, state: JobState, now: float) -> None:
        self._state = state
        self._now = now
        self._trajectories: list[TrajectoryOutcome] = []
        self._groups: list[GroupOutcome] = []

    def trajectory(
        self, id: int, end: State, reason: str, *, staleness: int | None = None, step: int | None = None
    ) -> Trajectory:
        """End a trajectory; `staleness` is that at consumption."""
        one = self._state.pool.remove(id)
        self._trajectories.append(
            TrajectoryOutcome(
                trajectory=id,
                group=one.group,
                prompt=one.prompt,
                sample=one.sample,
                purpose=one.purpose,
                state=end,
                reason=reason,
                version=one.version,
                newest_version=one.current_version,
                spans=one.spans,
                prefilled_tokens=one.prefilled_tokens,
                rank=one.rank,
                prompt_tokens=one.prompt_tokens,
                response_tokens=one.tokens,
                reward=one.reward,
                verdict=one.verdict,
                stop=one.stop,
                begun_s=one.begun_s,
                finished_s=one.finished_s,
                settled_s=self._now,
                staleness_finish=one.staleness_finish,
                staleness_consumption=staleness,
                step=step,
            )
        )
        return one

    def group(
        self, group: Group, end: State, reason: str, *, staleness: int | None = None, step: int | None = None
    ) -> None:
        """End a group and all of its members that have not ended yet."""
        for id in group.members:
            self.trajectory(id, end, reason, staleness=staleness, step=step)
        self._state.ledger.close(group, end)
        self._groups.append(
            GroupOutcome(
                group=group.id,
                prompt=group.prompt,
                purpose=group.purpose,
                state=end,
                reason=reason,
                version=group.version,
                step=step,
                trajectories=len(group.members),
                handed_out_s=group.handed_out_s,
                settled_s=self._now,
            )
        )

    def start_over(self, group: Group, reason: str) -> None:
        """End the group's members, finished ones too: new ones will take their place under another version."""
        for id in group.members:
            self.trajectory(id, State.DISCARDED, reason)
        group.members = []
        group.unfinished = 0
        group.version = None

    def commands(self, reason: str) -> list[Settle]:
        """The command, if anything has ended."""
        if not self._trajectories and not self._groups:
            return []
        return [Settle(reason, self._trajectories, self._groups)]
