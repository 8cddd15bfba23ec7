from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from sm120tune.devices import DEFAULT_DEVICE_NAME, find_device
from sm120tune.measure.cost_constants import card_class
from sm120tune.measure.model_call import CallLoad, cold_share, missed_share, rest_us

CARD = find_device(DEFAULT_DEVICE_NAME)
C = card_class(120).constants
CALL = CallLoad(4096.0, 32768.0, 0.0, 2048.0, 512.0, 8.0, 0.0)


def rest(load: CallLoad) -> float:
    return float(rest_us(load, CARD, CARD.l2_bytes, C))


def test_a_small_call_is_its_fixed_part() -> None:
    assert rest(CallLoad(1.0, 8.0, 0.0, 2048.0, 512.0, 8.0, 0.0)) == pytest.approx(C.call_us, rel=0.01)


@pytest.mark.parametrize("field", ["tokens", "rows", "rows_elsewhere", "hidden", "intermediate"])
def test_more_of_anything_takes_longer(field: str) -> None:
    assert rest(replace(CALL, **{field: 2 * float(getattr(CALL, field)) + 1000})) > rest(CALL)


def test_one_choice_a_token_has_no_sum() -> None:
    assert rest(replace(CALL, topk=1.0)) < 0.7 * rest(CALL)


def test_quantization_and_zero_blocks_cost() -> None:
    assert rest(replace(CALL, quantized=1.0)) > rest(CALL) + C.quantize_us
    assert rest(replace(CALL, empty_blocks_an_sm=10.0)) == pytest.approx(rest(CALL) + 10 * C.empty_block_us)


def test_a_large_call_runs_at_dram_speed() -> None:
    large = replace(CALL, rows=1e7, tokens=1.25e6)
    traffic = 1e7 * 3 * 512 * 2 + (1e7 + 1.25e6) * 2048 * 2
    assert traffic / CARD.bandwidth * 1e6 < rest(large) < 1.6 * traffic / CARD.bandwidth * 1e6


def test_arrays_give_what_numbers_give() -> None:
    both = rest_us(replace(CALL, tokens=np.array([1.0, 4096.0])), CARD, CARD.l2_bytes, C)
    assert both[1] == pytest.approx(rest(CALL))
    assert both.shape == (2,)


def test_weights_stay_in_the_cache_until_they_fill_it() -> None:
    small, equal, large = (
        float(cold_share(share * C.hot_share * CARD.l2_bytes, CARD.l2_bytes, C)) for share in (0.5, 1, 2)
    )
    assert small < 0.05
    assert equal == pytest.approx(0.5)
    assert large > 0.95
    assert float(missed_share(0.0, 1e6, 2.0)) == pytest.approx(0.0, abs=1e-9)
