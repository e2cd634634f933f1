"""Every rank sends to every rank, itself included, small and large messages in turn, and checks order and content."""

import time

import pytest

from laminar_hpc.errors import ProtocolError
from laminar_hpc.mpi import mail as mail_module
from laminar_hpc.mpi.mail import Mail
from laminar_hpc.mpi.world import open_world
from laminar_hpc.protocol.peer import Graded, PromptEncoded

COUNT = 60
LIMIT = 7


def message(sender: int, number: int) -> PromptEncoded:
    size = 700_000 if number % 20 == 3 else 4 * (number % 5)
    return PromptEncoded(trajectory=number, tokens=bytes([sender]) * size)


world = open_world()
mail = Mail(world)
received: dict[int, list] = {rank: [] for rank in range(world.size)}
deadline_s = time.monotonic() + 40.0


def take() -> None:
    assert time.monotonic() < deadline_s, f"rank {world.rank} has {[len(m) for m in received.values()]}"
    messages = mail.poll(limit=LIMIT)
    assert len(messages) <= LIMIT
    for sender, content in messages:
        received[sender].append(content)


for number in range(COUNT):
    for rank in range(world.size):
        mail.send(rank, message(world.rank, number))
    take()
assert world.size == 1 or mail.flush(timeout_s=30.0)
assert mail.pending == 0
while any(len(messages) < COUNT for messages in received.values()):
    take()
for sender, messages in received.items():
    assert messages == [message(sender, number) for number in range(COUNT)], f"from {sender} to {world.rank}"

mail_module.MAX_MESSAGE_BYTES = 1000
with pytest.raises(ProtocolError, match=r"Graded for rank .* at most 1000"):
    mail.send((world.rank + 1) % max(2, world.size), Graded(trajectory=1, reward=0.0, error="x" * 2000))
print(world.rank, "ok", flush=True)
assert world.finish(clean=True, timeout_s=20.0)
