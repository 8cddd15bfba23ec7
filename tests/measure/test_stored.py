from __future__ import annotations

import itertools
import math

import pytest
import torch

from sm120tune.measure.memory import activation_bytes, expert_bytes, weight_bytes
from sm120tune.measure.routing import UNIFORM
from sm120tune.measure.stored import (
    Activations,
    Weights,
    compute_dtype,
    empty_activations,
    operand_dtype,
    quantize_rows,
    quantize_static,
    random_weights,
    static_scale,
)
from sm120tune.measure.workload import Workload
from sm120tune.problem import Gemm, MoEProblem
from sm120tune.quantization import Granularity, Quantization

CPU = torch.device("cpu")

STORAGES = {
    "bf16": Quantization("bf16"),
    "fp16": Quantization("fp16"),
    "fp8, one scale": Quantization("fp8_w8a8"),
    "fp8 channels": Quantization("fp8_w8a8", per_channel_quant=True),
    "fp8 blocks": Quantization("fp8_w8a8", (16, 32)),
    "fp8 wide blocks": Quantization("fp8_w8a8", (64, 32)),
    "int8 channels": Quantization("int8_w8a8", per_channel_quant=True),
    "int8 blocks": Quantization("int8_w8a8", (32, 64)),
    "int8 weights": Quantization("int8_w8a16"),
    "int8 groups": Quantization("int8_w8a16", (0, 32)),
    "int8 groups, zero points": Quantization("int8_w8a16", (0, 64), zero_points=True),
    "int4 groups": Quantization("int4_w4a16", (0, 32)),
    "int4 groups, zero points": Quantization("int4_w4a16", (0, 64), zero_points=True),
}
each_storage = pytest.mark.parametrize("stored", STORAGES.values(), ids=STORAGES)
each_quantizer = pytest.mark.parametrize(
    "stored",
    [stored for stored in STORAGES.values() if stored.operand_bytes == 1],
    ids=[name for name, stored in STORAGES.items() if stored.operand_bytes == 1],
)


def weights_of(stored: Quantization, experts: int = 2, n: int = 96, k: int = 128, seed: int = 3) -> Weights:
    return random_weights(stored, experts, n, k, torch.Generator().manual_seed(seed))


# Activations


def rows_of(m: int = 20, k: int = 128) -> torch.Tensor:
    x = torch.randn(m, k, generator=torch.Generator().manual_seed(5))
    # Rows and columns of very different sizes: one scale too far off shows.
    x *= torch.logspace(-2, 0.3, m)[:, None]
    x[:, ::32] *= 3
    return x.bfloat16()


