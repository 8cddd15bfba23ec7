"""Published times of SGLang's whole fused_moe call on a real card, as the cost model sees them.

The data are of ai-dynamo/aiconfigurator (bench/field/README.md). What the rows mean was read from its collector and
checked against the times, since the table itself does not say:

* ``balanced`` and ``power_law``: tokens per expert as below (``_balanced``, ``_power_law``); a power law's shares are
  rounded by largest remainder, and the busiest group of experts is this rank's.
* The five routings of one timing hit the same weights again, so weights that fit in the L2 are found there.
* With ep > 1 only local choices are multiplied, the others' rows are zeros. Three models (``CLAMPED``) were collected
  otherwise: there tokens without a local choice are left out and other ranks' choices go to expert 0.
* The tile is the built-in default's for the local experts, except where a file ships: E=256 N=512 bf16
  (``tuned``), whose up file then serves both GEMMs.
* fp8 rows whose N is no multiple of 128 ran without block scales; they are left out.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow.parquet

from sm120tune.devices import DeviceSpec
from sm120tune.measure.cost_constants import Constants
from sm120tune.measure.cost_terms import Load, TileArrays, terms
from sm120tune.measure.model import tile_arrays
from sm120tune.measure.model_call import CallLoad, cold_share, rest_us
from sm120tune.measure.occupancy import recorded_facts
from sm120tune.quantization import Quantization
from sm120tune.tiles import Tile

Array = npt.NDArray[np.float64]

CLAMPED = ((2816, 704, 8, 128), (4096, 14336, 2, 8), (6144, 16384, 2, 8))
"""hidden, inter, topk, experts."""
_SAMPLES = 5
_HOLDING = 0.5
"""Of an activation's bytes, what counts beside the weights for the L2: each is used within the call and then dead."""
_ROWS = (16, 32, 64, 128)
SMALL, LARGE = Tile(16, 32, 64, 1), Tile(64, 64, 32, 8)
FP8_BLOCK = Tile(64, 128, 128, 32)
_STORED = {True: Quantization("fp8_w8a8", (128, 128)), False: Quantization()}


@dataclass(frozen=True)
class Field:
    """Rows of the table, one element each."""

    us: Array
    m: Array
    hidden: Array
    intermediate: Array
    topk: Array
    experts: Array
    ep: Array
    fp8: Array
    skewed: Array
    model: Array
    tokens: Array
    rows: Array
    rows_elsewhere: Array
    touched: Array
    touched_by_five: Array
    """Experts that any of a timing's five routings touches."""
    blocks: Array
    """Row blocks for each of ``_ROWS``: ``[rows, 4]``."""

    def __getitem__(self, chosen: npt.NDArray[Any]) -> Field:
        return replace(self, **{field.name: getattr(self, field.name)[chosen] for field in fields(self)})

    @property
    def tuned(self) -> Array:
        """Where a tuned file shipped for an RTX PRO 6000."""
        return np.asarray((self.fp8 == 0) & (self.experts == 256) & (self.intermediate == 512))

    def default_tiles(self) -> list[Tile]:
        """Return SGLang's built-in default for each row."""
        return [
            FP8_BLOCK if fp8 else SMALL if tokens <= experts else LARGE
            for fp8, tokens, experts in zip(self.fp8, self.tokens, self.experts, strict=True)
        ]

    def call_us(self, tiles: tuple[TileArrays, TileArrays], card: DeviceSpec, c: Constants) -> Array:
        """Return the model's time of the whole call with these tiles for gate_up and down."""
        element = np.where(self.fp8 > 0, 1.0, 2.0)
        weights = 3 * self.touched_by_five * self.intermediate * self.hidden * element
        between = 2 * (self.tokens * self.hidden + self.rows * (3 * self.intermediate + self.hidden))
        cold = cold_share(weights + _HOLDING * between, card.l2_bytes, c)
        total = np.zeros(len(self.us))
        empty = np.zeros(len(self.us))
        for up, tile in zip((True, False), tiles, strict=True):
            n = 2 * self.intermediate if up else self.hidden
            load = Load(
                n=n,
                k=self.hidden if up else self.intermediate,
                rows=self.rows,
                touched=self.touched,
                rows_of_a=np.minimum(self.tokens, self.rows) if up else self.rows,
                rows_of_c=self.rows + self.rows_elsewhere,
                row_blocks=self.blocks[np.arange(len(self.us)), np.searchsorted(_ROWS, tile.block_m)],
                weight_bytes=element,
                activation_bytes=element,
                fp8=self.fp8,
                block_scaled=self.fp8,
                cold=cold,
            )
            total += terms(load, tile, card, c).us
            empty += self.rows_elsewhere / tile.block_m * np.ceil(n / tile.block_n) / card.sm_count / tile.occupancy
        rest = CallLoad(
            self.tokens, self.rows, self.rows_elsewhere, self.hidden, self.intermediate, self.topk, self.fp8, empty
        )
        return total + rest_us(rest, card, card.l2_bytes, c)


def field_tiles(tiles: list[Tile], card: DeviceSpec) -> TileArrays:
    """Return tiles with the facts that were recorded for them."""
    facts = {tile: recorded_facts(tile, card.arch, _STORED[tile == FP8_BLOCK]) for tile in set(tiles)}
    missing = [tile for tile, fact in facts.items() if fact is None]
    if missing:
        raise KeyError(f"no facts of {missing}")
    # Reading a property a row would take seconds; there are few different tiles.
    order = list(facts)
    few = tile_arrays(order, [fact for fact in facts.values() if fact is not None], card)
    index = np.array([order.index(tile) for tile in tiles])
    return TileArrays(**{field.name: getattr(few, field.name)[index] for field in fields(few)})


