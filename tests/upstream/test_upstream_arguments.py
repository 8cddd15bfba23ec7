"""What each parameter is bound to, compared with what SGLang's own launchers pass.

``invoke_fused_moe_kernel`` and ``act_and_mul_triton`` of each release are run from their source with a stand-in for
the jitted kernel, so that the expectation is SGLang's and not written down twice.
"""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from sglang_copies import RELEASES, kernel_path
from wheels import Trees

from sm120tune.measure.align import align
from sm120tune.problem import Gemm, MoEProblem
from sm120tune.tiles import Tile
from sm120tune.upstream import find_sglang
from sm120tune.upstream.arguments import (
    Variant,
    activation_arguments,
    gemm_arguments,
    intermediate_rows,
    launch_flags,
    variant_for,
)
from sm120tune.upstream.source import load_kernels
from sm120tune.upstream.values import Constant, Descriptor, Dynamic, Pointer, Scalar, launch_values

LAUNCH_OPTIONS = {"num_warps", "num_stages", "launch_pdl"}
TRITON_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.int32: "i32"}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}

PLAIN = MoEProblem(experts=8, intermediate=48, hidden=96, topk=3, router_experts=8)
PARALLEL = MoEProblem(experts=4, intermediate=40, hidden=72, topk=2, router_experts=16, dtype="fp16")


@dataclass
class Recorder:
    """Takes the place of a jitted kernel and notes its launches."""

    signature: inspect.Signature
    launches: list[tuple[Any, dict[str, Any], dict[str, Any]]] = field(default_factory=list)

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def launch(*args: Any, **kwargs: Any) -> None:
            options = {name: kwargs.pop(name) for name in LAUNCH_OPTIONS & set(kwargs)}
            bound = self.signature.bind(*args, **kwargs)
            bound.apply_defaults()
            self.launches.append((grid, dict(bound.arguments), options))

        return launch


@dataclass
class MadeDescriptor:
    """Takes the place of a TMA descriptor."""

    base: torch.Tensor
    block_shape: list[int]


@functools.cache
def upstream_code(file: Path, name: str) -> CodeType:
    module = ast.parse(file.read_text())
    wanted = [node for node in module.body if isinstance(node, ast.FunctionDef) and node.name == name]
    future = [node for node in module.body if isinstance(node, ast.ImportFrom) and node.module == "__future__"]
    return compile(ast.Module(body=[*future, *wanted], type_ignores=[]), str(file), "exec")


def upstream_function(file: Path, name: str, namespace: dict[str, Any]) -> Callable[..., None]:
    scope = dict(namespace)
    exec(upstream_code(file, name), scope)
    made: Callable[..., None] = scope[name]
    return made


@dataclass
class Case:
    """One layer's tensors and the two launchers of one release."""

    release: str
    tree: Path
    problem: MoEProblem
    m: int
    block_m: int
    pdl: bool = True

    def __post_init__(self) -> None:
        problem, dtype = self.problem, DTYPES[self.problem.dtype]
        self.kernels = load_kernels(find_sglang(self.tree))
        self.x = torch.zeros(self.m, problem.hidden, dtype=dtype)
        self.w1 = torch.zeros(problem.experts, 2 * problem.intermediate, problem.hidden, dtype=dtype)
        self.w2 = torch.zeros(problem.experts, problem.hidden, problem.intermediate, dtype=dtype)
        self.ids = torch.arange(self.m * problem.topk, dtype=torch.int32).reshape(self.m, -1) % problem.experts
        self.weights = torch.ones(self.m, problem.topk)
        self.alignment = align(self.ids, self.block_m, problem.experts)
        self.out = torch.zeros(self.m, problem.topk, problem.hidden, dtype=dtype)

    def intermediates(self, is_sorted: bool) -> tuple[torch.Tensor, torch.Tensor]:
        rows = intermediate_rows(self.problem, self.m, self.block_m, is_sorted)
        wide = torch.zeros(rows, 2 * self.problem.intermediate, dtype=self.x.dtype)
        return wide, torch.zeros(rows, self.problem.intermediate, dtype=self.x.dtype)

    def upstream_gemm(self, gemm: Gemm, tile: Tile, is_sorted: bool) -> tuple[Any, dict[str, Any], dict[str, Any]]:
        """Launch one GEMM as SGLang's ``fused_experts_impl`` does; return grid, arguments and options."""
        recorder = Recorder(inspect.signature(self.kernels.fused_moe.fn))
        launcher = upstream_function(
            self.tree / "sglang" / kernel_path(self.release),
            "invoke_fused_moe_kernel",
            {
                "triton": triton,
                "torch": torch,
                "tl": tl,
                "padding_size": 0,
                "fused_moe_kernel": recorder,
                "TensorDescriptor": lambda base, _shape, _strides, block: MadeDescriptor(base, list(block)),
                "_get_b_tma_desc_cached": lambda base, n, k: MadeDescriptor(base, [1, n, k]),
                "_set_triton_tma_allocator": lambda: None,
                "is_arch_support_pdl": lambda: self.pdl,
            },
        )
        wide, narrow = self.intermediates(is_sorted)
        up, problem = gemm is Gemm.GATE_UP, self.problem
        config = tile.to_row()
        config.pop("USE_TMA", None)
        optional = {
            "a_use_tma": tile.USE_TMA and not up,
            "b_use_tma": tile.USE_TMA,
            "c_sorted": is_sorted and up,
            "filter_expert": problem.expert_parallel,
        }
        if not up and "router_topk" in inspect.signature(launcher).parameters:
            optional["router_topk"] = problem.topk
        a, b, c = (self.x, self.w1, wide) if up else (narrow, self.w2, self.out)
        compute = tl.bfloat16 if self.x.dtype == torch.bfloat16 else tl.float16
        launcher(
            *(a, b, None, c, None, None, None, self.weights, self.ids),
            *vars(self.alignment).values(),
            *(not up, problem.topk if up else 1, config),
            compute_type=compute,
            use_fp8_w8a8=False,
            use_int8_w8a8=False,
            use_int8_w8a16=False,
            use_int4_w4a16=False,
            per_channel_quant=False,
            block_shape=None,
            **optional,
        )
        (launch,) = recorder.launches
        return launch

    def upstream_activation(self, is_sorted: bool) -> dict[str, Any]:
        recorder = Recorder(inspect.signature(self.kernels.act_and_mul.fn))
        file = self.tree / "sglang" / kernel_path(self.release)
        launcher = upstream_function(file, "act_and_mul_triton", {"act_and_mul_kernel": recorder})
        config = {"BLOCK_SIZE_M": self.block_m}
        launcher(*self.intermediates(is_sorted), config, self.ids, self.alignment.expert_ids, is_sorted, "silu")
        ((grid, arguments, _),) = recorder.launches
        assert grid == (intermediate_rows(self.problem, self.m, self.block_m, is_sorted),)
        return arguments


