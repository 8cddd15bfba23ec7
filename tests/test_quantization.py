from __future__ import annotations

import json
from typing import Any

import pytest
from wheels import VERSIONS, Trees

from sm120tune.errors import UserError
from sm120tune.problem import MoEProblem
from sm120tune.quantization import DTYPES, Granularity, Quantization
from sm120tune.upstream import find_sglang
from sm120tune.upstream.lookup import ConfigLookup, Target

STORAGES: dict[str, tuple[dict[str, Any], Granularity, str]] = {
    # What is given, what shares a scale, and what of it is in SGLang's file name.
    "bf16": ({"dtype": "bf16"}, Granularity.NONE, ""),
    "fp16": ({"dtype": "fp16"}, Granularity.NONE, ""),
    "fp8": ({"dtype": "fp8_w8a8"}, Granularity.TENSOR, ",dtype=fp8_w8a8"),
    "fp8 channels": (
        {"dtype": "fp8_w8a8", "per_channel_quant": True}, Granularity.CHANNEL, ",dtype=fp8_w8a8,per_channel_quant=True",
    ),
    "fp8 blocks": (
        {"dtype": "fp8_w8a8", "block_shape": (128, 128)}, Granularity.BLOCK, ",dtype=fp8_w8a8,block_shape=[128, 128]",
    ),
    "fp8 flat blocks": (
        {"dtype": "fp8_w8a8", "block_shape": (1, 128)}, Granularity.BLOCK, ",dtype=fp8_w8a8,block_shape=[1, 128]",
    ),
    "int8 channels": (
        {"dtype": "int8_w8a8", "per_channel_quant": True}, Granularity.CHANNEL,
        ",dtype=int8_w8a8,per_channel_quant=True",
    ),
    "int8 blocks": (
        {"dtype": "int8_w8a8", "block_shape": (128, 64)}, Granularity.BLOCK, ",dtype=int8_w8a8,block_shape=[128, 64]",
    ),
    # SGLang leaves a block with a 0 out of the name.
    "int8 weights": ({"dtype": "int8_w8a16"}, Granularity.CHANNEL, ",dtype=int8_w8a16"),
    "int8 groups": ({"dtype": "int8_w8a16", "block_shape": (0, 64)}, Granularity.GROUP, ",dtype=int8_w8a16"),
    "int4": ({"dtype": "int4_w4a16", "block_shape": (0, 128)}, Granularity.GROUP, ",dtype=int4_w4a16"),
    "int4 with zero points": (
        {"dtype": "int4_w4a16", "block_shape": (0, 32), "zero_points": True}, Granularity.GROUP, ",dtype=int4_w4a16",
    ),
}  # fmt: skip

LAYER = {"experts": 16, "tp": 2, "inter": 512, "hidden": 1024, "topk": 4}


def problem(**how: Any) -> MoEProblem:
    return MoEProblem.from_parallelism(**LAYER, **how)  # type: ignore[arg-type]


def test_every_dtype_has_a_storage_here() -> None:
    assert {how["dtype"] for how, _, _ in STORAGES.values()} == set(DTYPES)


