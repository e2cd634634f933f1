"""The relay bench's plans, its fit of a link, and its choice of whom a fault strikes."""

from __future__ import annotations

import argparse
import random

import pytest

from laminar_hpc.errors import ConfigError
from laminar_hpc.protocol.peer import Shard
from laminar_hpc.runtime.relay_bench.comparing import fit
from laminar_hpc.runtime.relay_bench.failing import choose
from laminar_hpc.runtime.relay_bench.plan import Plan, add_arguments, chunk_bytes_for, read_plan, whole_tiles
from laminar_hpc.weights.reshard import check_cover


def test_a_plan_is_what_its_arguments_say() -> None:
    plan = Plan(part="failure", relays=(3, 8), nbytes=7, chunks=2, ways=("relays", "star"), fault="pair", verify=False)
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    assert read_plan(parser.parse_args(plan.arguments())) == plan


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"part": "lunch"}, "part must be of broadcast, publish, pull, failure, got 'lunch'"),
        ({"transport": "pigeon"}, "transport must be of mpi, nixl"),
        ({"ways": ("relays", "mail")}, "ways must be of relays, copy, .* got 'mail'"),
        ({"relays": ()}, "relays must be at least 1, got none"),
        ({"part": "failure", "relays": (2,)}, "relays must be at least 3, got 2"),
        ({"nbytes": 0}, "nbytes"),
    ],
)
def test_plans_that_cannot_be_are_refused(change: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        Plan(**change).check()  # type: ignore[arg-type]


@pytest.mark.parametrize("nbytes", [1, 1 << 20, 25_000_000])
def test_the_image_has_the_bytes_asked_for_and_one_trainer_has_them_all(nbytes: int) -> None:
    manifest = Plan(nbytes=nbytes).manifest(chunk_bytes_for(nbytes, 10))
    assert manifest.nbytes == nbytes
    assert manifest.chunks == (10 if nbytes > 10_000 else 1)
    tiles = whole_tiles(manifest)
    check_cover(manifest, [Shard(1, tiles)])
    assert sum(tile.nbytes for tile in tiles) == nbytes


def test_the_fit_finds_a_link_behind_a_burst_that_passes_for_nothing() -> None:
    startup_s, byte_s, burst = 0.001, 4e-8, 131_072
    sizes = [1, 1 << 16, 1 << 19, 1 << 20, 1 << 21, 1 << 22]
    pings = [(size, startup_s + max(0, size - burst) * byte_s) for size in sizes]
    noise = [(1 << 20, 3.0), (1, 5.0)]  # one outlier each: medians of 3 do not see it
    line = fit([*pings, *pings, *noise])
    assert line.startup_s == pytest.approx(0.001)
    assert line.byte_s == pytest.approx(4e-8)


def test_faults_strike_where_they_say() -> None:
    chain = [5, 2, 3, 4, 9]
    draw = random.Random(0)
    assert choose("master", chain, draw) == ([5], 2)
    assert choose("last", chain, draw) == ([9], None)
    middles = {(tuple(victims), watcher) for victims, watcher in (choose("middle", chain, draw) for _ in range(100))}
    assert middles == {((2,), 3), ((3,), 4), ((4,), 9)}
    pairs = {(tuple(victims), watcher) for victims, watcher in (choose("pair", chain, draw) for _ in range(100))}
    assert pairs == {((2, 3), 4), ((3, 4), 9)}
