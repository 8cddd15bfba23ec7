"""The whole command over SGLang's real lookup and log; its kernels and their times are made up."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from importable_sglang import FAILING_STAGES, FAST_WARPS, SLOW_WARPS, UTILS, WRONG_GROUP
from made_pairs import CARD, PROBLEM, Maker, copied, picture

from sm120tune import cli
from sm120tune.cli import verify as command
from sm120tune.devices import find_device
from sm120tune.tiles import Tile, TilePair
from sm120tune.verify import run

SIZES = (1, 8, 64)
FAST = TilePair.same(Tile(16, 64, 64, 1, FAST_WARPS, 3))
SLOW = TilePair.same(Tile(16, 64, 64, 1, SLOW_WARPS, 3))
NUMBERS = ["--experts", "12", "--inter", "96"]
DATA = Path(__file__).parents[1] / "data" / "models"


@dataclass(frozen=True)
class Command:
    """Runs the command in this process."""

    maker: Maker
    capsys: pytest.CaptureFixture[str]

    def run(self, *args: str | Path) -> tuple[int, str, str]:
        code = cli.run(["verify", *map(str, args), "--sglang", str(self.maker.site)])
        out, err = self.capsys.readouterr()
        return code, out, err

    def rows(self, *args: str | Path, code: int = 0) -> dict[int, dict[str, Any]]:
        """Return the verdicts by M."""
        ended, out, err = self.run(*args, "--json")
        assert ended == code, err
        (pair,) = json.loads(out)["pairs"]
        assert pair["holds"] is (code == 0)
        return {row["m"]: row for row in pair["rows"]}


@pytest.fixture
def verify(maker: Maker, capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(maker, capsys)


def up_file(maker: Maker, pairs: dict[int, TilePair], **changes: Any) -> Path:
    return maker.write(pairs, **changes).up_path


def test_a_faster_pair_holds_at_its_keys_and_between(verify: Command) -> None:
    before = picture(verify.maker.site)
    rows = verify.rows(up_file(verify.maker, dict.fromkeys(SIZES, FAST)))
    # 4 and 36 are the last M that the keys 1 and 8 serve.
    assert list(rows) == [1, 4, 8, 36, 64]
    for row in rows.values():
        assert (row["verdict"], row["loaded"]) == ("faster", True)
        assert row["without_us"] == pytest.approx(100.0, rel=0.002)
        assert row["with_us"] == pytest.approx(80.0, rel=0.002)
        assert row["ratio_interval"][0] <= row["ratio"] == pytest.approx(0.8, rel=0.002)
        assert 0 < row["error"] < 0.01
    # The tree itself is only read.
    after = picture(verify.maker.site)
    assert {path: after[path] for path in before} == before


def test_a_table_for_people(verify: Command) -> None:
    code, out, err = verify.run(up_file(verify.maker, dict.fromkeys(SIZES, FAST)), "--batch-sizes", "1,50")
    assert code == 0
    assert "Triton" not in err
    assert "80.0 us" in out or "80.1 us" in out
    assert "the pair holds: 2 faster" in out
    assert "M=50: faster" in err


def test_what_the_tree_serves_without_the_pair_is_the_baseline(verify: Command) -> None:
    """A shipped pair of another Triton is today's; an identical copy of the new one, put there by hand, is not."""
    written = verify.maker.write(dict.fromkeys(SIZES, SLOW))
    configs = verify.maker.site / "sglang" / UTILS / "configs"
    (configs / "triton_3_0_0").mkdir()
    for path in (written.up_path, written.down_path):
        text = path.read_text().replace(f'"num_warps": {SLOW_WARPS}', f'"num_warps": {FAST_WARPS}')
        (configs / "triton_3_0_0" / path.name).write_text(text)
        (configs / written.up_path.parent.name).mkdir(exist_ok=True)
        (configs / written.up_path.parent.name / path.name).write_bytes(path.read_bytes())
    rows = verify.rows(written.up_path, code=1)
    assert {row["verdict"] for row in rows.values()} == {"slower"}
    assert rows[1]["without_us"] == pytest.approx(80.0, rel=0.002)
    assert rows[1]["ratio"] == pytest.approx(1.25, rel=0.002)


