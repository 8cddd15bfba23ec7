from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import triton
from synthetic import SMALL, make_job

from sm120tune import resolve
from sm120tune.compiler import ActivationVariant
from sm120tune.compiler.spec import QuantizeVariant
from sm120tune.devices import DEFAULT_DEVICE_NAME, LocalGPU, find_device
from sm120tune.errors import UserError
from sm120tune.job import Job, Settings
from sm120tune.measure.lane import TimerName
from sm120tune.measure.memory import needed_bytes, weight_bytes
from sm120tune.measure.routing import BALANCED, UNIFORM
from sm120tune.problem import MoEProblem
from sm120tune.provenance import FileProvenance, RowProvenance, RowStatus
from sm120tune.resolve import Card, CardRequest, JobRequest, resolve_card, resolve_job
from sm120tune.tiles import Tile, TilePair
from sm120tune.upstream.arguments import Variant
from sm120tune.upstream.lookup import BUILT_IN
from sm120tune.upstream.source import load_kernels
from sm120tune.writer import Ladder, WrittenPair, write_ladder

H200 = "NVIDIA H200"
RTX_5090 = "NVIDIA GeForce RTX 5090"
SETTINGS = Settings(10, False, None, 0)


def gpu(index: int, name: str = H200, free: int = 100 * 2**30) -> LocalGPU:
    return LocalGPU(index, str(index), f"GPU-{index}", find_device(name), "580.1", free, 140 * 2**30, 0, 0)


