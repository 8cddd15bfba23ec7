from __future__ import annotations

import pytest

from sm120tune.devices import DEFAULT_DEVICE_NAME, find_device
from sm120tune.measure.occupancy import StoredFacts, blocks_per_sm, guess_facts, recorded_facts
from sm120tune.quantization import Quantization
from sm120tune.search_space import every_tile, staged_shared_bytes
from sm120tune.tiles import Tile

CARD = find_device(DEFAULT_DEVICE_NAME)
BF16, FP8_BLOCK = Quantization(), Quantization("fp8_w8a8", (128, 128))


@pytest.mark.parametrize(
    ("facts", "warps", "expected"),
    [
        (StoredFacts(16384, 64, 0), 4, (5, "shared_memory")),
        (StoredFacts(101376, 64, 0), 4, (1, "shared_memory")),
        (StoredFacts(101377, 64, 0), 4, (0, "shared_memory")),
        (StoredFacts(0, 128, 0), 4, (4, "registers")),
        # 121 registers are handed out as 128.
        (StoredFacts(0, 121, 0), 4, (4, "registers")),
        (StoredFacts(0, 255, 0), 16, (0, "registers")),
        (StoredFacts(0, 32, 0), 8, (6, "warps")),
    ],
)
def test_blocks_per_sm(facts: StoredFacts, warps: int, expected: tuple[int, str]) -> None:
    assert blocks_per_sm(Tile(64, 64, 64, 1, warps), CARD, facts) == expected


def test_guess_follows_the_staging_formula_and_sees_spills() -> None:
    assert guess_facts(Tile(64, 128, 64, 1, 4, 3), Quantization()).shared_bytes == 2 * (64 + 128) * 64 * 2
    assert guess_facts(Tile(64, 128, 64, 1, 4, 1), Quantization()).shared_bytes == (64 + 128) * 64 * 2
    assert guess_facts(Tile(64, 128, 64, 1, 4, 3), Quantization()).spill_bytes == 0
    spilled = guess_facts(Tile(128, 256, 64, 1, 4, 3), Quantization())
    assert spilled.registers == 255
    assert 4000 < spilled.spill_bytes < 7000
    assert guess_facts(Tile(128, 256, 64, 1, 8, 3), Quantization()).spill_bytes == 0


def test_guess_knows_which_releases_of_triton_keep_unpacked_weights_in_registers() -> None:
    packed, tile = Quantization("int4_w4a16", (0, 32)), Tile(16, 128, 64, 1, 4, 3)
    assert guess_facts(tile, packed, "3.6.0").spill_bytes > 512
    assert guess_facts(Tile(16, 64, 64, 1, 4, 3), packed, "3.6.0").spill_bytes == 0
    for newer in ("3.7.1", "3.10.0", None):
        assert guess_facts(tile, packed, newer) == guess_facts(tile, Quantization("int8_w8a16", (0, 32)), newer)
    assert guess_facts(tile, Quantization(), "3.6.0") == guess_facts(tile, Quantization())


def fitting_tiles(stored: Quantization, longest_k: int) -> list[Tile]:
    return [
        tile
        for tile in every_tile()
        if tile.GROUP_SIZE_M == 1
        and tile.BLOCK_SIZE_K <= longest_k
        and staged_shared_bytes(tile, stored) <= CARD.shared_memory_per_block
        and tile.BLOCK_SIZE_M * tile.BLOCK_SIZE_N <= 128 * 32 * tile.num_warps
    ]


def test_sm120_record_has_every_tile_that_fits_and_stages_as_the_formula_says() -> None:
    fitting = fitting_tiles(BF16, 256)
    assert len(fitting) > 400
    exact = 0
    for tile in fitting:
        facts = recorded_facts(tile, 120, BF16)
        assert facts is not None, tile
        assert facts.shared_bytes >= staged_shared_bytes(tile, BF16)
        assert 16 <= facts.registers <= 255
        exact += facts.shared_bytes == staged_shared_bytes(tile, BF16)
    assert exact > 0.95 * len(fitting)


def test_sm120_record_has_every_tile_of_block_wise_fp8_that_fits() -> None:
    fitting = fitting_tiles(FP8_BLOCK, 128)
    assert len(fitting) > 400
    found = [recorded_facts(tile, 120, FP8_BLOCK) for tile in fitting]
    known = [(facts, tile) for facts, tile in zip(found, fitting, strict=True) if facts is not None]
    assert len(known) == len(fitting)
    assert all(16 <= facts.registers <= 255 for facts, _ in known)
    # Scales and the epilogue may take more; where an operand has 16 rows a part of it is not staged.
    shares = [facts.shared_bytes / staged_shared_bytes(tile, FP8_BLOCK) for facts, tile in known]
    assert sum(share < 1 for share in shares) < 0.05 * len(known)
    assert sum(share == 1 for share in shares) > 0.5 * len(known)


def test_group_does_not_name_a_binary_and_121_is_taken_as_120() -> None:
    assert recorded_facts(Tile(64, 64, 32, 8), 120, BF16) == recorded_facts(Tile(64, 64, 32, 1), 121, BF16) is not None


def test_unknown_architecture_or_tile_is_not_recorded() -> None:
    assert recorded_facts(Tile(64, 64, 64, 1), 80, BF16) is None
    assert recorded_facts(Tile(512, 64, 64, 1), 120, BF16) is None
    assert recorded_facts(Tile(64, 64, 64, 1), 120, Quantization("fp8_w8a8")) is None


def test_records_of_two_architectures_differ() -> None:
    # wgmma keeps one buffer more.
    tile = Tile(128, 128, 64, 1, 8, 3)
    hopper, blackwell = recorded_facts(tile, 90, BF16), recorded_facts(tile, 120, BF16)
    assert hopper is not None
    assert blackwell is not None
    assert hopper.shared_bytes > blackwell.shared_bytes