@pytest.mark.parametrize(
    ("tile", "word", "note"),
    [
        (Tile(16, 64, 64, WRONG_GROUP, FAST_WARPS, 3), "wrong", "relative error "),
        (Tile(16, 64, 64, 1, FAST_WARPS, FAILING_STAGES), "failed", "out of resource: shared memory"),
    ],
)
def test_a_row_that_is_wrong_or_fails(verify: Command, tile: Tile, word: str, note: str) -> None:
    pairs = {1: FAST, 8: TilePair(FAST.gate_up, tile), 64: FAST}
    rows = verify.rows(up_file(verify.maker, pairs), "--batch-sizes", "1,8,64", code=1)
    assert [rows[m]["verdict"] for m in SIZES] == ["faster", word, "faster"]
    assert note in rows[8]["note"]
    assert rows[8]["holds"] is False


def test_a_quantized_pair_is_judged_in_its_own_storage(verify: Command) -> None:
    file = up_file(verify.maker, dict.fromkeys(SIZES, FAST), problem=INT4)
    assert ",N=48," in file.name
    row = verify.rows(file, "--batch-sizes", "8")[8]
    assert (row["verdict"], row["loaded"]) == ("faster", True)
    assert 0 < row["error"] < 0.01


def test_a_release_whose_call_lacks_what_the_layer_needs(verify: Command) -> None:
    problem = replace(PROBLEM, dtype="fp8_w8a8", per_channel_quant=True)
    code, out, err = verify.run(up_file(verify.maker, dict.fromkeys(SIZES, FAST), problem=problem))
    assert (code, out) == (2, "")
    assert "fp8_w8a8 cannot be verified with SGLang 0.5.23: its fused_moe does not take per_channel_quant" in err
    assert "use_fp8_w8a8" in err


def test_the_same_rows_are_the_same(verify: Command) -> None:
    rows = verify.rows(up_file(verify.maker, dict.fromkeys(SIZES, SLOW)), "--batch-sizes", "8")
    assert rows[8]["verdict"] == "same"


def test_where_only_the_pair_runs(verify: Command) -> None:
    tile = Tile(16, 64, 64, 1, FAST_WARPS, FAILING_STAGES)
    failing = verify.maker.write(dict.fromkeys(SIZES, TilePair.same(tile)))
    verify.maker.install(failing.up_path)
    # By hand, so that it is what SGLang runs today.
    for path in verify.maker.place.base.glob("provenance/**/*.json"):
        path.unlink()
    rows = verify.rows(up_file(verify.maker, dict.fromkeys(SIZES, FAST)), "--batch-sizes", "8")
    assert rows[8]["verdict"] == "faster"
    assert "without the pair the call fails: RuntimeError: out of resource" in rows[8]["note"]
    assert rows[8]["without_us"] is None


def test_an_installed_pair_is_judged_where_it_is(verify: Command) -> None:
    older = up_file(verify.maker, dict.fromkeys(SIZES, SLOW))
    verify.maker.install(older)
    verify.maker.install(up_file(verify.maker, dict.fromkeys(SIZES, FAST)))
    before = picture(verify.maker.place.base)
    rows = verify.rows(*NUMBERS, "--batch-sizes", "1,64")
    assert {row["verdict"] for row in rows.values()} == {"faster"}
    assert picture(verify.maker.place.base) == before
    # Such a folder breaks every lookup but one that finds its exact file first.
    (verify.maker.place.configs / "triton_9_9_9rc1").mkdir()
    row = verify.rows(*NUMBERS, "--batch-sizes", "1")[1]
    assert (row["verdict"], row["without_us"]) == ("faster", None)
    assert "without the pair the call fails: ValueError" in row["note"]


def test_of_two_installed_pairs_that_of_the_card_counts(verify: Command) -> None:
    for device in ({"name": "NVIDIA GeForce RTX 5090"}, {"name": CARD}):
        verify.maker.install(up_file(verify.maker, dict.fromkeys(SIZES, FAST), device=device))
    assert verify.rows(*NUMBERS, "--batch-sizes", "1")[1]["verdict"] == "faster"


