"""What a failing compiler prints, and what becomes of entries of the caches that are not whole."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from compile_specs import FACTS, PROBLEM, spec_of

from sm120tune.compiler import ActivationVariant, CompileSpec, TileFacts
from sm120tune.compiler import build as build_module
from sm120tune.compiler.build import build, compile_facts, use_cache_folder
from sm120tune.compiler.cache import CompileCache
from sm120tune.failures import Failure, FailureKind
from sm120tune.problem import Gemm
from sm120tune.tiles import Tile
from sm120tune.upstream.arguments import Variant

VARIANT = Variant(Gemm.GATE_UP, Tile(16, 16, 64, 1, 4, 2))


HOLDING = r"""
import os, sys
from sm120tune.compiler.build import captured_output
print("before")
with captured_output() as noise:
    print("buffered")
    os.write(1, b"to 1\n")
    os.write(2, b"to 2 \xff\n")
    print("late", file=sys.stderr)
    held = noise()
    print("unseen")
try:
    with captured_output():
        print("lost")
        raise KeyError
except KeyError:
    os.write(2, b"shown\n")
print(sorted(held.split("\n")))
"""


def test_both_descriptors_are_held_back_and_given_back() -> None:
    command = [sys.executable, "-c", HOLDING]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120)
    held = sorted(["buffered", "to 1", "to 2 \ufffd", "late", ""])
    assert (done.stdout, done.stderr) == (f"before\n{held}\n", "shown\n")


@pytest.mark.parametrize(
    ("text", "noise", "kind"),
    [
        ("ptxas error: Register allocation failed with register count of '64'", "", FailureKind.REGISTERS),
        ("PassManager::run failed", "error: register allocation failed", FailureKind.REGISTERS),
        ("PassManager::run failed", "error: operand #0 does not dominate this use", FailureKind.COMPILE_CRASH),
    ],
)
def test_kinds(monkeypatch: pytest.MonkeyPatch, text: str, noise: str, kind: FailureKind) -> None:
    def fail(_spec: CompileSpec) -> None:
        os.write(2, f"#loc = something\n{noise}\n".encode())
        raise RuntimeError(text)

    monkeypatch.setattr(build_module, "build", fail)
    failure = compile_facts(CompileSpec(Path(), "", "", 120, PROBLEM, VARIANT))
    assert failure == Failure(kind, f"RuntimeError: {text}" + (f" ({noise})" if noise else ""))


@pytest.fixture
def triton_cache(tmp_path: Path) -> Iterator[Path]:
    """Give a cache folder as a pool's processes have theirs."""
    before = dict(os.environ)
    use_cache_folder(tmp_path / "triton")
    yield tmp_path / "triton"
    for name in set(os.environ) - set(before):
        del os.environ[name]
    os.environ.update(before)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def cut_end(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def empty(file: Path) -> None:
    file.write_bytes(b"")


def garble(file: Path) -> None:
    file.write_bytes(bytes(byte ^ 0xA5 for byte in file.read_bytes()))


def garble_inside(file: Path) -> None:
    """Leave the first 64 bytes, which say how long an ELF file is."""
    data = file.read_bytes()
    file.write_bytes(data[:64] + b"\x5a" * (len(data) - 64))


def remove(file: Path) -> None:
    file.unlink()


def no_fields(file: Path) -> None:
    file.write_text("{}")


def a_list(file: Path) -> None:
    file.write_text("[]")


def less_fields(file: Path) -> None:
    content = json.loads(file.read_text())
    file.write_text(json.dumps({key: content[key] for key in ("target", "hash")}))


METADATA, GROUP, CUBIN = "fused_moe_kernel.json", "__grp__*.json", "*.cubin"
# An object that Triton could not make complains when it is taken away.
unmade = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

DAMAGE: list[tuple[str, Callable[[Path], None]]] = [
    *((METADATA, damage) for damage in (cut, empty, garble, no_fields, a_list, less_fields, remove)),
    *((GROUP, damage) for damage in (cut, garble, remove)),
    *((CUBIN, damage) for damage in (cut, cut_end, empty, garble, garble_inside, remove)),
]


@unmade
@pytest.mark.parametrize(("pattern", "damage"), DAMAGE, ids=lambda value: getattr(value, "__name__", value))
def test_a_damaged_entry_of_tritons_cache_is_compiled_again(
    sglang_0_5_23: Path,
    triton_cache: Path,
    capfd: pytest.CaptureFixture[str],
    pattern: str,
    damage: Callable[[Path], None],
) -> None:
    spec = spec_of(sglang_0_5_23 / "sglang", VARIANT)
    facts = compile_facts(spec)
    assert isinstance(facts, TileFacts), facts
    (cubin,) = triton_cache.glob("*/*.cubin")
    sound = cubin.read_bytes()
    (file,) = triton_cache.glob(f"*/{pattern}")
    damage(file)
    assert compile_facts(spec) == facts
    (cubin,) = triton_cache.glob("*/*.cubin")
    assert cubin.read_bytes() == sound
    assert build(spec).kernel == sound
    assert capfd.readouterr() == ("", "")


@unmade
@pytest.mark.parametrize("damage", [cut, cut_end, empty, garble, remove])
def test_the_launcher_never_gets_a_cut_off_binary(
    sglang_0_5_23: Path, triton_cache: Path, damage: Callable[[Path], None]
) -> None:
    spec = spec_of(sglang_0_5_23 / "sglang", VARIANT)
    sound = build(spec).kernel
    (cubin,) = triton_cache.glob("*/*.cubin")
    damage(cubin)
    assert build(spec).kernel == sound


def test_a_sound_entry_is_used_as_it_is(sglang_0_5_23: Path, triton_cache: Path) -> None:
    spec = spec_of(sglang_0_5_23 / "sglang", VARIANT)
    facts = compile_facts(spec)
    (cubin,) = triton_cache.glob("*/*.cubin")
    before = cubin.stat()
    assert compile_facts(spec) == facts
    assert (cubin.stat().st_mtime_ns, cubin.stat().st_ino) == (before.st_mtime_ns, before.st_ino)
    build(spec, fresh=True)
    assert cubin.stat().st_ino != before.st_ino or cubin.stat().st_mtime_ns != before.st_mtime_ns


SPEC = CompileSpec(Path("/nowhere/sglang"), "source", "3.8.0", 120, PROBLEM, VARIANT)
FAILURE = Failure(FailureKind.COMPILE_CRASH, "PassManager::run failed")


def test_outcomes_are_remembered(tmp_path: Path) -> None:
    cache = CompileCache(tmp_path)
    assert cache.get(SPEC) is None
    cache.put(SPEC, FACTS)
    other = CompileSpec(SPEC.package, "source", "3.8.0", 90, PROBLEM, VARIANT)
    cache.put(other, FAILURE)
    for known in (cache, CompileCache(tmp_path)):
        assert known.get(SPEC) == FACTS
        assert known.get(other) == FAILURE
    # Where SGLang lies does not matter, what it holds does.
    moved = CompileSpec(Path("/elsewhere"), "source", "3.8.0", 120, PROBLEM, VARIANT)
    assert CompileCache(tmp_path).get(moved) == FACTS
    assert cache.triton_folder == tmp_path / "triton"


def test_a_timeout_is_not_remembered_for_the_next_run(tmp_path: Path) -> None:
    cache = CompileCache(tmp_path)
    timeout = Failure(FailureKind.COMPILE_TIMEOUT, "not compiled within 60 s")
    cache.put(SPEC, timeout)
    assert cache.get(SPEC) == timeout
    assert CompileCache(tmp_path).get(SPEC) is None
    assert not list(tmp_path.rglob("*.json"))


def test_every_part_of_a_request_is_in_its_key() -> None:
    others = [
        replace(SPEC, source_hash="other"),
        replace(SPEC, triton_version="3.9.0"),
        replace(SPEC, arch=90),
        replace(SPEC, problem=replace(PROBLEM, hidden=4096)),
        replace(SPEC, problem=replace(PROBLEM, dtype="fp16")),
        replace(SPEC, variant=replace(VARIANT, gemm=Gemm.DOWN)),
        replace(SPEC, variant=replace(VARIANT, tile=replace(VARIANT.tile, num_stages=3))),
        replace(SPEC, variant=replace(VARIANT, tile=replace(VARIANT.tile, USE_TMA=True))),
        replace(SPEC, variant=replace(VARIANT, sorted_intermediate=True)),
        replace(SPEC, variant=replace(VARIANT, gdc_early=True)),
        replace(SPEC, variant=ActivationVariant(16)),
        replace(SPEC, variant=ActivationVariant(16, True)),
        replace(SPEC, variant=ActivationVariant(32, True)),
    ]
    assert len({SPEC.key, *(other.key for other in others)}) == len(others) + 1


DAMAGED_OUTCOMES = [
    "", "{", "[]", "3", "null", "{}", '{"facts": {}}', '{"facts": {"shared_bytes": 1}}', '{"facts": null}',
    '{"failure": {"kind": "bad_luck"}}', '{"failure": {}}', '{"facts": {"shared_bytes": 1, "other": 2}}', "\udcff",
]  # fmt: skip


@pytest.mark.parametrize("text", DAMAGED_OUTCOMES)
def test_a_damaged_outcome_counts_as_absent(tmp_path: Path, text: str) -> None:
    CompileCache(tmp_path).put(SPEC, FACTS)
    (file,) = (tmp_path / "outcomes").rglob("*.json")
    file.write_text(text, errors="surrogateescape")
    cache = CompileCache(tmp_path)
    assert cache.get(SPEC) is None
    cache.put(SPEC, FACTS)
    assert CompileCache(tmp_path).get(SPEC) == FACTS


def test_a_disk_that_takes_nothing_costs_only_the_record(tmp_path: Path) -> None:
    (tmp_path / "outcomes").write_text("in the way")
    cache = CompileCache(tmp_path)
    cache.put(SPEC, FACTS)
    assert cache.get(SPEC) == FACTS
    assert CompileCache(tmp_path).get(SPEC) is None
