from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from sm120tune.devices import (
    DEFAULT_DEVICE_NAME,
    find_device,
    known_device,
    known_devices,
    load_device_spec,
)
from sm120tune.errors import UserError

NAMES = [spec.name for spec in known_devices()]


def test_the_cards_that_people_use_are_known() -> None:
    assert set(NAMES) == {
        "NVIDIA RTX PRO 6000 Blackwell Server Edition",
        "NVIDIA RTX PRO 6000 Blackwell Workstation Edition",
        "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition",
        "NVIDIA RTX PRO 5000 72GB Blackwell",
        "NVIDIA GeForce RTX 5090",
        "NVIDIA GeForce RTX 5080",
        "NVIDIA GB10",
        "NVIDIA H100 80GB HBM3",
        "NVIDIA H200",
    }
    assert DEFAULT_DEVICE_NAME in NAMES
    assert len(NAMES) == len(set(NAMES))


@pytest.mark.parametrize("name", NAMES)
def test_limits_follow_the_compute_capability(name: str) -> None:
    spec = find_device(name)
    limits = (spec.shared_memory_per_block, spec.shared_memory_per_sm, spec.registers_per_sm, spec.max_warps_per_sm)
    assert limits == {12: (101376, 102400, 65536, 48), 9: (232448, 233472, 65536, 64)}[spec.capability[0]]
    # A bandwidth and a peak in the wrong unit would be off by a thousand.
    assert 2e11 < spec.bandwidth < 1e13
    assert 5e13 < spec.bf16_flops < 2e15
    assert 16 * 2**30 <= spec.memory_bytes < 256 * 2**30
    assert spec.source.startswith("spec: ")


def test_figures_of_the_default_card() -> None:
    spec = find_device(DEFAULT_DEVICE_NAME)
    assert (spec.arch, spec.sm_count, spec.l2_bytes, spec.bandwidth) == (120, 188, 128 * 2**20, 1.792e12)
    assert spec.file_name == "NVIDIA_RTX_PRO_6000_Blackwell_Server_Edition"


def test_gb10_is_sm121() -> None:
    assert find_device("NVIDIA GB10").arch == 121


@pytest.mark.parametrize(
    ("name", "boost_hz", "flop_per_clock"),
    [
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 2.430e9, 1024),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 2.617e9, 1024),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", 2.280e9, 1024),
        ("NVIDIA GeForce RTX 5090", 2.407e9, 512),
        ("NVIDIA GeForce RTX 5080", 2.617e9, 512),
        ("NVIDIA H200", 1.830e9, 4096),
    ],
)
def test_geforce_runs_fp32_accumulation_at_half_rate(name: str, boost_hz: float, flop_per_clock: int) -> None:
    spec = find_device(name)
    assert spec.bf16_flops / (spec.sm_count * boost_hz) == pytest.approx(flop_per_clock, rel=2e-3)


@pytest.mark.parametrize("name", NAMES)
def test_blanks_underscores_and_case_are_the_same(name: str) -> None:
    spec = find_device(name)
    assert find_device(spec.file_name) is spec
    assert find_device(name.lower()) is spec
    assert known_device(f" {name.upper()} ") is spec


@pytest.mark.parametrize(
    ("typed", "offered", "not_offered"),
    [
        ("RTX_5090", "NVIDIA GeForce RTX 5090", "NVIDIA H200"),
        ("NVIDIA RTX PRO 6000 Blackwell Sever Edition", "NVIDIA RTX PRO 6000 Blackwell Server Edition", "GB10"),
        ("nothing like it", "NVIDIA GB10", None),
        ("", "NVIDIA GB10", None),
    ],
)
def test_an_unknown_name_lists_near_ones(typed: str, offered: str, not_offered: str | None) -> None:
    with pytest.raises(UserError) as caught:
        find_device(typed)
    message = str(caught.value)
    assert repr(typed) in message
    assert offered in message
    assert not_offered is None or not_offered not in message
    assert "--device-spec FILE" in message
    assert "\n" not in message
    assert known_device(typed) is None


def spec_json(**changes: Any) -> dict[str, Any]:
    data = json.loads(json.dumps(dataclasses.asdict(find_device("NVIDIA GB10"))))
    return {**data, **changes}


def test_a_spec_file_has_the_fields_of_the_dataclass(tmp_path: Path) -> None:
    path = tmp_path / "card.json"
    path.write_text(json.dumps(spec_json(name="NVIDIA RTX 9999", sm_count=7, bandwidth=10**12)))
    expected = dataclasses.replace(find_device("NVIDIA GB10"), name="NVIDIA RTX 9999", sm_count=7, bandwidth=1e12)
    assert load_device_spec(path) == expected
    assert load_device_spec(str(path)).capability == (12, 1)