Machine = Callable[..., None]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Return what says which GPUs are here."""

    def machine(*names: str) -> None:
        gpus = tuple(gpu(index, name) for index, name in enumerate(names))
        monkeypatch.setattr(resolve, "local_gpus", lambda: gpus)

    return machine


def card(
    device: str | None = None, spec: Path | None = None, gpus: str | None = None, timer: TimerName | None = None
) -> Card:
    return resolve_card(CardRequest(device, spec, gpus, timer))


def refused(*words: str, **request: object) -> None:
    with pytest.raises(UserError) as caught:
        card(**request)  # type: ignore[arg-type]
    message = str(caught.value)
    assert all(word in message for word in words), message
    assert "\n" not in message


# The card


def test_without_a_gpu_the_default_card_is_estimated(machine: Machine) -> None:
    machine()
    assert card() == Card(find_device(DEFAULT_DEVICE_NAME), (), "model")


def test_the_cards_that_are_here_are_measured(machine: Machine) -> None:
    machine(H200, H200, H200)
    found = card()
    assert found.spec.name == H200
    assert [one.index for one in found.gpus] == [0, 1, 2]
    assert found.timer == "cuda"


@pytest.mark.parametrize("name", [RTX_5090, "NVIDIA_GeForce_RTX_5090", "nvidia geforce rtx_5090"])
def test_a_card_that_is_not_here_is_estimated(machine: Machine, name: str) -> None:
    machine(H200)
    assert card(name) == Card(find_device(RTX_5090), (), "model")
    assert card(name, timer="model") == Card(find_device(RTX_5090), (), "model")


@pytest.mark.parametrize("name", [H200, "NVIDIA_H200", "nvidia_h200"])
def test_of_several_cards_those_with_the_name_are_measured(machine: Machine, name: str) -> None:
    machine(RTX_5090, H200, RTX_5090, H200)
    found = card(name)
    assert found.spec.name == H200
    assert [one.index for one in found.gpus] == [1, 3]
    assert found.timer == "cuda"


def test_different_cards_are_not_one_run(machine: Machine) -> None:
    machine(H200, RTX_5090)
    refused("GPU 0 is a NVIDIA H200", "GPU 1 a NVIDIA GeForce RTX 5090", "--gpus")
    assert [one.index for one in card(gpus="1").gpus] == [1]


def test_measuring_needs_the_card(machine: Machine) -> None:
    machine()
    refused("--timer cuda", "no GPU", "--timer model", timer="cuda")
    machine(H200)
    refused("--timer cuda", "RTX_5090", "--timer model", device="NVIDIA_GeForce_RTX_5090", timer="cuda")


def test_a_card_that_is_here_can_be_estimated(machine: Machine) -> None:
    machine(H200)
    assert card(timer="model") == Card(find_device(H200), (), "model")


@pytest.mark.parametrize("name", ["RTX 5090", "RTX_5090", "NVIDIA GeForce RTX 5099", "", "H2000"])
@pytest.mark.parametrize("timer", [None, "model"])
def test_an_unknown_card_lists_near_names(machine: Machine, name: str, timer: TimerName | None) -> None:
    machine()
    near = H200 if name == "H2000" else RTX_5090
    refused(f"--device {name!r}", near, "--device-spec", device=name, timer=timer)


@pytest.mark.parametrize(
    ("text", "wanted"), [("0", [0]), ("2,0", [2, 0]), (" 1 , 2 ", [1, 2]), ("all", [0, 1, 2]), ("1,1", [1])]
)
def test_gpus_are_chosen_by_number(machine: Machine, text: str, wanted: list[int]) -> None:
    machine(H200, H200, H200)
    assert [one.index for one in card(gpus=text).gpus] == wanted


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("3", "3"),
        ("0,7", "7"),
        ("", ""),
        ("0,", ""),
        ("x", "x"),
        ("-1", "-1"),
        ("²", "²"),
        pytest.param("9" * 5000, "9" * 5000, id="endless"),
    ],
)
def test_gpus_that_are_not_here(machine: Machine, text: str, part: str) -> None:
    machine(H200, H200)
    refused(f"--gpus {text}", repr(part), "0, 1", gpus=text)
    machine()
    refused(f"--gpus {text}", "none", gpus=text)


def test_a_described_card_is_estimated(machine: Machine, tmp_path: Path) -> None:
    machine(H200)
    described = replace(find_device("NVIDIA GB10"), name="NVIDIA RTX 9999", sm_count=99)
    path = tmp_path / "card.json"
    path.write_text(json.dumps(asdict(described)))
    assert card(spec=path) == Card(described, (), "model")
    refused("--device-spec", "--timer cuda", spec=path, timer="cuda")
    path.write_text("{")
    refused("--device-spec", str(path), spec=path)


# The job


def job(
    tree: Path,
    output: Path,
    *,
    problem: MoEProblem = SMALL,
    sizes: Sequence[int] = (16, 512),
    gpus: Sequence[LocalGPU] = (),
) -> Job:
    request = JobRequest(problem, tuple(sizes), UNIFORM, SETTINGS, tree, output)
    return resolve_job(request, Card(find_device(DEFAULT_DEVICE_NAME), tuple(gpus), "cuda" if gpus else "model"))


def test_a_job_names_the_files_the_server_asks_for(sglang_0_5_23: Path, tmp_path: Path) -> None:
    made = job(sglang_0_5_23, tmp_path)
    name = "E=16,N=256,device_name=NVIDIA_RTX_PRO_6000_Blackwell_Server_Edition"
    assert made.lookup.file_names(made.problem) == (f"{name}.json", f"{name}_down.json")
    assert made.triton_version == triton.__version__
    assert made.tree.version == "0.5.23"
    assert made.kind == "estimated"
    assert job(sglang_0_5_23, tmp_path, gpus=[gpu(0)]).kind == "measured"


def test_what_makes_two_runs_the_same(sglang_0_5_23: Path, sglang_0_5_15: Path, tmp_path: Path) -> None:
    base = job(sglang_0_5_23, tmp_path)
    identity = base.identity()
    assert json.loads(json.dumps(identity)) == identity
    # Which M, where to and how hard does not matter; what is timed does.
    assert job(sglang_0_5_23, tmp_path / "other", sizes=(1,)).identity() == identity
    assert replace(base, settings=replace(SETTINGS, trials=99, budget_s=1.0)).identity() == identity
    different = [
        job(sglang_0_5_15, tmp_path),
        job(sglang_0_5_23, tmp_path, problem=replace(SMALL, hidden=1024)),
        job(sglang_0_5_23, tmp_path, problem=replace(SMALL, dtype="fp16")),
        replace(base, device=find_device(RTX_5090)),
        replace(base, gpus=(gpu(0),)),
        replace(base, triton_version="3.6.0"),
        replace(base, timer="cuda"),
        replace(base, routing=BALANCED),
        replace(base, settings=replace(SETTINGS, seed=1)),
        replace(base, settings=replace(SETTINGS, exhaustive=True)),
    ]
    identities = [json.dumps(one.identity(), sort_keys=True) for one in (base, *different)]
    assert len(set(identities)) == len(identities)


@pytest.mark.parametrize(
    ("dtype", "block_shape", "per_channel", "own_quantizer"),
    [
        ("bf16", None, False, False),
        # One static scale needs no kernel of SGLang's, and weights alone no quantizer.
        ("fp8_w8a8", None, False, False),
        ("int4_w4a16", (0, 64), False, False),
        ("fp8_w8a8", None, True, True),
        ("fp8_w8a8", (128, 128), False, True),
        ("int8_w8a8", (128, 128), False, True),
    ],
)
def test_a_chain_compiles_all_that_it_launches(
    sglang_0_5_23: Path,
    tmp_path: Path,
    dtype: str,
    block_shape: tuple[int, int] | None,
    per_channel: bool,
    own_quantizer: bool,
) -> None:
    problem = replace(SMALL, dtype=dtype, block_shape=block_shape, per_channel_quant=per_channel)
    job = make_job(sglang_0_5_23, tmp_path, problem=problem)
    specs = job.chain_specs(16, TilePair.same(Tile(16, 64, 64, 1)))
    kinds = [type(spec.variant) for spec in specs]
    assert kinds[:3] == [Variant, ActivationVariant, Variant]
    assert [spec.variant for spec in specs[3:]] == ([QuantizeVariant(SMALL.intermediate)] if own_quantizer else [])
    # The file belongs to the kernel that runs.
    kernels = load_kernels(job.tree)
    grouped = dtype == "int4_w4a16"
    assert job.source_hash == (kernels.grouped_hash if grouped else kernels.source_hash)
    assert kernels.grouped_hash != kernels.source_hash


def test_a_chain_without_a_gate_has_no_kernel_of_sglang_between(sglang_0_5_23: Path, tmp_path: Path) -> None:
    job = make_job(sglang_0_5_23, tmp_path, problem=replace(SMALL, gated=False))
    variants = [spec.variant for spec in job.chain_specs(16, TilePair.same(Tile(16, 64, 64, 1)))]
    assert [type(variant) for variant in variants] == [Variant, Variant]


@pytest.mark.parametrize("dtype", ["fp8_w8a8", "int8_w8a16"])
def test_eight_bits_make_another_floor(sglang_0_5_23: Path, tmp_path: Path, dtype: str) -> None:
    large = replace(SMALL, hidden=4096, intermediate=2048)
    plain = make_job(sglang_0_5_23, tmp_path, problem=large)
    job = make_job(sglang_0_5_23, tmp_path, problem=replace(large, dtype=dtype))
    (few, bound), (plain_few, _) = job.floor(1), plain.floor(1)
    assert bound == "bandwidth"
    # Little but weights is read for one token.
    assert few == pytest.approx(plain_few / 2, rel=0.05)
    (many, bound), (plain_many, _) = job.floor(65536), plain.floor(65536)
    assert bound == "compute"
    # Twice the rate where both operands have 8 bits; weights alone are made wide first.
    assert many == pytest.approx(plain_many / (2 if dtype == "fp8_w8a8" else 1))


def test_weights_that_do_not_fit_are_told_before_anything_starts(sglang_0_5_23: Path, tmp_path: Path) -> None:
    problem = MoEProblem(256, intermediate=2048, hidden=6144, topk=8, router_experts=256)
    needed = needed_bytes(problem, gpu(0).spec.l2_bytes, 4096)
    assert needed < weight_bytes(problem)
    with pytest.raises(UserError) as caught:
        job(sglang_0_5_23, tmp_path, problem=problem, sizes=(1, 4096), gpus=[gpu(0), gpu(5, free=needed - 1)])
    message = str(caught.value)
    assert message.startswith("GPU 5: ")
    assert "M=4096" in message
    assert f"{needed / 2**30:.1f} GiB" in message
    assert "--tp" in message
    assert "--batch-sizes" in message
    # Half the weights are a quarter of the trouble; without a GPU nothing is allocated.
    job(sglang_0_5_23, tmp_path, problem=replace(problem, experts=128), sizes=(1,), gpus=[gpu(5, free=needed)])
    job(sglang_0_5_23, tmp_path, problem=problem, sizes=(1, 4096))


def test_a_full_card_is_told_as_such(sglang_0_5_23: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"GPU 0: .* 0\.0 GiB are free"):
        job(sglang_0_5_23, tmp_path, gpus=[gpu(0, free=0)])


def test_no_sglang_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--sglang"):
        job(tmp_path, tmp_path)


# What this tool wrote does not count as today's

OURS = TilePair(Tile(16, 64, 128, 1, 4, 4), Tile(16, 128, 128, 1, 8, 2))
THEIRS = TilePair(Tile(32, 64, 64, 16, 8, 2), Tile(32, 32, 64, 16, 4, 5))


def written(made: Job, output: Path, pair: TilePair = OURS) -> WrittenPair:
    """Write a ladder of one pair for a job."""
    rows = tuple(
        RowProvenance(
            m=m, status=RowStatus.TUNED, today=None, chosen=pair, today_us=None, today_spread_us=None, chosen_us=9.0,
            chosen_spread_us=0.1, ratio=None, ratio_interval=None, roofline_share=None, bound="bandwidth",
            timer="model", measured=False, what="chain", repetitions=1, routing="uniform", error=None,
            date="2026-05-01T12:00:00+00:00",
        )
        for m in (1, 64, 4096)
    )  # fmt: skip
    record = FileProvenance(
        "0.1.0", "estimated", made.problem, {"name": made.device.name}, {"triton": made.triton_version},
        made.source_hash, {}, {}, rows,
    )  # fmt: skip
    up, down = made.lookup.file_names(made.problem)
    return write_ladder(output, Ladder(up, down, made.triton_version, {row.m: pair for row in rows}, record))


def version_folder(configs: Path, version: str = triton.__version__) -> Path:
    folder = configs / f"triton_{version.replace('.', '_')}"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def put(folder: Path, made: Job, pair: TilePair) -> None:
    """Write a pair of config files as anyone could."""
    for name, tile in zip(made.lookup.file_names(made.problem), (pair.gate_up, pair.down), strict=True):
        (folder / name).write_text(json.dumps({"1": tile.to_row(), "4096": tile.to_row()}))


@pytest.fixture
def tree(sglang_0_5_23: Path, tmp_path: Path) -> Path:
    """Return a tree of SGLang that may be changed."""
    return Path(shutil.copytree(sglang_0_5_23, tmp_path / "site-packages"))


def todays(made: Job) -> list[tuple[TilePair | None, str]]:
    return [(state.pair, state.up_source) for state in map(made.today, (1, 16, 64, 4096))]


def test_a_pair_of_ours_in_the_tree_is_not_what_runs_today(tree: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    before = job(tree, output)
    plain = todays(before)
    assert {source for _, source in plain} == {BUILT_IN}
    files = written(before, output)
    folder = version_folder(before.tree.configs_dir)
    for path in (files.up_path, files.down_path):
        shutil.copy(path, folder)
    assert todays(job(tree, output)) == plain
    assert job(tree, output).ladder_keys(frozenset()) == before.ladder_keys(frozenset())
    # Said to be another output folder, the same files are a stranger's.
    assert todays(job(tree, tmp_path / "elsewhere"))[0][0] == OURS


def test_a_pair_of_someone_else_in_the_tree_is_what_runs_today(tree: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    made = job(tree, output)
    written(made, output)
    put(version_folder(made.tree.configs_dir), made, THEIRS)
    assert [pair for pair, _ in todays(job(tree, output))] == [THEIRS] * 4


def test_behind_a_pair_of_ours_the_next_folder_counts(tree: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    made = job(tree, output)
    put(version_folder(made.tree.configs_dir, "3.4.0"), made, THEIRS)
    assert todays(job(tree, output))[0][0] == THEIRS
    files = written(made, output)
    for path in (files.up_path, files.down_path):
        shutil.copy(path, version_folder(made.tree.configs_dir))
    assert [pair for pair, _ in todays(job(tree, output))] == [THEIRS] * 4


@pytest.mark.parametrize("where", ["output", "copy"])
def test_ours_in_the_servers_config_folder(
    sglang_0_5_23: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    output = tmp_path / "out"
    plain = job(sglang_0_5_23, output)
    files = written(plain, output)
    server = output / "estimated"
    if where == "copy":
        # With its provenance beside it a copy is known as ours even when the output folder is gone.
        server = Path(shutil.copytree(server, tmp_path / "server"))
        output = tmp_path / "gone"
    monkeypatch.setenv("SGLANG_MOE_CONFIG_DIR", str(server))
    assert {source for _, source in todays(job(sglang_0_5_23, output))} == {BUILT_IN}
    if where == "copy":
        put(server / "configs" / files.up_path.parent.name, plain, THEIRS)
        shutil.rmtree(server / "provenance")
        assert todays(job(sglang_0_5_23, output))[0][0] == THEIRS


def test_a_config_folder_of_the_servers_is_read(
    sglang_0_5_23: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = job(sglang_0_5_23, tmp_path / "out")
    put(version_folder(tmp_path / "server" / "configs"), plain, THEIRS)
    monkeypatch.setenv("SGLANG_MOE_CONFIG_DIR", str(tmp_path / "server"))
    made = job(sglang_0_5_23, tmp_path / "out")
    assert [pair for pair, _ in todays(made)] == [THEIRS] * 4
    assert {1, 4096} <= set(made.ladder_keys(frozenset()))
    # Today's files say what runs at every M: the change of a default that is not used needs no key.
    assert 17 not in made.ladder_keys(frozenset({16}))