REFUSED: dict[str, tuple[dict[str, Any], list[str]]] = {
    # What is given, and what the message must name.
    "an unknown dtype": ({"dtype": "int3"}, ["--dtype int3", "fp8_w8a8", "int4_w4a16"]),
    "no dtype": ({"dtype": ""}, ["--dtype"]),
    "blocks of bf16": ({"dtype": "bf16", "block_shape": (128, 128)}, ["--dtype bf16", "--block-shape"]),
    "groups of fp16": ({"dtype": "fp16", "block_shape": (0, 128)}, ["--dtype fp16", "--group-size"]),
    "channels of bf16": ({"dtype": "bf16", "per_channel_quant": True}, ["--dtype bf16"]),
    "zero points of bf16": ({"dtype": "bf16", "zero_points": True}, ["--dtype bf16"]),
    "a block that no step divides": (
        {"dtype": "fp8_w8a8", "block_shape": (128, 48)}, ["--block-shape 128,48", "32"],
    ),
    "a short block": ({"dtype": "int8_w8a8", "block_shape": (128, 16)}, ["--block-shape 128,16", "32"]),
    "an empty block": ({"dtype": "fp8_w8a8", "block_shape": (128, 0)}, ["--block-shape 128,0"]),
    "a negative block": ({"dtype": "fp8_w8a8", "block_shape": (-1, 128)}, ["--block-shape -1,128"]),
    "blocks and channels": (
        {"dtype": "fp8_w8a8", "block_shape": (128, 128), "per_channel_quant": True},
        ["--block-shape 128,128", "--per-channel"],
    ),
    "int4 blocks": (
        {"dtype": "int4_w4a16", "block_shape": (128, 128)}, ["--dtype int4_w4a16", "--block-shape 128,128", "--group-"],
    ),
    "int4 without groups": ({"dtype": "int4_w4a16"}, ["--dtype int4_w4a16", "--group-size"]),
    "int4 channels": (
        {"dtype": "int4_w4a16", "per_channel_quant": True}, ["--dtype int4_w4a16", "--per-channel"],
    ),
    "channels of weights alone": (
        {"dtype": "int8_w8a16", "per_channel_quant": True}, ["--dtype int8_w8a16", "--per-channel"],
    ),
    "fp8 groups": ({"dtype": "fp8_w8a8", "block_shape": (0, 128)}, ["--dtype fp8_w8a8", "--group-size 128"]),
    "int8 groups with activations": (
        {"dtype": "int8_w8a8", "block_shape": (0, 64)}, ["--dtype int8_w8a8", "--group-size 64", "--block-shape"],
    ),
    "int8 with one scale": ({"dtype": "int8_w8a8"}, ["--dtype int8_w8a8", "--per-channel", "--block-shape"]),
    "zero points of fp8": ({"dtype": "fp8_w8a8", "zero_points": True}, ["--zero-points", "--dtype fp8_w8a8"]),
    "zero points of blocks": (
        {"dtype": "int8_w8a8", "block_shape": (128, 128), "zero_points": True}, ["--zero-points", "--dtype int8_w8a8"],
    ),
    "zero points without groups": ({"dtype": "int8_w8a16", "zero_points": True}, ["--zero-points", "--group-size"]),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_sglang_does_not_have_is_refused_in_one_line(name: str) -> None:
    how, words = REFUSED[name]
    for make in (Quantization, problem):
        with pytest.raises(UserError) as caught:
            make(**how)
        message = str(caught.value)
        assert "\n" not in message
        for word in words:
            assert word in message


@pytest.mark.parametrize("name", STORAGES)
def test_what_shares_a_scale(name: str) -> None:
    how, granularity, _ = STORAGES[name]
    stored = Quantization(**how)
    assert stored.granularity is granularity
    assert stored.quantized == (granularity is not Granularity.NONE)
    weight, operand = {
        "bf16": (16, 2), "fp16": (16, 2), "fp8_w8a8": (8, 1), "int8_w8a8": (8, 1), "int8_w8a16": (8, 2),
        "int4_w4a16": (4, 2),
    }[how["dtype"]]  # fmt: skip
    assert (stored.weight_bits, stored.operand_bytes, stored.output_bytes) == (weight, operand, 2)
    assert stored.weight_only == (weight < 16 and operand == 2)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("bf16", 0),
        ("fp8", 4),
        ("fp8 channels", 4 * 192),
        ("fp8 blocks", 4 * 2 * 3),
        ("fp8 flat blocks", 4 * 192 * 3),
        ("int8 weights", 4 * 192),
        ("int8 groups", 2 * 192 * 6),
        ("int4", 2 * 192 * 3),
        # Half a byte for each of 192 x 12 zero points.
        ("int4 with zero points", 2 * 192 * 12 + 192 * 12 // 2),
    ],
)
def test_bytes_of_scales(name: str, expected: int) -> None:
    assert Quantization(**STORAGES[name][0]).scale_bytes(192, 384) == expected


