"""How a rollout gets weights from a relay: it borrows the newest image, its worker loads it, it gives the lease back.

`Puller` is the rollout driver's side, `Lender` the relay's. On one node the worker maps the relay's memory. From another
node the driver first fetches the chunks into memory of its own (weights/remote.py), and lends that to the worker.
"""

from __future__ import annotations

import os

import msgspec

from laminar_hpc.errors import ProtocolError
from laminar_hpc.protocol.peer import Lease, LeaseRefused, LeaseRequest, LeaseReturn
from laminar_hpc.weights.epochs import Epochs
from laminar_hpc.weights.image import Image, SlotState
from laminar_hpc.weights.serve import SendMail


class Puller:
    """One pull at a time: idle > `request` > waiting > `lent` > loading > `loaded` > idle."""

    def __init__(self, rank: int, relay: int, send_mail: SendMail) -> None:
        """`rank` is the rollout's own, `relay` the one that it pulls from at first."""
        self.relay = relay
        self._rank = rank
        self._send_mail = send_mail
        self._wanted: int | None = None
        self._lease: Lease | None = None
        self._lender = relay
        self._requests = self._epoch = 0

    @property
    def waiting_for(self) -> str:
        """What it waits for and from whom, for people; "" when it waits for no lease."""
        return "" if self._wanted is None else f"version {self._wanted} or newer from relay rank {self.relay}"

    @property
    def lending(self) -> bool:
        """Whether a relay lends it something now."""
        return self._lease is not None

    def request(self, version: int, exactly: bool = False) -> None:
        """Ask for the newest version, `version` at least, or `exactly` for that one."""
        if self._wanted is not None or self._lease is not None:
            raise ProtocolError(f"rollout rank {self._rank}: asks for version {version} in the middle of a pull")
        self._wanted = version
        self._requests += 1
        self._send_mail(self.relay, LeaseRequest(self._rank, version, self._requests, self._epoch, exactly))

    def lent(self, relay: int, lease: Lease) -> Lease | None:
        """The relay's answer: the lease to load from, or None where it was asked for before `drop` or `attach`.

        Such a late one goes back; it may come at any time, also from a relay that was taken for lost.
        """
        if self._wanted is None or lease.request != self._requests:
            self._send_mail(relay, LeaseReturn(rank=self._rank, version=lease.version))
            return None
        if relay != self.relay or lease.version < self._wanted:
            raise ProtocolError(
                f"rollout rank {self._rank}: relay rank {relay} lends version {lease.version}, "
                f"asked for was {self._wanted} from rank {self.relay}"
            )
        self._wanted, self._lease, self._lender = None, lease, relay
        return lease

    def refused(self, message: LeaseRefused) -> bool:
        """The relay has not got what was asked for; False where that is not asked for any more."""
        if self._wanted is None or message.request != self._requests:
            return False
        self._wanted = None
        return True

    def loaded(self) -> int:
        """What was lent is needed no more: the lease goes back. Returns the version."""
        if self._lease is None:
            raise ProtocolError(f"rollout rank {self._rank}: weights loaded without a lease")
        lease, self._lease = self._lease, None
        self._send_mail(self._lender, LeaseReturn(rank=self._rank, version=lease.version))
        return lease.version

    def drop(self) -> None:
        """Nobody wants the weights any more: give back what is here, or what is still on its way."""
        if self._lease is not None:
            self.loaded()
        else:
            self._wanted = None

    def start_over(self, epoch: int) -> None:
        """The relays have taken this rank for gone, by the loss of this epoch; what it has of them may be written over."""
        self.drop()
        self._epoch = epoch

    def attach(self, relay: int) -> None:
        """Pull from `relay` from now on. A lease that was asked for is dropped; one that is here stays until `loaded`."""
        if self._lease is None:
            self.drop()
        self.relay = relay


class LentMemory:
    """Keeps the memory of leases open, so that a worker can map it also after the relay that lent it has died."""

    def __init__(self) -> None:
        self._open: tuple[str, int] | None = None

    def keep(self, lease: Lease) -> Lease:
        """The same lease by a path of this process. OSError where the relay is gone already."""
        if self._open is None or self._open[0] != lease.path:
            fd = os.open(lease.path, os.O_RDONLY | os.O_CLOEXEC)
            self.close()
            self._open = (lease.path, fd)
        return msgspec.structs.replace(lease, path=f"/proc/{os.getpid()}/fd/{self._open[1]}")

    def close(self) -> None:
        """Let go of it."""
        if self._open is not None:
            os.close(self._open[1])
            self._open = None


class Lender:
    """Lends the versions of a relay's image."""

    def __init__(self, image: Image, send_mail: SendMail, epochs: Epochs) -> None:
        """`epochs` are the relay's: their owner tells them of losses before it calls `drop`."""
        self._image = image
        self._send_mail = send_mail
        self._waiting: list[LeaseRequest] = []
        self._epochs = epochs

    def asked(self, request: LeaseRequest) -> None:
        """Answer `request` at the next `poll` at which a version new enough is complete; at once where it is an exact one."""
        if request.epoch >= self._epochs.of(request.rank):  # last words may come after the news of a death
            self._waiting.append(request)

    def returned(self, message: LeaseReturn) -> None:
        """A rollout, or the next relay of a chain, needs a version no longer.

        A lease that is not there is one that its borrower never came to use, or one of a rank that was taken for lost.
        """
        if self._image.has_lent(message.rank, message.version):
            self._image.give_back(message.rank, message.version)

    def drop(self, rank: int) -> None:
        """`rank` is gone: its leases, and what it had asked for by then, go with it."""
        epoch = self._epochs.of(rank)
        self._waiting = [request for request in self._waiting if request.rank != rank or request.epoch >= epoch]
        self._image.drop_borrower(rank)

    def begin_anew(self) -> None:
        """This relay counts as gone itself: whoever has asked it asks another one."""
        self._waiting.clear()

    def poll(self) -> None:
        """Lend what can be lent."""
        still: list[LeaseRequest] = []
        for request in self._waiting:
            version = self._lend(request)
            if version is not None:
                self._send_mail(request.rank, self._image.lent(version, request.request))
            elif request.exactly:
                self._send_mail(request.rank, LeaseRefused(request.version, request.request))
            else:
                still.append(request)
        self._waiting = still

    def _lend(self, request: LeaseRequest) -> int | None:
        """The version that is lent now (None: none can be)."""
        if not request.exactly:
            return self._image.lease(request.rank, request.version)
        if self._image.state(request.version) is not SlotState.READY:
            return None
        self._image.hold(request.rank, request.version)
        return request.version