@each_quantizer
def test_quantized_rows_are_within_a_step_of_the_rows(stored: Quantization) -> None:
    x = rows_of().clamp(-15, 15)
    made = quantize_rows(x, stored)
    assert made.codes.dtype is operand_dtype(stored)
    assert made.scales is not None
    error = (made.values() - x.float()).abs()
    one = made.scales if made.scales.dim() == 1 else made.scales.repeat_interleave(128 // made.scales.shape[1], dim=1)
    if stored.dtype == "int8_w8a8":
        # Cut off, not rounded: up to one step, and nothing grows.
        assert bool((error <= 1.001 * one).all())
        assert bool((made.values().abs() <= 1.001 * x.float().abs()).all())
    else:
        # Half a unit in the last of 4 significant bits; below 2 ** -6 codes are 2 ** -9 apart.
        assert bool((error <= torch.maximum(x.float().abs() / 16, one * 2**-10) * 1.001).all())
    assert float(error.square().sum().sqrt()) < 0.04 * float(x.float().square().sum().sqrt())


@each_quantizer
def test_every_group_uses_the_whole_range(stored: Quantization) -> None:
    made = quantize_rows(rows_of(), stored)
    assert made.scales is not None
    if stored.granularity is Granularity.TENSOR:
        assert made.scales.shape == (1,)
        return
    group = stored.block_shape[1] if stored.block_shape else 128
    assert made.scales.shape == (20, 128 // group)
    largest = made.codes.float().abs().unflatten(1, (-1, group)).amax(dim=2)
    top = 448 if stored.dtype == "fp8_w8a8" else 127
    # int8 may be cut off at 126 where the division came out a hair too small.
    assert bool((largest >= top - (0 if top == 448 else 1)).all())


def test_scales_of_rows_by_hand() -> None:
    x = torch.zeros(2, 64, dtype=torch.bfloat16)
    x[0, 3], x[0, 40], x[1, 63] = 12.7, -25.4, 127
    made = quantize_rows(x, Quantization("int8_w8a8", (32, 32)))
    assert made.scales is not None
    twelve, twenty_five = (float(torch.tensor(number).bfloat16()) for number in (12.7, 25.4))
    expected = torch.tensor([[twelve / 127, twenty_five / 127], [1e-10 / 127, 1.0]])
    torch.testing.assert_close(made.scales, expected)
    assert made.codes[1].tolist() == [0] * 63 + [127]
    assert int(made.codes[0, 3]) in (126, 127)
    assert int(made.codes[0, 40]) in (-127, -126)


def test_int8_is_cut_off_and_fp8_rounded() -> None:
    # The first number makes the scale 1 resp. 1/448 of it.
    x = torch.tensor([[127.0, 1.9, -1.9, 0.99] + [0.0] * 12])
    assert quantize_rows(x, STORAGES["int8 channels"]).codes[0, :4].tolist() == [127, 1, -1, 0]
    x = torch.tensor([[448.0, 17.2, -17.2, 18.9] + [0.0] * 12])
    # Between 16 and 32 fp8 has every second whole number.
    assert quantize_rows(x, STORAGES["fp8 channels"]).codes[0, :4].tolist() == [448.0, 18.0, -18.0, 18.0]


def test_rows_without_quantization_are_given_back() -> None:
    for name in ("bf16", "int8 weights", "int4 groups"):
        x = rows_of()
        made = quantize_rows(x, STORAGES[name])
        assert made.codes is x
        assert made.scales is None
        assert torch.equal(made.values(), x.float())


def test_one_static_scale_clamps_what_is_beyond_it() -> None:
    stored = STORAGES["fp8, one scale"]
    x = torch.tensor([[0.5, -16.0, 40.0, -1000.0]]).bfloat16()
    made = quantize_rows(x, stored)
    torch.testing.assert_close(made.values(), torch.tensor([[0.5, -16.0, 16.0, -16.0]]))
    # The same into given room.
    codes, scale = torch.empty(1, 4, dtype=torch.float8_e4m3fn), static_scale(stored, CPU)
    given = quantize_static(x, torch.empty_like(x), codes, scale, stored)
    assert given.codes is codes
    assert torch.equal(codes.float(), made.codes.float())


@each_quantizer
def test_first_rows_and_empty_room(stored: Quantization) -> None:
    made = quantize_rows(rows_of(), stored)
    assert torch.equal(made.first(7).values(), made.values()[:7])
    room = empty_activations(20, 128, stored, CPU)
    assert room.codes.shape == made.codes.shape
    assert room.codes.dtype is made.codes.dtype
    assert room.scales is not None
    assert made.scales is not None
    assert room.scales.shape == made.scales.shape
    assert room.scales.dtype is made.scales.dtype is torch.float32
    assert bool((room.values() == 0).all())


def test_values_repeat_each_scale_over_its_group() -> None:
    codes = torch.ones(2, 4, dtype=torch.int8)
    values = Activations(codes, torch.tensor([[1.0, 2.0], [3.0, 4.0]])).values()
    assert values.tolist() == [[1, 1, 2, 2], [3, 3, 4, 4]]


@each_quantizer
def test_codes_as_sglangs_own_call_makes_them(stored: Quantization) -> None:
    x = rows_of(64).bfloat16()
    chain, call = quantize_rows(x, stored), quantize_rows(x, stored, as_call=True)
    exact = x.double() / Activations(torch.ones_like(x), call.scales).values().double()
    if stored.granularity is Granularity.TENSOR:
        # Rounded once, from fp32; the chain rounds the scaled numbers to bf16 before.
        assert torch.equal(call.codes.float(), exact.float().clamp(-448, 448).to(torch.float8_e4m3fn).float())
    elif stored == STORAGES["int8 channels"]:
        assert float((call.codes - exact).abs().max()) < 0.501
        assert float((chain.codes - exact).abs().max()) > 0.9
    else:
        assert torch.equal(call.codes.float(), chain.codes.float())
        return
    assert float((call.codes.float() != chain.codes.float()).float().mean()) > 0.01


# Weights


def one_value(weights: Weights, expert: int, row: int, column: int) -> float:
    """Return one weight, read as SGLang's kernels index it."""
    stored = weights.stored
    bits = stored.weight_bits
    if bits == 4:
        byte = int(weights.codes[expert, row, column // 2])
        code = float(byte >> 4 * (column % 2) & 0xF)
    else:
        code = float(weights.codes[expert, row, column])
    if weights.scales is None:
        return code
    block_n, block_k = stored.block_shape or (0, 0)
    match stored.granularity:
        case Granularity.TENSOR:
            return code * float(weights.scales[expert])
        case Granularity.CHANNEL:
            return code * float(weights.scales[expert, row, 0])
        case Granularity.BLOCK:
            return code * float(weights.scales[expert, row // block_n, column // block_k])
    group = column // block_k
    zero = {4: 8, 8: 128}[bits]
    if weights.zeros is not None and bits == 4:
        zero = int(weights.zeros[expert, row // 2, group]) >> 4 * (row % 2) & 0xF
    elif weights.zeros is not None:
        zero = int(weights.zeros[expert, row, group])
    return float(torch.tensor((code - zero) * float(weights.scales[expert, row, group])).bfloat16())


@each_storage
def test_an_expert_is_its_codes_scales_and_zero_points(stored: Quantization) -> None:
    weights = weights_of(stored, n=32)
    for index in range(2):
        expert = weights.expert(index)
        assert expert.shape == (32, 128)
        assert expert.dtype is torch.float32
        for row, column in itertools.product((0, 1, 15, 16, 31), (0, 1, 31, 32, 63, 64, 127)):
            assert float(expert[row, column]) == pytest.approx(one_value(weights, index, row, column), rel=1e-6)


def test_four_bits_by_hand() -> None:
    stored = Quantization("int4_w4a16", (0, 32))
    codes = torch.zeros(1, 2, 16, dtype=torch.uint8)
    codes[0, 0, 0], codes[0, 1, 15] = 0xF1, 0x08
    scales = torch.tensor([[[0.5], [2.0]]]).bfloat16()
    expert = Weights(stored, codes, scales).expert(0)
    # The low half of a byte comes first, and 8 stands for nothing.
    assert expert[0, :3].tolist() == [-3.5, 3.5, -4.0]
    assert expert[1, 29:].tolist() == [-16.0, 0.0, -16.0]
    # Two rows share a byte of zero points: the low half is the even row's.
    expert = Weights(stored, codes, scales, torch.tensor([[[0x5F]]], dtype=torch.uint8)).expert(0)
    assert expert[0, :3].tolist() == [-7.0, 0.0, -7.5]
    assert expert[1, 29:].tolist() == [-10.0, 6.0, -10.0]


def test_bytes_with_zero_points_by_hand() -> None:
    stored = Quantization("int8_w8a16", (0, 32))
    codes = torch.full((1, 1, 64), 130, dtype=torch.uint8)
    scales = torch.tensor([[[0.5, 2.0]]]).bfloat16()
    assert Weights(stored, codes, scales).expert(0)[0, [0, 31, 32, 63]].tolist() == [1, 1, 4, 4]
    zeros = torch.tensor([[[131, 120]]], dtype=torch.uint8)
    assert Weights(stored, codes, scales, zeros).expert(0)[0, [0, 31, 32, 63]].tolist() == [-0.5, -0.5, 20, 20]


@each_storage
def test_shapes_and_dtypes_of_random_weights(stored: Quantization) -> None:
    weights = weights_of(stored, experts=3, n=80, k=192)
    wide = {
        "bf16": torch.bfloat16, "fp16": torch.float16, "fp8_w8a8": torch.float8_e4m3fn, "int8_w8a8": torch.int8,
        "int8_w8a16": torch.int8,
    }  # fmt: skip
    grouped = stored.granularity is Granularity.GROUP
    assert weights.codes.shape == (3, 80, 96 if stored.weight_bits == 4 else 192)
    assert weights.codes.dtype is (torch.uint8 if grouped else wide[stored.dtype])
    assert (weights.scales is None) == (not stored.quantized)
    if weights.scales is not None:
        block_n, block_k = stored.block_shape or (1, 1)
        shape = {
            Granularity.TENSOR: (3,),
            Granularity.CHANNEL: (3, 80, 1),
            Granularity.BLOCK: (3, math.ceil(80 / max(block_n, 1)), 192 // block_k),
            Granularity.GROUP: (3, 80, 192 // block_k),
        }[stored.granularity]
        assert weights.scales.shape == shape
        assert weights.scales.dtype is (compute_dtype(stored) if grouped else torch.float32)
        assert len(weights.scales.unique()) > min(weights.scales.numel(), 100) * 0.7
    assert (weights.zeros is None) == (not stored.zero_points)
    if weights.zeros is not None:
        assert weights.zeros.shape == (3, 80 * stored.weight_bits // 8, 192 // (stored.block_shape or (0, 1))[1])
        assert weights.zeros.dtype is torch.uint8


@each_storage
@pytest.mark.parametrize("k", [64, 1024])
def test_random_values_have_a_spread_of_one_over_the_root_of_k(stored: Quantization, k: int) -> None:
    weights = weights_of(stored, experts=8, n=128, k=k)
    values = torch.stack([weights.expert(index) for index in range(8)])
    spread = float(values.square().mean().sqrt()) * math.sqrt(k)
    assert 0.6 < spread < 1.7
    # Little of it is one-sided.
    assert abs(float(values.mean())) * math.sqrt(k) < 0.25


def test_random_scales_differ_by_up_to_four_times() -> None:
    scales = weights_of(STORAGES["fp8 channels"], n=512).scales
    assert scales is not None
    assert 3.5 < float(scales.max() / scales.min()) <= 4.0


# Memory

LAYERS = {
    name: MoEProblem(
        3, 64, 128, 2, 3, stored.dtype, 0, stored.block_shape, stored.per_channel_quant, stored.zero_points
    )
    for name, stored in STORAGES.items()
}


def nbytes(*tensors: torch.Tensor | None) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor is not None)


@pytest.mark.parametrize("problem", LAYERS.values(), ids=LAYERS)
def test_weight_bytes_are_those_of_the_workloads_tensors(problem: MoEProblem) -> None:
    workload = Workload(problem, UNIFORM, max_m=9, copies=1, seed=3, device=CPU)
    call = workload.operands(9, 0, 18)
    for gemm, weights in zip(Gemm, (call.w1, call.w2), strict=True):
        taken = nbytes(weights.codes, weights.scales, weights.zeros)
        assert problem.experts * expert_bytes(problem, gemm) == taken
    assert weight_bytes(problem) == sum(nbytes(w.codes, w.scales, w.zeros) for w in (call.w1, call.w2))
    # The activations' scales, 4 bytes for each group, are left out.
    operands = (call.tokens, call.hidden.codes, call.down_in.codes)
    rooms = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in (*operands, call.gate_up_out, call.activated, call.down_out)
    }
    assert activation_bytes(problem, 9) == sum(rooms.values())


@pytest.mark.parametrize("problem", LAYERS.values(), ids=LAYERS)
def test_quantized_operands_of_a_workload(problem: MoEProblem) -> None:
    workload = Workload(problem, UNIFORM, max_m=9, copies=1, seed=3, device=CPU)
    stored = problem.quantization
    call = workload.operands(9, 0, 18)
    assert call.activated.dtype is call.gate_up_out.dtype is call.down_out.dtype is compute_dtype(stored)
    expected = quantize_rows(call.activated, stored)
    assert torch.equal(call.down_in.values(), expected.values())
    workload.fresh(9, 18, seed=4)
    assert bool(call.activated.isnan().all())
    workload.refill()
    assert bool(call.down_in.values().isfinite().all())
    assert torch.equal(call.down_in.values(), quantize_rows(call.activated, stored).values())
