from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from check_trees import CARD, CARD_FILE, DATA, TRITON, Copy, codes, errors, ladder, name, only, problem, row

from sm120tune.check import Level
from sm120tune.check.files import Context
from sm120tune.check.reach import nearest, reachable
from sm120tune.check.resources import Resources
from sm120tune.check.rules import rules_of
from sm120tune.check.server import Server, check_server
from sm120tune.devices import find_device
from sm120tune.problem import MoEProblem
from sm120tune.upstream.lookup import BUILT_IN, ConfigLookup, Target

DOWN = name(rest="_down")


def test_row_10_the_fallback_is_said_aloud(newest: Copy) -> None:
    report = newest.serve(problem())
    found = [finding for finding in report.findings if finding.code == "built-in-default"]
    assert [finding.file for finding in found] == [name(), DOWN]
    assert {finding.level for finding in found} == {Level.WARNING}
    assert errors(report) == set()
    assert report.server is not None
    assert report.server.asked == (name(), DOWN)
    assert report.server.sources == (BUILT_IN, BUILT_IN)
    # The default changes above E.
    assert [(span.first, span.last) for span in report.server.spans] == [(1, 32), (33, 16384)]
    assert {"deterministic", "nvfp4"} <= codes(report)


def test_an_exact_pair(newest: Copy) -> None:
    newest.write(name(), ladder())
    newest.write(DOWN, ladder())
    report = newest.serve(problem())
    assert codes(report, Level.ERROR, Level.WARNING) == set()
    assert [finding.file for finding in report.findings if finding.code == "exact"] == [
        f"triton_3_8_0/{name()}",
        f"triton_3_8_0/{DOWN}",
    ]