def check(name: str, ours: Any, theirs: Any, dynamic: dict[str, int]) -> None:
    """Compare one parameter's binding with the value that SGLang passes."""
    match ours:
        case Pointer(dtype=dtype):
            assert isinstance(theirs, torch.Tensor), name
            assert TRITON_NAMES[theirs.dtype] == dtype, name
        case Descriptor(dtype=dtype, block=block):
            assert isinstance(theirs, MadeDescriptor), name
            assert (TRITON_NAMES[theirs.base.dtype], tuple(theirs.block_shape)) == (dtype, block), name
        case Dynamic():
            assert theirs == dynamic[name], name
        case Scalar(value=value):
            assert type(theirs) is int, name
            assert theirs == value, name
        case Constant(value=value):
            assert theirs == value, name
            assert (theirs is None) == (value is None), name


@pytest.mark.parametrize("problem", [PLAIN, PARALLEL], ids=str)
@pytest.mark.parametrize("gemm", list(Gemm))
@pytest.mark.parametrize("release", RELEASES)
def test_gemm_arguments_are_those_of_sglang(sglang_trees: Trees, release: str, gemm: Gemm, problem: MoEProblem) -> None:
    # 171 rows of A for gate_up; 171 * topk, and more with padding, for down: both sides of 512.
    for m, is_sorted in ((1, False), (171, False), (171, True), (600, False)):
        case = Case(release, sglang_trees[release], problem, m, block_m=16)
        kernel = case.kernels.fused_moe
        down_tma = is_sorted and gemm is Gemm.DOWN
        for tile in (Tile(16, 32, 24, 4, 8, 2, USE_TMA=down_tma), Tile(16, 64, 32, 1, 4, 5, USE_TMA=down_tma)):
            _, theirs, options = case.upstream_gemm(gemm, tile, is_sorted)
            flags = launch_flags(kernel, 120)
            variant = variant_for(problem, gemm, tile, m=m, sorted_intermediate=is_sorted, pdl=flags.pdl)
            ours = gemm_arguments(case.kernels, problem, variant, 120)
            dynamic = {"EM": case.alignment.sorted_token_ids.shape[0], "num_valid_tokens": case.ids.numel()}
            assert list(ours) == list(theirs)
            for name in theirs:
                check(name, ours[name], theirs[name], dynamic)
            pdl = {"launch_pdl": True} if flags.pdl else {}
            assert options == {"num_warps": tile.num_warps, "num_stages": tile.num_stages, **pdl}


