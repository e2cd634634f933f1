"""From the controller's events and commands to rows of the table `relay_events`: what became of versions and relays, and why.

A version that trainers are told to release before it was broadcast was skipped. One that is dropped before they are told to
was stopped; dropped later, nobody held it any more (control/distribution.py).
"""

from __future__ import annotations

from typing import Any

from laminar_hpc.protocol.commands import Attach, Broadcast, Command, Drop, Forget, Readmit, Release, Sever, TakeOver
from laminar_hpc.protocol.events import Event, LinkStalled, RelayReady

Row = dict[str, Any]


class RelayEvents:
    """Makes the rows. It sees every event, and after each the commands that followed from it."""

    def __init__(self) -> None:
        self._broadcast: set[int] = set()
        self._released: set[int] = set()

    def event(self, event: Event) -> Row | None:
        """The row of an event, None for one that is not about relays."""
        match event:
            case RelayReady():
                return _row("joined", f"incarnation {event.incarnation} on node {event.node}", relay=event.rank)
            case LinkStalled():
                reason = f"rank {event.source} has sent it nothing for too long"
                return _row("stalled", reason, version=event.version, relay=event.rank)
            case _:
                return None

    def command(self, command: Command) -> Row | None:
        """The row of a command, None for one that is not about relays or tells nothing new."""
        reason = command.reason
        match command:
            case Broadcast():
                what = "rerouted" if command.version in self._broadcast else "broadcast"
                self._broadcast.add(command.version)
                text = f"{reason}; chain {' '.join(map(str, command.chain))}"
                return _row(what, text, version=command.version, relay=command.chain[0])
            case Release():
                self._released.add(command.version)
                if command.version not in self._broadcast:
                    return _row("skipped", reason, version=command.version)
                return None
            case Drop():
                what = "dropped" if command.version in self._released else "stopped"
                return _row(what, reason, version=command.version)
            case Forget():
                return _row("lost", reason, relay=command.rank)
            case Sever():
                return _row("severed", reason, relay=command.source)
            case TakeOver():
                return _row("taken_over", reason, relay=command.rank)
            case Readmit():
                return _row("readmitted", reason, relay=command.rank)
            case Attach():
                return _row("attached", reason, relay=command.relay, rollout=command.rank)
            case _:
                return None


def _row(
    what: str, reason: str, *, version: int | None = None, relay: int | None = None, rollout: int | None = None
) -> Row:
    return {"what": what, "version": version, "relay": relay, "rollout": rollout, "reason": reason}