def test_zero_points_of_bytes_take_a_byte_each() -> None:
    stored = Quantization("int8_w8a16", (0, 128), zero_points=True)
    assert stored.scale_bytes(192, 384) == 192 * 3 * (2 + 1)


@pytest.mark.parametrize("name", STORAGES)
def test_a_problem_survives_json(name: str) -> None:
    layer = problem(**STORAGES[name][0])
    data = json.loads(json.dumps(layer.to_json()))
    assert MoEProblem.from_json(data) == layer
    assert layer.quantization == Quantization(**STORAGES[name][0])
    # Files of before there were zero points say nothing of them.
    assert ("zero_points" in data) == layer.zero_points


def test_zero_points_make_another_problem() -> None:
    how = {"dtype": "int4_w4a16", "block_shape": (0, 128)}
    plain, zeros = problem(**how), problem(**how, zero_points=True)
    assert plain != zeros
    assert plain.to_json() != zeros.to_json()
    assert str(plain) != str(zeros)


@pytest.mark.parametrize("name", STORAGES)
def test_n_in_the_name_counts_bytes_of_int4(name: str) -> None:
    layer = problem(**STORAGES[name][0])
    assert layer.intermediate == 256
    assert layer.key_n == (128 if layer.dtype == "int4_w4a16" else 256)


@pytest.mark.parametrize("name", STORAGES)
@pytest.mark.parametrize("release", VERSIONS)
def test_the_file_is_the_one_that_every_release_asks_for(sglang_trees: Trees, release: str, name: str) -> None:
    how, _, selectors = STORAGES[name]
    layer = problem(**how)
    lookup = ConfigLookup(find_sglang(sglang_trees[release]), Target("NVIDIA GB10", 101376, "3.8.0"))
    start = f"E=16,N={128 if how['dtype'] == 'int4_w4a16' else 256},device_name=NVIDIA_GB10{selectors}"
    assert lookup.file_names(layer) == (f"{start}.json", f"{start}_down.json")
    # And there is a pair that it launches without such a file.
    for m in (1, 512):
        assert lookup.todays_pair(layer, m).pair is not None


@pytest.mark.parametrize(
    ("changes", "how", "words"),
    [
        ({"hidden": 1000}, {"dtype": "int4_w4a16", "block_shape": (0, 128)}, ["--hidden 1000", "128"]),
        ({"hidden": 1056}, {"dtype": "fp8_w8a8", "block_shape": (32, 64)}, ["--hidden 1056", "64"]),
        ({"inter": 96}, {"dtype": "int4_w4a16", "block_shape": (0, 32)}, ["--inter 96", "tp 2", "N=48", "32"]),
        ({"inter": 96, "tp": 1}, {"dtype": "int8_w8a16", "block_shape": (0, 64)}, ["--inter 96", "N=96", "64"]),
        ({"inter": 96, "tp": 1}, {"dtype": "fp8_w8a8", "block_shape": (32, 64)}, ["--inter 96", "N=96", "64"]),
        ({"inter": 192}, {"dtype": "fp8_w8a8", "block_shape": (128, 32)}, ["--inter 192", "N=96", "[128, 32]"]),
    ],
)
def test_ragged_groups_are_refused(changes: dict[str, int], how: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        MoEProblem.from_parallelism(**{**LAYER, **changes}, **how)
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


def test_groups_need_not_be_split_between_ranks_evenly_by_blocks_of_n() -> None:
    layer = MoEProblem.from_parallelism(
        **{**LAYER, "inter": 1088, "hidden": 192}, dtype="int4_w4a16", block_shape=(0, 32)
    )
    assert (layer.intermediate, layer.key_n) == (544, 272)
