"""Launches of many tiles at several M as arrays, so that one call of the formula gives the times of all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from sm120tune.measure.correction import Correction
from sm120tune.measure.cost_constants import Constants
from sm120tune.measure.cost_terms import Load, TileArrays, features, terms
from sm120tune.measure.model import gemm_load, tile_arrays
from sm120tune.measure.occupancy import Device, TileFacts
from sm120tune.measure.routing import Routing
from sm120tune.problem import Gemm, MoEProblem
from sm120tune.tiles import Tile

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Layer:
    """What tiles were timed on."""

    problem: MoEProblem
    device: Device
    routing: Routing


@dataclass(frozen=True)
class Launch:
    """One GEMM with one tile that can run, at one M."""

    gemm: Gemm
    tile: Tile
    m: int
    facts: TileFacts


@dataclass(frozen=True)
class Launches:
    """Several launches; every array has one element for each, in their order."""

    each: tuple[Launch, ...]
    device: Device
    load: Load
    arrays: TileArrays

    def us(self, constants: Constants, correction: Correction | None = None) -> Array:
        """Return the model's times in µs."""
        found = terms(self.load, self.arrays, self.device, constants)
        if correction is None:
            return found.us
        return np.asarray(found.us * correction.factor(features(self.load, self.arrays, found)))

    def where(self, chosen: npt.NDArray[np.bool_]) -> Launches:
        """Return those that a mask of as many elements chooses."""
        return Launches(
            tuple(one for one, taken in zip(self.each, chosen, strict=True) if taken),
            self.device,
            Load(**{entry.name: getattr(self.load, entry.name)[chosen] for entry in fields(Load)}),
            TileArrays(**{entry.name: getattr(self.arrays, entry.name)[chosen] for entry in fields(TileArrays)}),
        )


def launches_of(each: Sequence[Launch], problem: MoEProblem, device: Device, routing: Routing) -> Launches:
    """Return launches with what they have to do; raises UserError for an M that cannot be routed."""
    arrays = tile_arrays([one.tile for one in each], [one.facts for one in each], device)
    columns = {entry.name: np.zeros(len(each)) for entry in fields(Load)}
    for gemm, m in {(one.gemm, one.m) for one in each}:
        here = np.array([(one.gemm, one.m) == (gemm, m) for one in each])
        load = gemm_load(problem, gemm, m, routing, arrays.block_m[here])
        for name, column in columns.items():
            column[here] = getattr(load, name)
    return Launches(tuple(each), device, Load(**columns), arrays)
