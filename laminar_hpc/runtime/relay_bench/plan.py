"""What one start of the bench measures, as options of a command line, and the config and image that follow from it."""

from __future__ import annotations

import argparse
import math

import msgspec

from laminar_hpc.config.load import check_config
from laminar_hpc.config.schema import Config
from laminar_hpc.errors import ConfigError
from laminar_hpc.protocol.peer import Manifest, Tile
from laminar_hpc.record.schema import BENCH_FAULTS, BENCH_TRANSPORTS, BENCH_WAYS
from laminar_hpc.weights.manifest import make_manifest

PARTS = ("broadcast", "publish", "pull", "failure")

TENSOR_BYTES = 1 << 20
"""The image is made of tensors of so many bytes, the last one shorter."""

SILENCE_S = 600.0
"""Plain ways block a rank for as long as they take, and it says nothing meanwhile."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """One start of the bench: `part` of the whole, on 2 ranks (manager, trainer) and the relays.

    `chunks` is 0 where the measured link chooses. `ways` are those that take turns with the relays. `fault` is for the part
    failure; `files` is the directory of shared storage for the way file.
    """

    part: str = "broadcast"
    relays: tuple[int, ...] = (8,)
    nbytes: int = 25_000_000
    chunks: int = 0
    transport: str = "mpi"
    repetitions: int = 5
    ways: tuple[str, ...] = BENCH_WAYS
    fault: str = "middle"
    files: str = "."
    seed: int = 0
    window: int = 4
    slots: int = 3
    verify: bool = True
    timeout_s: float = 1.0

    @property
    def ranks(self) -> int:
        """How many ranks it takes."""
        return 1 if self.part == "pull" else 2 + max(self.relays)

    def check(self) -> None:
        """ConfigError for the first option that cannot be."""
        for option, value, allowed in (
            ("part", self.part, PARTS),
            ("transport", self.transport, BENCH_TRANSPORTS),
            ("fault", self.fault, BENCH_FAULTS),
            *(("ways", way, BENCH_WAYS) for way in self.ways),
        ):
            if value not in allowed:
                raise ConfigError(f"bench relay: {option} must be of {', '.join(allowed)}, got {value!r}")
        least = 3 if self.part == "failure" else 1
        if not self.relays or min(self.relays) < least:
            raise ConfigError(f"bench relay: relays must be at least {least}, got {_words(self.relays) or 'none'}")
        if self.nbytes < 1 or self.chunks < 0 or self.repetitions < 1:
            raise ConfigError("bench relay: nbytes and repetitions must be at least 1, chunks at least 0")

    def arguments(self) -> list[str]:
        """The options that make this plan (`add_arguments`)."""
        words = []
        for name, value in msgspec.structs.asdict(self).items():
            words += [f"--{name.replace('_', '-')}", _words(value) if isinstance(value, tuple) else str(value)]
        return words

    def manifest(self, chunk_bytes: int) -> Manifest:
        """The image's layout."""
        sizes = [TENSOR_BYTES] * (self.nbytes // TENSOR_BYTES)
        if self.nbytes % TENSOR_BYTES:
            sizes.append(self.nbytes % TENSOR_BYTES)
        return make_manifest(((f"tensor{i:06d}", (size,), "uint8") for i, size in enumerate(sizes)), chunk_bytes)

    def config(self, run_dir: str) -> Config:
        """What the relays' own code is told."""
        table = {
            "run_dir": run_dir,
            "model": {"path": "none"},  # nothing is loaded from there
            "job": {
                "name": "bench relay",
                "relays": max(self.relays),
                "rollouts": max(self.relays),
                "seed": self.seed,
                "silence_timeout_s": SILENCE_S,
            },
            "weights": {
                "transport": self.transport,
                "window": self.window,
                "slots": self.slots,
                "verify": self.verify,
                "relay_timeout_s": self.timeout_s,
            },
        }
        return check_config(table, "bench relay")


def whole_tiles(manifest: Manifest) -> list[Tile]:
    """The shard of a trainer that has everything."""
    return [Tile(t.offset, t.nbytes, 1, t.nbytes, 0, t.nbytes) for t in manifest.tensors if t.nbytes]


def chunk_bytes_for(nbytes: int, chunks: int) -> int:
    """The chunk size that cuts an image of `nbytes` into `chunks`."""
    return max(1024, math.ceil(nbytes / chunks))


def read_plan(options: argparse.Namespace) -> Plan:
    """The plan of these options."""
    plan = Plan(**{field: getattr(options, field) for field in Plan.__struct_fields__ if hasattr(options, field)})
    plan.check()
    return plan


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of a plan."""
    plan = Plan()
    add = parser.add_argument
    add("--part", default=plan.part, choices=PARTS, help="what is measured")
    add("--relays", type=numbers, default=plan.relays, help="numbers of relays, such as 3,4,6,8")
    add("--nbytes", type=_bytes, default=plan.nbytes, help="bytes of the image, such as 25e6")
    add("--chunks", type=int, default=plan.chunks, help="chunks it is cut into (0: by the measured link)")
    add("--transport", default=plan.transport, choices=BENCH_TRANSPORTS)
    add("--repetitions", type=int, default=plan.repetitions)
    add("--ways", type=words, default=plan.ways, help=f"what takes turns, of {','.join(BENCH_WAYS)}")
    add("--fault", default=plan.fault, choices=BENCH_FAULTS)
    add("--files", default=plan.files, help="a directory on shared storage, for the way file")
    add("--seed", type=int, default=plan.seed)
    add("--window", type=int, default=plan.window)
    add("--slots", type=int, default=plan.slots)
    add("--verify", type=lambda text: text != "False", default=plan.verify)
    add("--timeout-s", type=float, default=plan.timeout_s, help="when a relay that says nothing counts as lost")


def numbers(text: str) -> tuple[int, ...]:
    """Comma-separated numbers."""
    return tuple(int(word) for word in text.split(",") if word)


def words(text: str) -> tuple[str, ...]:
    """Comma-separated words."""
    return tuple(word for word in text.split(",") if word)


def _bytes(text: str) -> int:
    return int(float(text))


def _words(values: tuple[object, ...]) -> str:
    return ",".join(map(str, values))