@pytest.mark.parametrize("seed", range(3))
def test_every_m_is_where_sglang_puts_it(newest: Copy, seed: int) -> None:
    rng = random.Random(seed)
    last = 400
    for file in (name(), DOWN):
        keys = rng.sample(range(1, last), 9)
        newest.write(file, {str(m): row(GROUP_SIZE_M=index + 1) for index, m in enumerate(keys)})
    report = newest.serve(problem(), last=last)
    assert report.server is not None
    spans = report.server.spans
    assert [span.first for span in spans] == [1, *(span.last + 1 for span in spans[:-1])]
    assert spans[-1].last == last
    lookup = ConfigLookup(newest.tree, Target(CARD, 101376, TRITON))
    for span in spans:
        for m in (span.first, (span.first + span.last) // 2, span.last):
            assert lookup.todays_pair(problem(), m).pair == span.pair


def test_reach_is_the_nearest_key_at_every_m() -> None:
    rng = random.Random(7)
    for _ in range(50):
        up, down = (rng.sample(range(1, 60), rng.randint(1, 8)) for _ in range(2))
        found = {m: reach for reach in reachable(up, down, 80) for m in range(reach.first, reach.last + 1)}
        assert sorted(found) == list(range(1, 81))
        for m, reach in found.items():
            assert (reach.up_key, reach.down_key) == (nearest(up, m), nearest(down, m))
    assert reachable([], [1], 80) == []


def test_row_11_another_tritons_folder(newest: Copy) -> None:
    newest.write(name(), ladder(), "3.6.0")
    newest.write(DOWN, ladder(), "3.6.0")
    report = newest.serve(problem())
    found = [finding for finding in report.findings if finding.code == "other-triton"]
    assert [(finding.level, finding.file) for finding in found] == [
        (Level.WARNING, f"triton_3_6_0/{name()}"),
        (Level.WARNING, f"triton_3_6_0/{DOWN}"),
    ]
    assert TRITON in found[0].what


def test_row_11_a_folder_name_that_makes_the_lookup_raise(newest: Copy) -> None:
    (newest.tree.configs_dir / "triton_3_7_0rc1").mkdir()
    assert errors(newest.serve(problem())) == {"folder-version", "lookup-fails"}
    # An exact file is found before the names are parsed.
    newest.write(name(), ladder())
    newest.write(DOWN, ladder())
    assert errors(newest.serve(problem())) == {"folder-version"}


def test_row_23_a_vendor_key_ends_the_server(newest: Copy) -> None:
    newest.write(name(), {"triton_version": "3.8.0", **ladder()})
    report = newest.serve(problem())
    assert errors(report) == {"lookup-fails", "key-not-integer"}


def near(report_of: Copy, layer: MoEProblem) -> tuple[Level, str, str]:
    finding = only(report_of.serve(layer).findings, "near-miss")
    return finding.level, finding.file, finding.what


def test_row_7_a_file_keyed_by_experts_over_ranks(newest: Copy) -> None:
    device = "NVIDIA_RTX_PRO_5000_72GB_Blackwell"
    file = name(36, device=device, rest=",dtype=fp8_w8a8,block_shape=[128, 128]")
    newest.write(file, (DATA / "triton_3_7_1" / file).read_text(), "3.7.1")
    layer = MoEProblem(288, 256, 6144, 8, 288, dtype="fp8_w8a8", block_shape=(128, 128))
    server = Server(layer, find_device(device), newest.tree, None, TRITON)
    report = check_server(server, Context(None, 16384, rules_of(newest.tree), Resources(None, 1)))
    finding = only(report.findings, "near-miss")
    assert (finding.level, finding.file) == (Level.WARNING, f"triton_3_7_1/{file}")
    assert "36 is 288/8" in finding.what
    assert "E=288" in finding.what
    assert "built-in-default" in codes(report)


def test_row_7_half_of_n(newest: Copy) -> None:
    # Two weights of int4 share a byte, and SGLang counts bytes.
    file = name(inter=256, rest=",dtype=int4_w4a16")
    newest.write(file, ladder())
    level, where, what = near(newest, problem(dtype="int4_w4a16"))
    assert (level, where) == (Level.WARNING, f"triton_3_8_0/{file}")
    assert "N=256, the server asks for N=128; off by a factor of two" in what


def test_row_7_off_by_the_shared_expert(newest: Copy) -> None:
    newest.write(name(288), ladder())
    layer = problem(experts=289, router_experts=288, topk=5, shared_experts=1)
    assert "shared expert" in near(newest, layer)[2]


@pytest.mark.parametrize(
    ("mine", "shipped"),
    [
        (",dtype=fp8_w8a8,block_shape=[128, 128]", ",dtype=fp8_w8a8"),
        (",dtype=fp8_w8a8,block_shape=[128, 128]", ",dtype=fp8_w8a8,block_shape=[128,128]"),
        (",dtype=fp8_w8a8,block_shape=[128, 128]", ",block_shape=[128, 128]"),
        ("", ",dtype=bf16"),
    ],
)
def test_row_8_a_selector_more_or_less(newest: Copy, mine: str, shipped: str) -> None:
    newest.write(name(rest=shipped), ladder())
    layer = problem(dtype="fp8_w8a8", block_shape=(128, 128)) if mine else problem()
    level, _, what = near(newest, layer)
    assert level is Level.WARNING
    assert what.endswith(f"the server asks for {mine.removeprefix(',') or 'no dtype'}")


@pytest.mark.parametrize(
    "device",
    [
        "NVIDIA_RTX_PRO_6000_Blackwell_Workstation_Edition",
        "NVIDIA_RTX_PRO_6000_Blackwell_Max-Q_Workstation_Edition",
        "NVIDIA_RTX_PRO_6000_Blackwell",
        CARD,
    ],
)
def test_row_9_another_edition_of_the_card(newest: Copy, device: str) -> None:
    newest.write(name(device=device), ladder())
    level, _, what = near(newest, problem())
    assert level is Level.WARNING
    assert f"device_name={device}" in what
    # Where the right file is there, the other is a remark.
    newest.write(name(), ladder())
    newest.write(DOWN, ladder())
    assert near(newest, problem())[0] is Level.INFO


@pytest.mark.parametrize(
    "file",
    [
        name(64),
        name(inter=320),
        name(device="NVIDIA_H200"),
        name(33, device="NVIDIA_GB10"),
        name(33, rest="_down"),
        name(33, inter=512),
    ],
)
def test_a_file_of_another_layer_is_no_near_miss(newest: Copy, file: str) -> None:
    newest.write(file, ladder())
    assert "near-miss" not in codes(newest.serve(problem()))


def test_row_12_a_default_that_exceeds_shared_memory(release: Callable[[str], Copy]) -> None:
    layer = problem(dtype="fp8_w8a8")
    for version, expected in (("0.5.12", {"shared-memory"}), ("0.5.23", set())):
        report = release(version).serve(layer, last=64)
        assert errors(report) == expected
        found = [finding for finding in report.findings if finding.code == "shared-memory"]
        assert [finding.key for finding in found] == (["M=33-64", "M=33-64"] if expected else [])
        assert all("at least 147,456 of 101,376 B" in finding.what for finding in found)


def test_row_12_a_row_that_exceeds_shared_memory_is_compiled(newest: Copy, compiling: Resources) -> None:
    big = row(128, BLOCK_SIZE_N=256, BLOCK_SIZE_K=64, num_warps=8, num_stages=4)
    newest.write(name(), {"1": row(), "4": big})
    newest.write(DOWN, {"1": row(), "4": {**big, "num_stages": 2}})
    report = newest.serve(problem(), resources=compiling, last=4)
    finding = only(report.findings, "shared-memory")
    assert finding.key == "M=3-4"
    assert "gate_up" in finding.what
    assert "needs 147,456 of 101,376 B" in finding.what
    assert report.server is not None
    small, large = report.server.spans
    assert small.gate_up is not None
    assert (small.gate_up.shared_bytes, small.gate_up.exact) == (2 * 80 * 64 * 2, True)
    assert small.gate_up.registers
    assert large.gate_up is not None
    assert large.gate_up.shared_bytes == 147456
    assert large.gate_up.failure is not None
    assert large.down is not None
    assert large.down.failure is None


def test_row_14_tma_in_an_up_file_ends_an_older_server(release: Callable[[str], Copy]) -> None:
    for version, expected in (("0.5.15", {"server-stops", "up-tma"}), ("0.5.18", set())):
        copy = release(version)
        copy.write(name(), {**ladder(), "1": row(USE_TMA=False)})
        copy.write(DOWN, ladder())
        assert errors(copy.serve(problem())) == expected


def test_a_config_folder_without_configs(newest: Copy, tmp_path: Path) -> None:
    server = Server(problem(), find_device(CARD), newest.tree, tmp_path, TRITON)
    report = check_server(server, Context(None, 64, rules_of(newest.tree), Resources(None, 1)))
    assert errors(report) == {"config-dir", "lookup-fails"}


def test_a_config_folder_replaces_the_tree(newest: Copy, tmp_path: Path) -> None:
    newest.write(name(), ladder())
    (tmp_path / "configs").mkdir()
    server = Server(problem(), find_device(CARD), newest.tree, tmp_path, TRITON)
    report = check_server(server, Context(None, 64, rules_of(newest.tree), Resources(None, 1)))
    assert {"config-dir", "built-in-default"} <= codes(report)
    assert report.files == ()
    assert CARD_FILE in (report.server.asked[0] if report.server else "")
