"""Three ranks under ULFM, of which the last is killed with mail on its way from it and to it. The others go on.

Argument: how many bytes are on the way.
"""

import os
import signal
import sys
import time
from collections.abc import Callable

from laminar_hpc.mpi.mail import Mail
from laminar_hpc.mpi.world import open_world
from laminar_hpc.protocol.peer import Goodbye, PromptEncoded

world = open_world()
assert world.survives_failures
mail = Mail(world)
deadline_s = time.monotonic() + 40.0
arrived: list[tuple[int, object]] = []
large = PromptEncoded(trajectory=1, tokens=bytes(int(sys.argv[1])))
goodbye = Goodbye(rank=world.rank)


def until(condition: Callable[[], bool]) -> None:
    while not condition():
        assert time.monotonic() < deadline_s, f"rank {world.rank} has {arrived}"
        arrived.extend(mail.poll())


if world.rank == 2:
    for rank in (0, 1):
        mail.send(rank, goodbye)
        mail.send(rank, large)
        mail.send(rank, goodbye)
    until(lambda: len(arrived) >= 2)  # which the others send before their large message
    os.kill(os.getpid(), signal.SIGKILL)

other = 1 - world.rank
mail.send(2, goodbye)
for _ in range(3):
    mail.send(2, large)
lost: list[int] = []


def found() -> bool:
    lost.extend(mail.lost())
    return bool(lost)


until(found)
assert lost == [2]
assert mail.lost() == []
assert world.dead() == {2}
mail.send(2, large)
assert mail.pending == 0
assert mail.flush(5.0)
for _ in range(20):  # mail from any rank still comes, from those that are left
    mail.send(other, large)
    mail.send(other, goodbye)
until(lambda: sum(rank == other for rank, _ in arrived) == 40)
assert mail.flush(10.0)
assert [message for rank, message in arrived if rank == other] == [large, Goodbye(rank=other)] * 20
from_the_dead = [message for rank, message in arrived if rank == 2]
assert from_the_dead == [Goodbye(rank=2), large, Goodbye(rank=2)][: len(from_the_dead)]
assert not world.finish(clean=True, timeout_s=5.0)
os.write(1, f"{world.rank} went on\n".encode())
os._exit(0)