def test_an_installed_quantized_pair_of_the_same_sizes_is_none_of_it(verify: Command) -> None:
    quantized = replace(PROBLEM, dtype="fp8_w8a8", per_channel_quant=True)
    verify.maker.install(up_file(verify.maker, dict.fromkeys(SIZES, FAST), problem=quantized))
    code, _, err = verify.run(*NUMBERS)
    assert (code, "no pair for E=12, N=96 is installed" in err) == (2, True), err
    code, _, err = verify.run(*NUMBERS, "--dtype", "fp8_w8a8")
    assert (code, "no pair for E=12, N=96, dtype=fp8_w8a8 is installed" in err) == (2, True), err
    verify.maker.install(up_file(verify.maker, dict.fromkeys(SIZES, FAST)))
    assert verify.rows(*NUMBERS, "--batch-sizes", "1")[1]["verdict"] == "faster"


INT4 = replace(PROBLEM, dtype="int4_w4a16", block_shape=(0, 32), zero_points=True)


def test_an_installed_quantized_pair_by_numbers(verify: Command) -> None:
    verify.maker.install(up_file(verify.maker, dict.fromkeys(SIZES, FAST), problem=INT4))
    # An unquantized layer of the same sizes in the name, with half as wide experts.
    halved = replace(PROBLEM, intermediate=48)
    verify.maker.install(up_file(verify.maker, dict.fromkeys(SIZES, SLOW), problem=halved))
    how = ["--dtype", "int4_w4a16", "--group-size", "32", "--zero-points"]
    assert verify.rows(*NUMBERS, *how, "--batch-sizes", "1")[1]["verdict"] == "faster"
    assert verify.rows("--experts", "12", "--inter", "48", "--batch-sizes", "1")[1]["verdict"] == "same"
    for wrong, words in (
        (how[:4], "int4_w4a16 group 32 with zero points, not for E=12 N=96 hidden=256 topk=2 int4_w4a16 group 32;"),
        ([*how[:3], "64", "--zero-points"], "--inter 96 at tp 1 / ep 1 gives N=96, which is not divisible"),
        (how[:2], "--dtype int4_w4a16 needs --group-size"),
        (["--group-size", "32"], "--dtype bf16 is not quantized"),
    ):
        code, out, err = verify.run(*NUMBERS, *wrong)
        assert (code, out) == (2, "")
        assert words in err


def test_the_installed_pair_of_a_model(verify: Command, tmp_path: Path) -> None:
    config = json.loads((DATA / "glm4_moe.json").read_text())
    config |= {"n_routed_experts": 11, "num_experts_per_tok": 1, "moe_intermediate_size": 192, "hidden_size": 256}
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    model = ["--model", tmp_path / "model", "--tp", "2"]
    code, _, err = verify.run(*model)
    assert (code, "no pair for E=12, N=96 is installed" in err) == (2, True), err
    fused = replace(PROBLEM, router_experts=11, shared_experts=1)
    verify.maker.install(up_file(verify.maker, dict.fromkeys(SIZES, FAST), problem=fused))
    assert verify.rows(*model, "--batch-sizes", "1")[1]["verdict"] == "faster"
    # By numbers too, where the shared expert may be told or counted with the others.
    for numbers in (["--experts", "11", "--shared-experts", "1"], ["--experts", "12"]):
        assert verify.rows(*numbers, "--inter", "96", "--topk", "1", "--batch-sizes", "1")[1]["verdict"] == "faster"
    _, _, err = verify.run(*model, "--batch-sizes", "1")
    assert "1 shared expert fused" in err
    code, _, err = verify.run(*model, "--hidden", "256")
    assert (code, "--model brings its own --hidden; drop one of the two" in err) == (2, True), err
    code, _, err = verify.run(*model, up_file(verify.maker, dict.fromkeys(SIZES, FAST)))
    assert (code, "give either a pair's file or" in err) == (2, True), err


def test_a_pair_of_another_layer_is_no_models(verify: Command, tmp_path: Path) -> None:
    verify.maker.install(up_file(verify.maker, dict.fromkeys(SIZES, FAST)))
    config = json.loads((DATA / "glm4_moe.json").read_text())
    config |= {"n_routed_experts": 11, "num_experts_per_tok": 1, "moe_intermediate_size": 96, "hidden_size": 256}
    (tmp_path / "config.json").write_text(json.dumps(config))
    code, _, err = verify.run("--model", tmp_path)
    assert (code, "was tuned for --topk 2, not 1; tune for this layer" in err) == (2, True), err


