from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest
from sglang_copies import RELEASES, edit, kernel_path, slim_copy
from wheels import Trees

from sm120tune.problem import Gemm, MoEProblem
from sm120tune.tiles import Tile
from sm120tune.upstream import UpstreamError, find_sglang
from sm120tune.upstream.arguments import Variant, activation_arguments, gemm_arguments
from sm120tune.upstream.source import Kernels, load_kernels
from sm120tune.upstream.values import Constant

PROBLEM = MoEProblem(experts=8, intermediate=64, hidden=96, topk=2, router_experts=8)
VARIANT = Variant(Gemm.GATE_UP, Tile(16, 32, 64, 1))
LAST_PARAMETER = "    ROUTER_TOPK: tl.constexpr,\n"
KERNEL = "def fused_moe_kernel("


def load_copy(tree: Path, into: Path, *edits: tuple[str, str], release: str = "0.5.23", after: str = KERNEL) -> Kernels:
    package = slim_copy(tree, release, into)
    for old, new in edits:
        edit(package / kernel_path(release), old, new, after=after)
    return load_kernels(find_sglang(package))


def functions(file: Path) -> dict[str, ast.FunctionDef]:
    return {node.name: node for node in ast.parse(file.read_text()).body if isinstance(node, ast.FunctionDef)}


IMPORTS = """
import json, sys
from pathlib import Path
from sm120tune.upstream import find_sglang
from sm120tune.upstream.source import load_kernels
said = {}
for folder in sys.argv[1:]:
    kernels = load_kernels(find_sglang(Path(folder)))
    said[folder] = [kernels.fused_moe.arg_names, kernels.act_and_mul.arg_names]
names = {name.split(".")[0] for name in sys.modules}
print(json.dumps({"arguments": said, "imported": sorted(names & {"sglang", "torch", "triton"})}))
"""


def test_neither_sglang_nor_torch_is_imported(sglang_trees: Trees) -> None:
    folders = {release: str(sglang_trees[release]) for release in RELEASES}
    command = [sys.executable, "-c", IMPORTS, *folders.values()]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["imported"] == ["triton"]
    counts = {release: [len(names) for names in said["arguments"][folder]] for release, folder in folders.items()}
    assert counts == {
        "0.5.8.post1": [47, 7],
        "0.5.10": [49, 7],
        "0.5.12": [51, 9],
        "0.5.15": [53, 9],
        "0.5.18": [54, 10],
        "0.5.23": [57, 10],
    }


@pytest.mark.parametrize("release", RELEASES)
def test_kernels_are_those_of_the_file(sglang_trees: Trees, release: str) -> None:
    file = sglang_trees[release] / "sglang" / kernel_path(release)
    loaded = load_kernels(find_sglang(sglang_trees[release]))
    for kernel, name in ((loaded.fused_moe, "fused_moe_kernel"), (loaded.act_and_mul, "act_and_mul_kernel")):
        node = functions(file)[name]
        assert kernel.arg_names == [argument.arg for argument in node.args.args]
        # Triton quotes the file when it complains, and takes the kernel's text from it.
        assert Path(kernel.fn.__code__.co_filename) == file.resolve()
        assert kernel.fn.__code__.co_firstlineno == node.decorator_list[0].lineno
        text = ast.get_source_segment(file.read_text(), node)
        assert text is not None
        assert kernel.src.strip() == text.strip()


@pytest.mark.parametrize("release", RELEASES)
def test_every_parameter_is_bound(sglang_trees: Trees, release: str) -> None:
    kernels = load_kernels(find_sglang(sglang_trees[release]))
    named = functions(sglang_trees[release] / "sglang" / kernel_path(release))
    tma = Tile(16, 32, 64, 1, USE_TMA=True)
    for arch in (80, 90, 120):
        for variant in (VARIANT, Variant(Gemm.DOWN, tma, sorted_intermediate=True, gdc_early=True)):
            bound = gemm_arguments(kernels, PROBLEM, variant, arch)
            assert list(bound) == [argument.arg for argument in named["fused_moe_kernel"].args.args]
    for is_sorted in (False, True):
        bound = activation_arguments(kernels.act_and_mul, PROBLEM, 16, is_sorted)
        assert list(bound) == [argument.arg for argument in named["act_and_mul_kernel"].args.args]


@pytest.mark.parametrize("release", RELEASES)
def test_an_unknown_parameter_is_an_error_that_names_it(sglang_trees: Trees, tmp_path: Path, release: str) -> None:
    new = ("    # Meta-parameters\n", "    flux_capacitor,\n    # Meta-parameters\n")
    kernels = load_copy(sglang_trees[release], tmp_path, new, release=release)
    assert "flux_capacitor" in kernels.fused_moe.arg_names
    with pytest.raises(UpstreamError, match="fused_moe_kernel has a parameter 'flux_capacitor'"):
        gemm_arguments(kernels, PROBLEM, VARIANT, 120)


