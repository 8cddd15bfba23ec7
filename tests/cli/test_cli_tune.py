from __future__ import annotations

import re
import resource
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import triton
from command_line import CARD, SMALL, CommandLine, Done, InProcess, files_under, finish
from pair_files import DOWN, TRITON, UP, as_sglang, pair_paths

from sm120tune.compiler import CompileSpec, TileFacts
from sm120tune.compiler.build import compile_facts
from sm120tune.problem import DEFAULT_BATCH_SIZES, Gemm, MoEProblem
from sm120tune.provenance import FileProvenance, loads
from sm120tune.tiles import Tile, TilePair
from sm120tune.upstream import find_sglang
from sm120tune.upstream.arguments import variant_for
from sm120tune.upstream.source import load_kernels

LIMIT = 101376


def provenance(output: Path) -> FileProvenance:
    return loads(pair_paths(output)[2].read_text())


def timed_rows(output: Path) -> set[int]:
    return {row.m for row in provenance(output).rows if row.repetitions}


# A whole run


@pytest.fixture(scope="module")
def ran(sglang_0_5_23: Path, own_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[CommandLine, Done]:
    """Return one finished run that several tests look at."""
    line = CommandLine(tmp_path_factory.mktemp("run"), sglang_0_5_23, own_cache)
    return line, line.tune("--batch-sizes", "1,512", "--trials", "4", "--json")


def test_a_run_ends_well_and_says_what_it_does(ran: tuple[CommandLine, Done]) -> None:
    line, done = ran
    assert done.code == 0, done.err
    assert UP in done.err
    assert DOWN in done.err
    # The names come before the work, the estimates are called so.
    assert done.err.index(UP) < done.err.index("search")
    assert "ESTIMATES" in done.err
    assert "Traceback" not in done.err
    assert "assumed" not in done.err
    assert sorted(path.name for path in line.folder.iterdir()) == ["generated_configs"]


def test_the_pair_and_its_provenance_are_under_estimated(ran: tuple[CommandLine, Done]) -> None:
    line, _ = ran
    written = {path for path in line.output.rglob("*") if path.is_file() and not path.name.startswith(".")}
    assert written == set(pair_paths(line.output))
    up, down, *records = (path.read_bytes() for path in pair_paths(line.output))
    assert records[0] == records[1]
    assert up != b""
    assert down != b""


def test_both_files_have_all_keys_in_order_and_one_block_size_m(ran: tuple[CommandLine, Done]) -> None:
    line, _ = ran
    up, down = (as_sglang(path) for path in pair_paths(line.output)[:2])
    assert list(up) == list(down)
    assert set(up) >= set(DEFAULT_BATCH_SIZES)
    fields = {"BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K", "GROUP_SIZE_M", "num_warps", "num_stages"}
    for m in up:
        assert up[m]["BLOCK_SIZE_M"] == down[m]["BLOCK_SIZE_M"]
        assert set(up[m]) == set(down[m]) == fields
    record = provenance(line.output)
    assert {row.m: row.chosen for row in record.rows} == {
        m: TilePair(Tile.from_row(up[m]), Tile.from_row(down[m])) for m in up
    }
    assert record.kind == "estimated"
    assert timed_rows(line.output) == {1, 512}


def test_every_row_compiles_within_the_cards_shared_memory(ran: tuple[CommandLine, Done]) -> None:
    line, _ = ran
    tree = find_sglang(line.sglang)
    problem = MoEProblem.from_parallelism(experts=16, tp=1, inter=256, hidden=256, topk=2)
    variants = {
        variant_for(problem, gemm, Tile.from_row(row), m=m, sorted_intermediate=False, pdl=True)
        for gemm, path in zip(Gemm, pair_paths(line.output)[:2], strict=True)
        for m, row in as_sglang(path).items()
    }
    assert len(variants) > 4
    for variant in variants:
        facts = compile_facts(
            CompileSpec(tree.package, load_kernels(tree).source_hash, triton.__version__, 120, problem, variant)
        )
        assert isinstance(facts, TileFacts)
        assert 0 < facts.shared_bytes <= LIMIT


def test_json_is_one_document_that_says_all(ran: tuple[CommandLine, Done]) -> None:
    line, done = ran
    document = done.document
    # As they were given: relative to where the command ran.
    assert [line.folder / path for path in (*document["files"], *document["provenance"])] == pair_paths(line.output)
    assert document["kind"] == "estimated"
    assert document["device"] == CARD
    assert document["problem"]["experts"] == 16
    assert document["missing"] == []
    assert document["resumed"] == 0
    assert document["compiled"] > 0
    assert set(document["seconds"]) >= {"search", "total"}
    rows = {row["m"]: row for row in document["rows"]}
    assert set(rows) == set(as_sglang(pair_paths(line.output)[0]))
    assert rows[512]["ratio"] is not None
    assert not rows[512]["measured"]


def test_the_same_command_again_resumes_and_changes_no_row(ran: tuple[CommandLine, Done]) -> None:
    line, done = ran
    before = [path.read_bytes() for path in pair_paths(line.output)[:2]]
    again = line.tune("--batch-sizes", "1,512", "--trials", "4", "--json", "--quiet")
    assert again.code == 0
    assert again.err == ""
    assert again.document["resumed"] >= 8
    assert again.document["compiled"] == 0
    assert [path.read_bytes() for path in pair_paths(line.output)[:2]] == before
    assert again.document["failures"] == done.document["failures"]


def test_sglang_itself_takes_the_pair(ran: tuple[CommandLine, Done]) -> None:
    # Through SGLang's own lookup with the folder that a server would be given.
    line, done = ran
    dry = line.tune(
        "--batch-sizes", "1,512", "--dry-run", "--json", "--output", "elsewhere",
        env={"SGLANG_MOE_CONFIG_DIR": str(_without_provenance(line))},
    )  # fmt: skip
    assert dry.code == 0, dry.err
    rows = {row["m"]: row["chosen"] for row in done.document["rows"]}
    for m in (1, 512):
        today = dry.document["today"][str(m)]
        assert {name: today[name] for name in ("gate_up", "down")} == rows[m]
        assert today["up_source"].endswith(UP)
        assert today["down_source"].endswith(DOWN)


def _without_provenance(line: CommandLine) -> Path:
    server = line.folder.parent / f"{line.folder.name}-server"
    shutil.copytree(line.output / "estimated" / "configs", server / "configs", dirs_exist_ok=True)
    return server


# Without any work


def test_a_dry_run_names_both_files_and_writes_nothing(line: CommandLine, tmp_path: Path) -> None:
    line = replace(line, cache=tmp_path / "cache")
    plain = line.tune("--batch-sizes", "1,512", "--dry-run")
    assert plain.code == 0
    assert plain.out == ""
    assert UP in plain.err
    assert DOWN in plain.err
    assert "candidates" in plain.err
    document = line.tune("--batch-sizes", "1,512", "--dry-run", "--json", "--quiet").document
    assert document["files"] == [UP, DOWN]
    assert set(document["today"]) == {"1", "512"}
    assert document["candidates"]["before_cuts"] > document["candidates"]["after_cuts"] > 0
    assert list(line.folder.iterdir()) == []
    assert not line.cache.exists()


def test_figures_that_were_not_given_are_said(command: InProcess) -> None:
    tree = str(command.line.sglang)
    done = command.run(
        "--experts", "16", "--inter", "256", "--device", CARD, "--timer", "model", "--sglang", tree, "--dry-run"
    )
    assert done.code == 0
    assert "assumed: --hidden 6144" in done.err
    assert "assumed: --topk 8" in done.err


@pytest.mark.parametrize(
    ("more", "name"),
    [
        (["--shared-experts", "1"], "E=17,N=256,"),
        (["--tp", "4"], "E=16,N=64,"),
        (["--tp", "4", "--ep", "2"], "E=8,N=128,"),
        (["--dtype", "fp16"], "E=16,N=256,device_name=NVIDIA_RTX_PRO_6000"),
        (["--device", "NVIDIA_GB10"], "E=16,N=256,device_name=NVIDIA_GB10.json"),
        (
            ["--dtype", "fp8_w8a8", "--block-shape", "128,128"],
            f"E=16,N=256,device_name={CARD.replace(' ', '_')},dtype=fp8_w8a8,block_shape=[128, 128].json",
        ),
        (
            ["--dtype", "fp8_w8a8", "--per-channel"],
            f"E=16,N=256,device_name={CARD.replace(' ', '_')},dtype=fp8_w8a8,per_channel_quant=True.json",
        ),
        (
            ["--dtype", "int8_w8a8", "--block-shape", "128,128", "--tp", "2"],
            f"E=16,N=128,device_name={CARD.replace(' ', '_')},dtype=int8_w8a8,block_shape=[128, 128].json",
        ),
        (
            ["--dtype", "int8_w8a16", "--group-size", "64"],
            f"E=16,N=256,device_name={CARD.replace(' ', '_')},dtype=int8_w8a16.json",
        ),
        # Bytes of int4 are counted, which hold two weights each.
        (
            ["--dtype", "int4_w4a16", "--group-size", "128", "--zero-points"],
            f"E=16,N=128,device_name={CARD.replace(' ', '_')},dtype=int4_w4a16.json",
        ),
    ],
    ids=[
        "shared",
        "tp",
        "ep",
        "dtype",
        "device",
        "fp8-block",
        "fp8-channel",
        "int8-block",
        "int8-group",
        "int4-group",
    ],
)
def test_the_names_follow_the_parallelism_and_the_card(command: InProcess, more: list[str], name: str) -> None:
    document = command.run(*command.line.args(*more, "--dry-run", "--json", "--quiet")).document
    assert document["files"][0].startswith(name)
    assert document["files"][1] == document["files"][0].replace(".json", "_down.json")
    assert list(command.line.folder.iterdir()) == []


# Quantized


@pytest.mark.parametrize(
    ("more", "selectors", "wrong"),
    [
        (["--dtype", "fp8_w8a8", "--block-shape", "128,128"], "fp8_w8a8,block_shape=[128, 128]", 256),
        (["--dtype", "int4_w4a16", "--group-size", "64", "--zero-points", "--inter", "192"], "int4_w4a16", 128),
    ],
    ids=["fp8-block", "int4-group"],
)
def test_a_quantized_layer_gets_a_pair_of_tiles_that_compute_right_numbers(
    line: CommandLine, more: list[str], selectors: str, wrong: int
) -> None:
    done = line.tune("--batch-sizes", "1,512", "--trials", "4", "--json", *more)
    assert done.code == 0, done.err
    inter = 96 if "int4" in selectors else 256
    name = f"E=16,N={inter},device_name={CARD.replace(' ', '_')},dtype={selectors}"
    configs = line.output / "estimated" / "configs" / TRITON
    assert {path.name for path in configs.glob("*.json")} == {f"{name}.json", f"{name}_down.json"}
    up, down = (as_sglang(configs / f"{name}{part}.json") for part in ("", "_down"))
    assert set(up) == set(down) >= set(DEFAULT_BATCH_SIZES)
    for m in up:
        assert up[m]["BLOCK_SIZE_M"] == down[m]["BLOCK_SIZE_M"]
    record = loads((configs.parents[1] / "provenance" / TRITON / f"{name}.json").read_text())
    assert record.problem.quantization.zero_points == ("--zero-points" in more)
    tuned = [row for row in record.rows if row.m in (1, 512)]
    assert len(tuned) == 2
    for row in tuned:
        assert row.repetitions
        for tile in (row.chosen.gate_up, row.chosen.down):
            assert tile.BLOCK_SIZE_K < wrong


# Several runs on one folder


def test_two_runs_at_once_lose_nothing(line: CommandLine) -> None:
    sizes = ["1", "512"]
    processes = [
        line.start(*line.args("--batch-sizes", m, "--trials", "4", "--json", "--quiet", "--seed", "7")) for m in sizes
    ]
    done = [finish(process) for process in processes]
    assert [one.code for one in done] == [0, 0], done
    assert timed_rows(line.output) == {1, 512}
    up, down = (as_sglang(path) for path in pair_paths(line.output)[:2])
    assert list(up) == list(down)
    assert set(up) >= set(DEFAULT_BATCH_SIZES)
    # What each run reported is what is there, whichever was last, and both went into one journal.
    there = {row.m: row.to_json() for row in provenance(line.output).rows}
    for m, one in zip(sizes, done, strict=True):
        said = next(row for row in one.document["rows"] if row["m"] == int(m))
        assert there[int(m)]["chosen"] == said["chosen"]
    again = line.tune("--batch-sizes", ",".join(sizes), "--trials", "4", "--json", "--quiet", "--seed", "7")
    assert again.document["resumed"] >= 8


def test_another_problem_with_the_same_name_is_refused_and_named(ran: tuple[CommandLine, Done]) -> None:
    line, _ = ran
    before = files_under(line.output)
    other = [*SMALL]
    other[other.index("--hidden") + 1] = "128"
    args = [*other, "--device", CARD, "--timer", "model", "--sglang", str(line.sglang)]
    done = line.run(*args, "--batch-sizes", "1", "--trials", "1", "--quiet")
    assert done.code == 2
    assert done.err.count("\n") == 1
    assert "problem.hidden is 256 there and 128 here" in done.err
    assert "--replace" in done.err
    assert files_under(line.output) == before


# Disks


def test_a_full_disk_leaves_the_old_pair_as_it_was(line: CommandLine, tmp_path: Path) -> None:
    command = ["--batch-sizes", "512", "--trials", "1", "--quiet"]
    assert line.tune(*command, "--seed", "11").code == 0
    before = files_under(line.output)
    largest = max(len(content) for content in before.values())
    # A cache of its own, so that its journal is small; what is compiled is there already.
    cache = tmp_path / "cache"
    shutil.copytree(line.cache / "sm120tune" / "compile", cache / "sm120tune" / "compile")
    limit = largest - 2000

    def small_disk() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    full = replace(line, cache=cache).tune(*command, "--seed", "11", preexec_fn=small_disk)
    assert full.code == 2
    assert full.out == ""
    assert full.err.count("\n") == 1, full.err
    assert "File too large" in full.err
    assert str(line.output.name) in full.err
    assert files_under(line.output) == before


def test_a_journal_on_a_full_disk_is_one_line(line: CommandLine, tmp_path: Path) -> None:
    line = replace(line, cache=tmp_path / "cache")

    def small_disk() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (6000, 6000))

    full = line.tune("--batch-sizes", "1,512", "--trials", "4", "--quiet", preexec_fn=small_disk)
    assert full.code == 2
    assert re.fullmatch(r"sm120tune: error: cannot write the journal .*: File too large\n", full.err), full.err
    assert list(line.folder.iterdir()) == []