def test_every_layer_of_a_shared_pair_is_judged(verify: Command, capsys: Any) -> None:
    wide = replace(PROBLEM, hidden=512)
    written = verify.maker.write(dict.fromkeys(SIZES, FAST), shared_with=(wide,))
    code, out, err = verify.run(written.up_path, "--batch-sizes", "8", "--json")
    assert code == 0, err
    assert [pair["problem"]["hidden"] for pair in json.loads(out)["pairs"]] == [PROBLEM.hidden, 512]
    verify.maker.install(written.up_path)
    code, out, err = verify.run(*NUMBERS, "--hidden", "512", "--batch-sizes", "8", "--json")
    assert code == 0, err
    assert [pair["problem"]["hidden"] for pair in json.loads(out)["pairs"]] == [512]
    code, _, err = verify.run(*NUMBERS, "--hidden", "1024")
    assert code == 2
    assert f"tuned for {PROBLEM} and {wide}, not for" in err


def test_an_installed_pair_without_a_gate_by_numbers(verify: Command) -> None:
    problem = replace(PROBLEM, gated=False)
    verify.maker.install(verify.maker.write(dict.fromkeys(SIZES, FAST), problem=problem).up_path)
    code, _, err = verify.run(*NUMBERS)
    assert (code, "was tuned for" in err) == (2, True), err
    # The importable stand-in has no such experts; that the pair is the one meant is seen from what it is asked for.
    _, _, err = verify.run(*NUMBERS, "--no-gate", "--batch-sizes", "8")
    assert f"for {problem} on GPU 0" in err


def test_an_installed_pair_of_another_layer(verify: Command) -> None:
    verify.maker.install(up_file(verify.maker, dict.fromkeys(SIZES, FAST)))
    for args, words in (
        (["--experts", "13", "--inter", "96"], "no pair for E=13, N=96 is installed"),
        ([*NUMBERS, "--hidden", "512"], "tuned for --hidden 256, not 512"),
        ([*NUMBERS, "--topk", "4"], "tuned for --topk 2, not 4"),
    ):
        code, _, err = verify.run(*args)
        assert code == 2
        assert words in err


def test_a_file_of_another_triton_is_not_loaded_before_one_that_ships(verify: Command) -> None:
    pair = verify.maker.write(dict.fromkeys(SIZES, FAST), versions={"triton": "3.0.0"})
    configs = verify.maker.site / "sglang" / UTILS / "configs" / "triton_3_4_0"
    configs.mkdir()
    for path in (pair.up_path, pair.down_path):
        text = path.read_text().replace(f'"num_warps": {FAST_WARPS}', f'"num_warps": {SLOW_WARPS}')
        (configs / path.name).write_text(text)
    rows = verify.rows(pair.up_path, "--batch-sizes", "8", code=1)
    assert (rows[8]["verdict"], rows[8]["loaded"]) == ("not loaded", False)
    assert "other rows than those of E=12,N=96" in rows[8]["note"]


def test_a_converted_pair_and_one_of_another_triton_can_be_judged(verify: Command, capsys: Any) -> None:
    older = verify.maker.write(dict.fromkeys(SIZES, FAST), versions={"triton": "3.0.0"})
    vllm = verify.maker.output.with_name(older.up_path.name)
    vllm.write_text(json.dumps({"triton_version": "3.0.0", **json.loads(older.up_path.read_text())}))
    layer = ["--hidden", "256", "--topk", "2", "--output", str(verify.maker.output), "--sglang", str(verify.maker.site)]
    assert cli.run(["convert", str(vllm), "--to", "sglang", *layer]) == 0
    capsys.readouterr()
    converted = verify.maker.output / "converted" / "configs" / "triton_3_0_0" / older.up_path.name
    row = verify.rows(converted, "--batch-sizes", "8")[8]
    assert (row["verdict"], row["loaded"]) == ("faster", True)
    assert "another Triton's folder" in row["note"]


def test_an_import_that_fails_says_why_and_what_to_do(verify: Command) -> None:
    file = verify.maker.site / "sglang" / UTILS / "fused_moe.py"
    file.write_text("import a_package_that_is_not_there\n" + file.read_text())
    code, out, err = verify.run(up_file(verify.maker, dict.fromkeys(SIZES, FAST)))
    assert (code, out) == (2, "")
    assert "No module named 'a_package_that_is_not_there'" in err
    assert "--preload" in err