@pytest.mark.parametrize("name", NAMES)
def test_every_known_card_may_be_described_by_a_file(tmp_path: Path, name: str) -> None:
    path = tmp_path / "card.json"
    path.write_text(json.dumps(dataclasses.asdict(find_device(name))))
    assert load_device_spec(path) == find_device(name)


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (10, 3), (11, 0)])
def test_cards_that_are_not_known_may_be_described(tmp_path: Path, capability: tuple[int, int]) -> None:
    path = tmp_path / "card.json"
    path.write_text(json.dumps(spec_json(name="N" * 100, capability=capability, max_warps_per_sm=8, sm_count=1)))
    assert load_device_spec(path).capability == capability


def test_registers_may_be_left_out(tmp_path: Path) -> None:
    data = spec_json()
    del data["registers_per_sm"]
    path = tmp_path / "card.json"
    path.write_text(json.dumps(data))
    assert load_device_spec(path).registers_per_sm == 65536


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("{", "card.json"),
        ("[]", "not a JSON object"),
        ("[" * 100_000, "nested too deeply"),
        ("\xff", "card.json"),
        (json.dumps(spec_json(l3_bytes=1)), "l3_bytes is not a known field"),
        (json.dumps(spec_json(sm_count="48")), "sm_count must be an integer from 1 to 1,024, not '48'"),
        (json.dumps(spec_json(sm_count=True)), "sm_count"),
        (json.dumps(spec_json(sm_count=0)), "sm_count"),
        (json.dumps(spec_json(l2_bytes=1.5)), "l2_bytes"),
        (json.dumps(spec_json(sm_count=1025)), "sm_count must be an integer from 1 to 1,024, not 1025"),
        (json.dumps(spec_json(max_warps_per_sm=4)), "max_warps_per_sm must be an integer from 8 to 128, not 4"),
        (json.dumps(spec_json(shared_memory_per_block=99)), "shared_memory_per_block must be an integer from 8,192"),
        (json.dumps(spec_json(shared_memory_per_block=102401)), "102401 is more than shared_memory_per_sm 102400"),
        (json.dumps(spec_json(registers_per_sm=0)), "registers_per_sm must be an integer from 4,096"),
        (json.dumps(spec_json(l2_bytes=24)), "l2_bytes must be an integer from 65,536"),
        (json.dumps(spec_json(memory_bytes=128)), "memory_bytes must be an integer from 268,435,456"),
        (json.dumps(spec_json(memory_bytes=10**400)), "memory_bytes must be an integer from 268,435,456"),
        (json.dumps(spec_json(bandwidth=0)), "bandwidth must be from 1e+10 to 1e+14, not 0"),
        (json.dumps(spec_json(bandwidth=10**400)), "bandwidth must be a finite number, not 1000000"),
        (
            json.dumps(spec_json(bandwidth=1792)),
            "not 1792: it is in bytes a second, for example 1.792e12 and not 1792",
        ),
        (json.dumps(spec_json(bandwidth=273e15)), "bandwidth must be from"),
        (json.dumps(spec_json(bf16_flops=467.8)), "not 467.8: it is in FLOP a second, for example 467.8e12"),
        (json.dumps(spec_json(bf16_flops=1e18)), "bf16_flops must be from 1e+12 to 1e+17, not 1e+18"),
        (json.dumps(spec_json(bandwidth=None)), "bandwidth"),
        (json.dumps(spec_json(bf16_flops=float("nan"))), "NaN"),
        (json.dumps(spec_json(bf16_flops=1e308)).replace("1e+308", "1e999"), "bf16_flops"),
        (json.dumps(spec_json(capability=[12])), "capability must be two integers"),
        (json.dumps(spec_json(capability="12.0")), "capability"),
        (json.dumps(spec_json(capability=[12, 10**30])), "capability must be two integers"),
        (json.dumps(spec_json(capability=[7, 5])), "capability must be one of 8.0, 8.6, 8.7, 8.9, 9.0, 10.0, 10.3"),
        (json.dumps(spec_json(capability=[12, 7])), "12.0, 12.1, not 12.7"),
        (json.dumps(spec_json(name=" ")), "name"),
        (json.dumps(spec_json(name="../x")), "name"),
        (json.dumps(spec_json(name="NVIDIA\nX")), "name must be a device name as torch reports it"),
        (json.dumps(spec_json(name="NVIDIA Größe")), "printable ASCII characters"),
        (json.dumps(spec_json(name="N" * 101)), "of at most 100"),
        (json.dumps(spec_json(source=1)), "source"),
        ('{"name": "a", "name": "b"}', "given twice"),
        *((json.dumps({k: v for k, v in spec_json().items() if k != field}), f"{field} is missing")
          for field in spec_json() if field != "registers_per_sm"),
    ],
)  # fmt: skip
def test_a_wrong_spec_file_names_the_field(tmp_path: Path, text: str, named: str) -> None:
    path = tmp_path / "card.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(UserError) as caught:
        load_device_spec(path)
    assert named in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_spec_file_that_cannot_be_read_is_a_user_error(tmp_path: Path) -> None:
    for path in (tmp_path / "none.json", tmp_path):
        with pytest.raises(UserError, match=str(path)):
            load_device_spec(path)