def read_field(path: Path) -> Field:
    """Read the rows that ran with block-wise fp8 or bf16."""
    table = pyarrow.parquet.read_table(path).to_pydict()
    columns = {name: np.array(values) for name, values in table.items()}
    intermediate = columns["inter_size"] / columns["moe_tp_size"]
    fp8 = columns["moe_dtype"] == "fp8_block"
    aligned = (intermediate % 128 == 0) & (columns["hidden_size"] % 128 == 0)
    keep = (fp8 & aligned) | (columns["moe_dtype"] == "bfloat16")
    shapes = list(
        zip(
            *(columns[name][keep].tolist() for name in ("hidden_size", "inter_size", "topk", "num_experts")),
            strict=True,
        )
    )
    loads = np.array(
        [
            _load(m, experts, topk, ep, how, clamped=ep > 1 and (hidden, inter, topk, experts) in CLAMPED)
            for (hidden, inter, topk, experts), m, ep, how in zip(
                shapes,
                columns["num_tokens"][keep].tolist(),
                columns["moe_ep_size"][keep].tolist(),
                columns["distribution"][keep].tolist(),
                strict=True,
            )
        ]
    )
    return Field(
        us=columns["latency_ms"][keep] * 1e3,
        m=columns["num_tokens"][keep].astype(float),
        hidden=columns["hidden_size"][keep].astype(float),
        intermediate=intermediate[keep],
        topk=columns["topk"][keep].astype(float),
        experts=(columns["num_experts"] / columns["moe_ep_size"])[keep],
        ep=columns["moe_ep_size"][keep].astype(float),
        fp8=fp8[keep].astype(float),
        skewed=columns["distribution"][keep] != "balanced",
        model=np.array(["-".join(map(str, shape)) for shape in shapes]),
        tokens=loads[:, 0],
        rows=loads[:, 1],
        rows_elsewhere=loads[:, 2],
        touched=loads[:, 3],
        touched_by_five=loads[:, 4],
        blocks=loads[:, 5:],
    )


@functools.cache
def _load(m: int, experts: int, topk: int, ep: int, how: str, clamped: bool) -> tuple[float, ...]:
    """Return tokens, rows here and elsewhere, experts touched by one and by five routings, row blocks: averages."""
    found, touched = [], np.zeros(experts // ep, dtype=bool)
    for sample in range(1 if how == "balanced" else _SAMPLES):
        rng = np.random.default_rng([sample, m, experts, topk, ep])
        ids = (
            _balanced(m, experts, topk) if how == "balanced" else _power_law(m, experts, topk, ep, float(how[10:]), rng)
        )
        local = ids < experts // ep
        if clamped:
            ids = np.where(local, ids, 0)[local.any(axis=1)]
            local = np.ones_like(ids, dtype=bool)
        counts = np.bincount(ids[local], minlength=experts // ep)
        if ep == 1:
            counts = _spread(counts, m)
        blocks = [np.ceil(counts / rows).sum() for rows in _ROWS]
        touched |= counts > 0
        found.append((len(ids), counts.sum(), ids.size - local.sum(), np.count_nonzero(counts), *blocks))
    *first, here = np.mean(found, axis=0)[:4]
    return (*first, here, float(touched.sum()), *np.mean(found, axis=0)[4:])


def _spread(counts: npt.NDArray[Any], m: int) -> npt.NDArray[Any]:
    """Give what an expert has beyond one choice a token to the others: the router draws distinct experts."""
    beyond = int(np.maximum(0, counts - m).sum())
    if not beyond:
        return counts
    counts = np.minimum(counts, m)
    room = m - counts
    return counts + np.minimum(room, -(-beyond // max(1, np.count_nonzero(room))))


def _balanced(m: int, experts: int, topk: int) -> npt.NDArray[np.int64]:
    """Return the choices of the collector's ``balanced_logits``: ``[M, topk]``."""
    stride = -(-experts // topk)
    token, choice = np.arange(m)[:, None], np.arange(topk)[None] * stride
    first = token if m >= stride else token * stride / m
    return np.asarray(np.floor(first + choice).astype(np.int64) % experts)


def _power_law(
    m: int, experts: int, topk: int, ep: int, alpha: float, rng: np.random.Generator
) -> npt.NDArray[np.int64]:
    """Return choices whose counts an inverse power law draws between 1 and 0.8 M (0.01 and 2 for few tokens)."""
    low, high = (1.0, 0.8 * m) if m * topk > experts else (0.01, 2.0)
    power = 1 - alpha
    drawn = ((high**power - low**power) * rng.random(experts) + low**power) ** (1 / power)
    shares = drawn / drawn.sum() * m * topk
    counts = np.floor(shares).astype(np.int64)
    counts[np.argsort(counts - shares, kind="stable")[: m * topk - counts.sum()]] += 1
    groups = counts.reshape(ep, -1)
    busiest = groups.sum(axis=1).argmax()
    groups[[0, busiest]] = groups[[busiest, 0]]
    counts = groups.reshape(-1)
    order = np.argsort(-counts, kind="stable")
    return np.repeat(order, counts[order]).reshape(topk, m).T