def test_a_preload_makes_it_import(verify: Command, tmp_path: Path) -> None:
    file = verify.maker.site / "sglang" / UTILS / "fused_moe.py"
    file.write_text("import a_package_that_is_not_there\n" + file.read_text())
    preload = tmp_path / "preload.py"
    preload.write_text(
        "import sys, types\n"
        "sys.modules['a_package_that_is_not_there'] = types.ModuleType('there')\n"
        "def load():\n"
        "    import sglang.srt.server_args as server_args\n"
        "    server_args.set_global_server_args_for_scheduler(server_args.ServerArgs('dummy'))\n"
        "    from sglang.srt.layers.moe.moe_runner.triton_utils.fused_moe import fused_moe\n"
        "    return fused_moe, None\n"
    )
    rows = verify.rows(up_file(verify.maker, dict.fromkeys(SIZES, FAST)), "--batch-sizes", "8", "--preload", preload)
    assert rows[8]["verdict"] == "faster"


def test_a_child_that_dies_is_named(verify: Command) -> None:
    file = verify.maker.site / "sglang" / UTILS / "fused_moe.py"
    file.write_text(file.read_text().replace("m = hidden.shape[0]", "m = hidden.shape[0]; import os; os.abort()"))
    code, _, err = verify.run(up_file(verify.maker, dict.fromkeys(SIZES, FAST)), "--batch-sizes", "8")
    assert code == 2
    assert "ended at M=8 (signal 6)" in err


def test_a_child_that_hangs_is_ended(verify: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "SILENCE_S", 0.3)
    file = verify.maker.site / "sglang" / UTILS / "fused_moe.py"
    file.write_text("import time; time.sleep(600)\n" + file.read_text())
    code, _, err = verify.run(up_file(verify.maker, dict.fromkeys(SIZES, FAST)), "--batch-sizes", "8")
    assert code == 2
    assert "said nothing for 0.3 s" in err


def test_without_a_gpu_of_that_card(verify: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    file = up_file(verify.maker, dict.fromkeys(SIZES, FAST))
    gpu = command.local_gpus()[0]
    other = type(gpu)(**{**vars(gpu), "spec": find_device("NVIDIA H200")})
    for gpus, words in (((), "torch sees none"), ((other,), f"is for {CARD}, GPU 0 is a NVIDIA H200")):
        monkeypatch.setattr(command, "local_gpus", lambda gpus=gpus: gpus)
        code, out, err = verify.run(file)
        assert (code, out) == (2, "")
        assert words in err
        assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ([], "--model or --experts and --inter"),
        ([*NUMBERS, "--force"], "--force is about the experts of a --model"),
        (["FILE", "--force"], "--force is about the experts of a --model"),
        (["FILE", *NUMBERS], "give either"),
        (["--experts", "12"], "missing --inter"),
        ([*NUMBERS, "--tp", "0"], "--tp must be at least 1, not 0"),
        (["FILE", "--seed", "-1"], "--seed"),
        (["FILE", "--gpu", "3"], "--gpu 3"),
        (["FILE", "--routing", "odd"], "--routing 'odd'"),
        (["FILE", "--batch-sizes", "1,x"], "--batch-sizes '1,x'"),
        (["FILE", "--preload", "nowhere.py"], "--preload nowhere.py"),
        (["FILE", "--batch-sizes", "1000000"], "GiB are free"),
    ],
)
def test_bad_input(verify: Command, args: list[str], words: str) -> None:
    big = replace(PROBLEM, hidden=65536) if words == "GiB are free" else PROBLEM
    file = str(up_file(verify.maker, dict.fromkeys(SIZES, FAST), problem=big))
    code, out, err = verify.run(*[file if arg == "FILE" else arg for arg in args])
    assert (code, out) == (2, "")
    assert words in err


def test_a_real_release_without_its_dependencies(verify: Command, sglang_0_5_23: Path, tmp_path: Path) -> None:
    """SGLang's real fused_moe is asked to import, and its own message comes back."""
    real = Maker(copied(sglang_0_5_23, tmp_path / "real", without_configs=True), tmp_path / "real-output")
    (real.site / "sglang" / UTILS / "configs").mkdir(exist_ok=True)
    code, _, err = Command(real, verify.capsys).run(real.write(dict.fromkeys(SIZES, FAST)).up_path)
    assert code == 2
    assert "SGLang 0.5.23's fused_moe does not import" in err
