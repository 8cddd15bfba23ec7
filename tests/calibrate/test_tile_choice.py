"""Which tiles a calibration times."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from made_cards import CLASS, LAYER, make_calibration_job

from sm120tune.calibrate.choice import choose_tiles
from sm120tune.calibrate.fit import sensitivities
from sm120tune.calibrate.launches import Launch, launches_of
from sm120tune.devices import DEFAULT_DEVICE_NAME, find_device
from sm120tune.job import Job
from sm120tune.measure.model import facts_without_compiling
from sm120tune.measure.occupancy import blocks_per_sm
from sm120tune.measure.routing import UNIFORM
from sm120tune.problem import Gemm, MoEProblem
from sm120tune.search_space import VALUES
from sm120tune.tiles import Tile

CARD = find_device(DEFAULT_DEVICE_NAME)


@pytest.fixture(scope="module")
def job(sglang_0_5_23: Path) -> Job:
    return make_calibration_job(sglang_0_5_23)


@pytest.fixture(scope="module")
def tiles(job: Job) -> list[Tile]:
    return [one.tile for one in choose_tiles(job, CLASS)]


def test_the_same_every_time_and_no_tile_twice(job: Job, tiles: list[Tile]) -> None:
    assert [one.tile for one in choose_tiles(job, CLASS)] == tiles
    assert len(set(tiles)) == len(tiles) == 30


def test_sglang_s_defaults_come_first(job: Job) -> None:
    chosen = choose_tiles(job, CLASS)
    defaults = {job.lookup.builtin_pair(LAYER, m).gate_up for m in job.batch_sizes}
    assert {one.tile for one in chosen[: len(defaults)]} == defaults
    assert chosen[0].why == "SGLang's default at M=1, 64"
    assert all(one.why for one in chosen)


@pytest.mark.parametrize("name", [name for name in VALUES if name != "GROUP_SIZE_M"])
def test_every_value_is_there_twice(tiles: list[Tile], name: str) -> None:
    counts = Counter(getattr(tile, name) for tile in tiles)
    assert set(counts) == set(VALUES[name])
    assert min(counts.values()) >= 2


def test_occupancies_and_spills_are_there(tiles: list[Tile]) -> None:
    facts = {tile: facts_without_compiling(tile, LAYER, CARD) for tile in tiles}
    held = Counter(min(3, blocks_per_sm(tile, CARD, facts[tile])[0]) for tile in tiles)
    assert min(held[blocks] for blocks in (1, 2, 3)) >= 2
    assert sum(fact.spill_bytes > 0 for fact in facts.values()) >= 2


@pytest.mark.parametrize(
    ("name", "shared"), [(CARD.name, CARD.shared_memory_per_block), (CARD.name, 65536), ("NVIDIA H200", 90_000)]
)
def test_none_is_over_the_card_s_shared_memory(sglang_0_5_23: Path, name: str, shared: int) -> None:
    # On SM90 wgmma keeps one buffer more than the formula of the cuts says; the record knows.
    card = replace(find_device(name), shared_memory_per_block=shared, shared_memory_per_sm=2 * shared)
    chosen = choose_tiles(make_calibration_job(sglang_0_5_23, card=card), CLASS)
    assert len(chosen) == 30
    for one in chosen:
        assert facts_without_compiling(one.tile, LAYER, card).shared_bytes <= shared


def test_fewer_tiles_are_the_first_of_more_and_the_defaults_at_least(job: Job, tiles: list[Tile]) -> None:
    assert [one.tile for one in choose_tiles(job, CLASS, 12)] == tiles[:12]
    assert [one.tile for one in choose_tiles(job, CLASS, 1)] == tiles[:2]


def test_they_tell_the_constants_apart_better_than_tiles_at_random(job: Job, tiles: list[Tile]) -> None:
    def told(some: list[Tile]) -> float:
        each = [
            Launch(gemm, tile, m, facts_without_compiling(tile, LAYER, CARD))
            for tile in some
            for gemm in Gemm
            for m in job.batch_sizes
        ]
        slopes = sensitivities(launches_of(each, LAYER, CARD, UNIFORM), CLASS)
        return float(np.linalg.slogdet(np.eye(slopes.shape[1]) + slopes.T @ slopes / 0.15**2)[1])

    every = [tile for tile in job.space(4096).tiles() if tile.GROUP_SIZE_M == 1]
    rng = np.random.default_rng(0)
    random = [told([every[i] for i in rng.choice(len(every), 30, replace=False)]) for _ in range(5)]
    assert told(tiles) > max(random) + 1


def test_blocks_of_a_quantized_layer_are_kept(sglang_0_5_23: Path) -> None:
    layer = MoEProblem.from_parallelism(
        experts=64, tp=1, inter=512, hidden=2048, topk=4, dtype="fp8_w8a8", block_shape=(128, 128)
    )
    chosen = choose_tiles(make_calibration_job(sglang_0_5_23, problem=layer), CLASS)
    assert len(chosen) == 30
    assert {one.tile.BLOCK_SIZE_K for one in chosen} <= {32, 64, 128}
