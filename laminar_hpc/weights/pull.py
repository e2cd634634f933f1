"""How a rollout gets weights from its relay: it borrows the newest image, its worker loads it, it gives the lease back.

`Puller` is the rollout driver's side, `Lender` the relay's.
"""

from __future__ import annotations

from laminar_hpc.errors import ProtocolError
from laminar_hpc.protocol.peer import Lease, LeaseRequest, LeaseReturn
from laminar_hpc.weights.fetch import SendMail
from laminar_hpc.weights.image import Image


class Puller:
    """One pull at a time: idle > `request` > waiting > `lent` > loading > `loaded` > idle."""

    def __init__(self, rank: int, relay: int, send_mail: SendMail) -> None:
        """`rank` is the rollout's own, `relay` that of the relay on its node."""
        self._rank = rank
        self._relay = relay
        self._send_mail = send_mail
        self._wanted: int | None = None
        self._lease: Lease | None = None
        self._unwanted = 0  # leases on their way that nobody waits for any more

    @property
    def waiting_for(self) -> str:
        """What it waits for and from whom, for people; "" when it waits for no lease."""
        return "" if self._wanted is None else f"version {self._wanted} or newer from relay rank {self._relay}"

    def request(self, version: int) -> None:
        """Ask for the newest version, `version` at least."""
        if self._wanted is not None or self._lease is not None:
            raise ProtocolError(f"rollout rank {self._rank}: asks for version {version} in the middle of a pull")
        self._wanted = version
        self._send_mail(self._relay, LeaseRequest(rank=self._rank, version=version))

    def lent(self, lease: Lease) -> Lease | None:
        """The relay's answer: the lease for the worker to load from, or None where it was asked for before `drop`."""
        if self._unwanted:
            self._unwanted -= 1
            self._give_back(lease)
            return None
        if self._wanted is None or lease.version < self._wanted:
            raise ProtocolError(
                f"rollout rank {self._rank}: relay rank {self._relay} lends version {lease.version}, "
                f"asked for was {self._wanted}"
            )
        self._wanted, self._lease = None, lease
        return lease

    def loaded(self) -> int:
        """The worker has loaded: the lease goes back. Returns the version."""
        if self._lease is None:
            raise ProtocolError(f"rollout rank {self._rank}: weights loaded without a lease")
        lease, self._lease = self._lease, None
        self._give_back(lease)
        return lease.version

    def drop(self) -> None:
        """The worker is gone: give back what it had, or what is still on its way to it."""
        if self._lease is not None:
            self.loaded()
        elif self._wanted is not None:
            self._wanted = None
            self._unwanted += 1

    def _give_back(self, lease: Lease) -> None:
        self._send_mail(self._relay, LeaseReturn(rank=self._rank, version=lease.version))


class Lender:
    """Lends the versions of a relay's image."""

    def __init__(self, image: Image, send_mail: SendMail) -> None:
        self._image = image
        self._send_mail = send_mail
        self._waiting: list[LeaseRequest] = []

    def asked(self, request: LeaseRequest) -> None:
        """Answer `request` at the next `poll` at which a version new enough is complete."""
        self._waiting.append(request)

    def returned(self, message: LeaseReturn) -> None:
        """A rollout, or the next relay of a chain, needs a version no longer."""
        self._image.give_back(message.rank, message.version)

    def drop(self, rank: int) -> None:
        """`rank` is gone: its requests and leases go with it."""
        self._waiting = [request for request in self._waiting if request.rank != rank]
        self._image.drop_borrower(rank)

    def poll(self) -> None:
        """Lend what can be lent."""
        still: list[LeaseRequest] = []
        for request in self._waiting:
            version = self._image.lease(request.rank, request.version)
            if version is None:
                still.append(request)
            else:
                self._send_mail(request.rank, self._lease(version))
        self._waiting = still

    def _lease(self, version: int) -> Lease:
        image = self._image
        return Lease(version, image.path, image.offset_of(version))