@pytest.mark.parametrize("release", ["0.5.18", "0.5.23"])
def test_up_tma_makes_b_alone_a_descriptor(sglang_trees: Trees, release: str) -> None:
    case = Case(release, sglang_trees[release], PLAIN, m=7, block_m=16)
    tile = Tile(16, 32, 32, 1, USE_TMA=True)
    _, theirs, _ = case.upstream_gemm(Gemm.GATE_UP, tile, is_sorted=False)
    ours = gemm_arguments(case.kernels, PLAIN, Variant(Gemm.GATE_UP, tile, gdc_early=True), 120)
    assert theirs["a_desc"] is None
    assert isinstance(ours["b_desc"], Descriptor)
    for name in theirs:
        check(name, ours[name], theirs[name], {"EM": theirs["EM"], "num_valid_tokens": 21})


def test_pdl_is_off_on_older_cards(sglang_trees: Trees) -> None:
    case = Case("0.5.23", sglang_trees["0.5.23"], PLAIN, m=7, block_m=16, pdl=False)
    tile = Tile(16, 32, 32, 1)
    _, theirs, options = case.upstream_gemm(Gemm.GATE_UP, tile, is_sorted=False)
    kernel = case.kernels.fused_moe
    assert not launch_flags(kernel, 89).pdl
    ours = gemm_arguments(case.kernels, PLAIN, Variant(Gemm.GATE_UP, tile), 89)
    assert (ours["USE_GDC"], ours["GDC_EARLY"]) == (Constant(False), Constant(False))
    assert (theirs["USE_GDC"], theirs["GDC_EARLY"]) == (False, False)
    assert "launch_pdl" not in options


@pytest.mark.parametrize("problem", [PLAIN, PARALLEL], ids=str)
@pytest.mark.parametrize("is_sorted", [False, True])
@pytest.mark.parametrize("release", RELEASES)
def test_activation_arguments_are_those_of_sglang(
    sglang_trees: Trees, release: str, is_sorted: bool, problem: MoEProblem
) -> None:
    case = Case(release, sglang_trees[release], problem, m=9, block_m=32)
    theirs = case.upstream_activation(is_sorted)
    ours = activation_arguments(case.kernels.act_and_mul, problem, 32 if is_sorted else 0, is_sorted)
    assert list(ours) == list(theirs)
    if not problem.expert_parallel and not is_sorted and "HAS_EXPERT_FILTER" in theirs:
        # Where no expert is filtered SGLang runs another kernel, which looks at no ids; ours skips them too.
        theirs["HAS_EXPERT_FILTER"] = False
    for name in theirs:
        check(name, ours[name], theirs[name], {})


def test_launch_values_come_by_name(sglang_trees: Trees) -> None:
    """The order of the kernel's parameters decides, whatever the order of what the launcher knows."""
    kernels = load_kernels(find_sglang(sglang_trees["0.5.23"]))
    kernel = kernels.fused_moe
    tile = Tile(16, 32, 24, 1, USE_TMA=True)
    arguments = gemm_arguments(kernels, PLAIN, Variant(Gemm.DOWN, tile, sorted_intermediate=True), 120)
    pointers = [name for name, argument in arguments.items() if isinstance(argument, Pointer)]
    dynamic = {name: f"<{name}>" for name in ["num_valid_tokens", "EM", *reversed(pointers)]}
    values = launch_values(arguments, dynamic, lambda tensor, block: ("descriptor", tensor, block))
    named = dict(zip(kernel.arg_names, values, strict=True))
    assert {name: named[name] for name in dynamic} == dynamic
    assert named["a_desc"] == ("descriptor", "<a_ptr>", (16, 24))
    assert named["b_desc"] == ("descriptor", "<b_ptr>", (1, 32, 24))
    assert (named["N"], named["K"], named["top_k"], named["bias_ptr"]) == (96, 48, 1, None)


def test_gdc_early_follows_the_rows_of_a() -> None:
    tile = Tile(16, 32, 32, 1)

    def early(gemm: Gemm, m: int, *, is_sorted: bool = False, pdl: bool = True) -> bool:
        return variant_for(PLAIN, gemm, tile, m=m, sorted_intermediate=is_sorted, pdl=pdl).gdc_early

    assert [early(Gemm.GATE_UP, m) for m in (1, 512, 513)] == [True, True, False]
    assert [early(Gemm.DOWN, m) for m in (1, 170, 171)] == [True, True, False]
    # Sorted, 8 + 1 groups of up to 15 padding rows come on top: 3 * 125 + 135 = 510.
    assert [early(Gemm.DOWN, m, is_sorted=True) for m in (125, 126)] == [True, False]
    assert not early(Gemm.GATE_UP, 1, pdl=False)


@pytest.mark.parametrize("m", [1, 2, 3, 100])
def test_intermediate_rows(m: int) -> None:
    assert intermediate_rows(PLAIN, m, 64, False) == 3 * m
    # SGLang: total_tokens = M * topk + min(M * topk, E + 1) * (BLOCK_SIZE_M - 1)
    assert intermediate_rows(PLAIN, m, 64, True) == {1: 3 + 3 * 63, 2: 6 + 6 * 63, 3: 9 + 9 * 63, 100: 300 + 9 * 63}[m]
