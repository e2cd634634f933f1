"""How far a job's start is: which ranks have reported, in lines and in one phrase for people."""

from __future__ import annotations

from laminar_hpc.protocol.events import Event, RelayReady, RolloutReady, TrainerReady

ROLES: dict[type[Event], str] = {TrainerReady: "trainer", RelayReady: "relay", RolloutReady: "rollout"}

MOST_LINES = 8
"""At most about so many lines for the ranks of one role."""


def counted(count: int, what: str) -> str:
    """ "1 relay", "2 relays"."""
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


class Starting:
    """Counts the ranks that have reported for the first time."""

    def __init__(self, trainers: int, relays: int, rollouts: int) -> None:
        self._expected = {"trainer": trainers, "relay": relays, "rollout": rollouts}
        self._ready: dict[str, set[int]] = {role: set() for role in self._expected}

    def hear(self, event: Event) -> str | None:
        """The line that this event is worth; None for most."""
        role = ROLES.get(type(event))
        if role is None or not isinstance(event, TrainerReady | RelayReady | RolloutReady):
            return None
        ready, expected = self._ready[role], self._expected[role]
        if event.rank in ready or len(ready) == expected:  # started again, or a spare that has become a relay
            return None
        ready.add(event.rank)
        if expected == 1:
            return f"{role} ready"
        every = -(-expected // MOST_LINES)
        return f"{role} {len(ready)} of {expected} ready" if len(ready) % every == 0 or len(ready) == expected else None

    def phrase(self) -> str:
        """What the start waits for."""
        counts = [(len(self._ready[role]), expected, role) for role, expected in self._expected.items()]
        parts = [f"{ready} of {counted(expected, role)}" for ready, expected, role in counts if ready < expected]
        return f"starting: {', '.join(parts)} ready" if parts else "starting: weights of the first version"
