from __future__ import annotations

from pathlib import Path

import pytest
from check_trees import CARD_FILE, check, errors, ladder, name, only, write

from sm120tune.check import Level
from sm120tune.check.names import parse_name
from sm120tune.devices import known_devices
from sm120tune.problem import MoEProblem
from sm120tune.upstream import find_sglang
from sm120tune.upstream.lookup import ConfigLookup, Target

MAX_Q = "NVIDIA_RTX_PRO_6000_Blackwell_Max-Q_Workstation_Edition"


@pytest.mark.parametrize("device", [spec.name for spec in known_devices()])
@pytest.mark.parametrize(
    ("dtype", "shape", "channel"),
    [("bf16", None, False), ("fp8_w8a8", (128, 128), False), ("fp8_w8a8", None, True), ("int4_w4a16", None, False)],
)
def test_what_sglang_asks_for_is_understood(
    sglang_0_5_23: Path, device: str, dtype: str, shape: tuple[int, int] | None, channel: bool
) -> None:
    layer = MoEProblem(257, 256, 6144, 8, 257, dtype=dtype, block_shape=shape, per_channel_quant=channel)
    lookup = ConfigLookup(find_sglang(sglang_0_5_23), Target(device, 101376, "3.8.0"))
    up, down = lookup.file_names(layer)
    parsed = parse_name(up)
    assert parsed is not None
    assert parsed.problem() == layer
    assert parsed.partner() == down
    assert parsed.corrected() == up
    other = parse_name(down)
    assert other is not None
    assert other.down
    assert other.partner() == up


def test_every_shipped_name_is_understood(sglang_0_5_23: Path) -> None:
    shipped = sorted(find_sglang(sglang_0_5_23).configs_dir.glob("triton_*/*.json"))
    assert len(shipped) > 300
    # SGLang 0.5.23 ships two files without a device, which no server can ask for.
    unknown = [path.name for path in shipped if parse_name(path.name) is None]
    assert [name for name in unknown if "device_name=," not in name] == []
    assert len(unknown) == 2


@pytest.mark.parametrize(
    ("rest", "code", "right"),
    [
        (",dtype=bf16", "dtype-plain", ""),
        (",dtype=float16", "dtype-plain", ""),
        (",dtype=fp8_w8a8,block_shape=[128,128]", "block-shape-blank", ",dtype=fp8_w8a8,block_shape=[128, 128]"),
        (",dtype=int4_w4a16,block_shape=[0, None]", "block-shape", ",dtype=int4_w4a16"),
        (",dtype=int4_w4a16,block_shape=[0, 128]", "block-shape", ",dtype=int4_w4a16"),
    ],
)
def test_row_8_wrong_selectors(tmp_path: Path, rest: str, code: str, right: str) -> None:
    report = check(write(tmp_path, name(rest=rest), ladder()))
    finding = only(report.findings, code)
    assert finding.level is Level.ERROR
    assert finding.fix == f"rename it to {name(rest=right)}"
    assert errors(report) == {code}


def test_row_8_block_shape_without_dtype(tmp_path: Path) -> None:
    report = check(write(tmp_path, name(rest=",block_shape=[128, 128]"), ladder()))
    assert errors(report) == {"block-shape-dtype"}


def test_an_unknown_dtype_is_an_error(tmp_path: Path) -> None:
    report = check(write(tmp_path, name(rest=",dtype=fp4_w4a4"), ladder()))
    assert errors(report) == {"dtype-unknown"}


@pytest.mark.parametrize("device", ["NVIDIA GB10", "nvidia_gb10", "NVIDIA RTX PRO 6000 Blackwell_Server_Edition"])
def test_row_9_device_spelled_otherwise(tmp_path: Path, device: str) -> None:
    report = check(write(tmp_path, name(device=device), ladder()))
    assert errors(report) == {"device-spelling"}
    right = "NVIDIA_GB10" if "10" in device and "6000" not in device else CARD_FILE
    assert only(report.findings, "device-spelling").fix == f"rename it to {name(device=right)}"


def test_row_9_device_without_its_edition(tmp_path: Path) -> None:
    report = check(write(tmp_path, name(device="NVIDIA_RTX_PRO_6000_Blackwell"), ladder()))
    finding = only(report.findings, "device-unknown")
    assert finding.level is Level.WARNING
    assert CARD_FILE in finding.fix
    assert errors(report) == set()


@pytest.mark.parametrize("file", ["E=0,N=256,device_name=NVIDIA_GB10.json", "E=8,N=256,device_name=.json"])
def test_a_name_that_nobody_asks_for_is_an_error(tmp_path: Path, file: str) -> None:
    assert errors(check(write(tmp_path, file, ladder()))) == {"name"}


def test_selectors_in_another_order_are_an_error(tmp_path: Path) -> None:
    file = name(rest=",per_channel_quant=True,dtype=fp8_w8a8")
    assert errors(check(write(tmp_path, file, ladder()))) == {"name"}