def test_an_unknown_parameter_of_the_activation(sglang_trees: Trees, tmp_path: Path) -> None:
    new = ("    hidden_size,\n", "    hidden_size,\n    flux_capacitor,\n")
    kernels = load_copy(sglang_trees["0.5.23"], tmp_path, new, after="def act_and_mul_kernel(")
    with pytest.raises(UpstreamError, match="act_and_mul_kernel has a parameter 'flux_capacitor'"):
        activation_arguments(kernels.act_and_mul, PROBLEM, 16, False)


def test_an_unknown_parameter_with_a_default_keeps_it(sglang_trees: Trees, tmp_path: Path) -> None:
    new = (LAST_PARAMETER, LAST_PARAMETER + "    FLUX: tl.constexpr = 88,\n")
    kernels = load_copy(sglang_trees["0.5.23"], tmp_path, new)
    bound = gemm_arguments(kernels, PROBLEM, VARIANT, 120)
    assert bound["FLUX"] == Constant(88)
    assert list(bound) == kernels.fused_moe.arg_names


@pytest.mark.parametrize("name", ["fused_moe_kernel", "act_and_mul_kernel"])
def test_a_file_without_the_kernel(sglang_trees: Trees, tmp_path: Path, name: str) -> None:
    package = slim_copy(sglang_trees["0.5.23"], "0.5.23", tmp_path)
    file = package / kernel_path("0.5.23")
    edit(file, f"def {name}(", f"def {name}_v2(")
    with pytest.raises(UpstreamError, match=rf"no @triton\.jit function {name};") as raised:
        load_kernels(find_sglang(package))
    assert str(file) in str(raised.value)


def test_a_kernel_that_is_no_longer_jitted(sglang_trees: Trees, tmp_path: Path) -> None:
    with pytest.raises(UpstreamError, match="function fused_moe_kernel;"):
        load_copy(sglang_trees["0.5.23"], tmp_path, ("@triton.jit\ndef fused_moe_kernel(", KERNEL), after="")


def test_a_kernel_that_needs_a_global_of_its_module(sglang_trees: Trees, tmp_path: Path) -> None:
    uses = ("    offs_k = tl.arange(0, BLOCK_SIZE_K)\n", "    offs_k = tl.arange(0, BLOCK_SIZE_K) * _STRETCH\n")
    with pytest.raises(UpstreamError, match="fused_moe_kernel uses '_STRETCH'"):
        load_copy(sglang_trees["0.5.23"], tmp_path, uses)


def test_a_file_that_is_not_python(sglang_trees: Trees, tmp_path: Path) -> None:
    with pytest.raises(UpstreamError, match=r"not readable as Python: .* in line \d+"):
        load_copy(sglang_trees["0.5.23"], tmp_path, (KERNEL, "def fused_moe_kernel(("))


def test_helpers_that_the_kernels_call_come_along(sglang_trees: Trees, tmp_path: Path) -> None:
    plain = load_copy(sglang_trees["0.5.23"], tmp_path / "plain")
    names = set(plain.fused_moe.fn.__globals__)
    assert {"write_zeros_to_output", "_apply_activation", "tanh", "tl"} <= names
    assert not names & {"torch", "invoke_fused_moe_kernel", "_is_hip", "should_enable_swap_ab"}


def test_source_hash_belongs_to_the_kernels(sglang_trees: Trees, tmp_path: Path) -> None:
    tree = sglang_trees["0.5.23"]

    def hash_with(name: str, *edits: tuple[str, str], after: str = KERNEL) -> str:
        return load_copy(tree, tmp_path / name, *edits, after=after).source_hash

    plain = load_kernels(find_sglang(tree)).source_hash
    assert len(plain) == 64
    # The same text elsewhere, or with changes around the kernels: nothing that was tuned became stale.
    assert hash_with("copy") == plain
    assert hash_with("comment", ("import torch\n", "import torch  # a comment\n"), after="") == plain
    assert hash_with("launcher", ("    assert sorted_token_ids.stride(0) == 1\n", ""), after="def invoke_f") == plain
    other_kernel = (KERNEL[:-1] + "_gptq_awq(\n", KERNEL[:-1] + "_gptq_awq(\n    extra,\n")
    assert hash_with("gptq", other_kernel, after="") == plain
    changed = [
        hash_with("body", ("for k_start in range(0, K,", "for k_start in range(0, K + 0,")),
        hash_with("parameter", (LAST_PARAMETER, LAST_PARAMETER + "    NEW: tl.constexpr = 0,\n")),
        hash_with("helper", ("dtype=compute_type", "dtype=tl.float32"), after="def write_zeros_to_output("),
        hash_with("activation", ("= hidden_size // 2", "= hidden_size >> 1"), after="def act_and_mul_kernel("),
    ]
    assert len({plain, *changed}) == 5


def test_releases_have_different_hashes(sglang_trees: Trees) -> None:
    hashes = {load_kernels(find_sglang(sglang_trees[release])).source_hash for release in RELEASES}
    assert len(hashes) == len(RELEASES)
