from __future__ import annotations

import json

import numpy as np
import pytest

from sm120tune.measure.correction import Correction, columns


def made_up(rows: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows, 3))
    return x, 0.05 * x[:, 0] - 0.03 * x[:, 1] * x[:, 2]


def test_a_quadratic_rest_is_learned_and_holds_on_new_rows() -> None:
    x, y = made_up(400)
    found = Correction.fit(x[:200], y[:200], np.ones(200), 1e-4)
    near = np.abs(x[200:]).max(axis=1) < 2
    assert np.log(found.factor(x[200:][near])) == pytest.approx(y[200:][near], abs=0.01)


def test_a_correction_is_bounded_wherever_it_is_asked() -> None:
    x, y = made_up(200)
    found = Correction.fit(x, 100 * y, np.ones(200), 1e-4)
    factor = found.factor(1e6 * x)
    assert np.isfinite(factor).all()
    assert (np.abs(np.log(factor)) <= 0.25 + 1e-12).all()


def test_a_feature_that_never_changes_does_no_harm() -> None:
    x, y = made_up(200)
    x[:, 1] = 7.0
    assert np.isfinite(Correction.fit(x, y, np.ones(200), 1e-3).factor(x)).all()


def test_rows_without_weight_teach_nothing() -> None:
    x, y = made_up(200)
    weight = np.r_[np.ones(100), np.zeros(100)]
    spoiled = np.r_[y[:100], y[100:] + 0.2]
    clean, other = (Correction.fit(x, target, weight, 1e-3) for target in (y, spoiled))
    assert clean.weights == pytest.approx(other.weights)


def test_a_larger_ridge_corrects_less() -> None:
    x, y = made_up(200)
    small, large = (np.abs(np.log(Correction.fit(x, y, np.ones(200), r).factor(x))).mean() for r in (1e-3, 10.0))
    assert large < 0.5 * small


def test_columns_are_constant_linear_and_quadratic() -> None:
    x = np.array([[1.0, 2.0], [0.5, -1.0]])
    assert columns(x, np.zeros(2), np.ones(2)) == pytest.approx(
        np.array([[1, 1, 2, 1, 2, 4], [1, 0.5, -1, 0.25, -0.5, 1]])
    )


def test_json_round_trip() -> None:
    x, y = made_up(100)
    found = Correction.fit(x, y, np.ones(100), 1e-3)
    again = Correction.from_json(json.loads(json.dumps(found.to_json())))
    assert again.factor(x) == pytest.approx(found.factor(x), rel=1e-4)
