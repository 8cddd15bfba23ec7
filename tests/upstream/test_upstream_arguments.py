"""What each parameter is bound to, compared with what SGLang's own launchers pass.

``invoke_fused_moe_kernel`` and ``act_and_mul_triton`` of each release are run from their source with a stand-in for
the jitted kernel, so that the expectation is SGLang's and not written down twice.
"""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType
from typing import Any, Optional

import pytest
import torch
import triton
import triton.language as tl
from sglang_copies import RELEASES, kernel_path
from wheels import Trees

from sm120tune.compiler.build import _options as build_options
from sm120tune.compiler.spec import CompileSpec, QuantizeVariant
from sm120tune.measure.align import align
from sm120tune.measure.stored import compute_dtype, operand_dtype, quantize_rows, random_weights
from sm120tune.problem import Gemm, MoEProblem
from sm120tune.quantization import DTYPES
from sm120tune.search_space import VALUES
from sm120tune.tiles import Tile
from sm120tune.upstream import find_sglang
from sm120tune.upstream.arguments import (
    Variant,
    activation_arguments,
    gemm_arguments,
    intermediate_rows,
    launch_flags,
    quantize_arguments,
    variant_for,
)
from sm120tune.upstream.scales import quantization_group
from sm120tune.upstream.source import load_kernels, load_quantize
from sm120tune.upstream.values import Constant, Descriptor, Dynamic, Pointer, Real, Scalar, launch_values

LAUNCH_OPTIONS = {"num_warps", "num_stages", "launch_pdl"}
TRITON_NAMES = {
    torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.int32: "i32",
    torch.float8_e4m3fn: "fp8e4nv", torch.int8: "i8", torch.uint8: "u8",
}  # fmt: skip

PLAIN = MoEProblem(experts=8, intermediate=48, hidden=96, topk=3, router_experts=8)
PARALLEL = MoEProblem(experts=4, intermediate=40, hidden=72, topk=2, router_experts=16, dtype="fp16")

QUANTIZED = [
    MoEProblem(experts=4, intermediate=128, hidden=384, topk=2, router_experts=4, dtype=dtype, **how)  # type: ignore[arg-type]
    for dtype, how in (
        ("fp8_w8a8", {}),
        ("fp8_w8a8", {"per_channel_quant": True}),
        ("fp8_w8a8", {"block_shape": (128, 128)}),
        ("fp8_w8a8", {"block_shape": (64, 128)}),
        ("int8_w8a8", {"per_channel_quant": True}),
        ("int8_w8a8", {"block_shape": (64, 128)}),
        ("int8_w8a16", {}),
        ("int8_w8a16", {"block_shape": (0, 64)}),
        ("int8_w8a16", {"block_shape": (0, 128), "zero_points": True}),
        ("int4_w4a16", {"block_shape": (0, 32)}),
        ("int4_w4a16", {"block_shape": (0, 128), "zero_points": True}),
    )
]


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Keep torch from spreading small tensors over cores where other tests run: its threads wait for each other."""
    count = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(count)


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


def upstream_swap_ab(tree: Path, release: str, arch: int) -> Callable[..., Any]:
    """Return SGLang's own decision on a card of an architecture, one that is no H20."""
    return upstream_function(
        tree / "sglang" / kernel_path(release),
        "should_enable_swap_ab",
        {
            "functools": functools,
            "_is_cuda": True,
            "is_batch_invariant_mode_enabled": lambda: False,
            "is_sm90_supported": lambda: arch == 90,
            "get_device_name": lambda: "NVIDIA H200",
        },
    )


@dataclass
class Case:
    """One layer's tensors and the two launchers of one release."""

    release: str
    tree: Path
    problem: MoEProblem
    m: int
    block_m: int
    pdl: bool = True
    arch: int = 120

    def __post_init__(self) -> None:
        problem, dtype = self.problem, compute_dtype(self.problem.quantization)
        self.stored = stored = problem.quantization
        self.kernels = load_kernels(find_sglang(self.tree))
        self.x = torch.zeros(self.m, problem.hidden, dtype=dtype)
        generator = torch.Generator().manual_seed(0)
        e, n, k = problem.experts, problem.intermediate, problem.hidden
        self.w1 = random_weights(stored, e, 2 * n, k, generator)
        self.w2 = random_weights(stored, e, k, n, generator)
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
        grouped = Recorder(inspect.signature(self.kernels.grouped.fn))
        stored = self.stored

        def quantized(a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            made = quantize_rows(a, stored)
            assert made.scales is not None
            return made.codes, made.scales

        def by_token_or_tensor(
            a: torch.Tensor, scale: torch.Tensor | None, use_per_token_if_dynamic: bool
        ) -> tuple[torch.Tensor, torch.Tensor]:
            codes, scales = quantized(a)
            # One scale per token where the weights are channel-wise, else one number.
            assert list(scales.shape) == ([a.shape[0], 1] if use_per_token_if_dynamic else [1])
            assert scale is None
            return codes, scales

        def by_token(a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            codes, scales = quantized(a)
            assert list(scales.shape) == [a.shape[0], 1]
            return codes, scales

        def by_group(a: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
            codes, scales = quantized(a)
            assert list(scales.shape) == [a.shape[0], a.shape[1] // group]
            return codes, scales

        launcher = upstream_function(
            self.tree / "sglang" / kernel_path(self.release),
            "invoke_fused_moe_kernel",
            {
                "fused_moe_kernel_gptq_awq": grouped,
                "should_enable_swap_ab": upstream_swap_ab(self.tree, self.release, self.arch),
                "_is_cuda": True,
                "scaled_fp8_quant": by_token_or_tensor,
                "per_token_quant_int8": by_token,
                "sglang_per_token_group_quant_fp8": by_group,
                "sglang_per_token_group_quant_int8": by_group,
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
        flags = {f"use_{name}": name == problem.dtype for name in DTYPES if name not in ("bf16", "fp16")}
        launcher(
            *(a, b.codes, None, c, None, b.scales, b.zeros, self.weights, self.ids),
            *vars(self.alignment).values(),
            *(not up, problem.topk if up else 1, config),
            compute_type=compute,
            per_channel_quant=problem.per_channel_quant,
            block_shape=list(problem.block_shape) if problem.block_shape else None,
            **flags,
            **optional,
        )
        is_grouped = self.kernels.gemm_kernel(stored) is self.kernels.grouped
        (launch,) = grouped.launches if is_grouped else recorder.launches
        assert len(grouped.launches) + len(recorder.launches) == 1
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
        case Real(value=value):
            assert float(theirs) == value, name
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


@pytest.mark.parametrize("problem", QUANTIZED, ids=str)
@pytest.mark.parametrize("release", RELEASES)
def test_quantized_arguments_are_those_of_sglang(sglang_trees: Trees, release: str, problem: MoEProblem) -> None:
    # On SM90 the first tile swaps A and B; 600 rows of A are past the early start of 0.5.23; 256 divides no K.
    narrow, wide = Tile(16, 64, 128, 4, 8, 2), Tile(16, 128, 256, 1)
    for gemm, (m, tile, arch) in itertools.product(Gemm, ((3, narrow, 120), (3, narrow, 90), (600, wide, 120))):
        case = Case(release, sglang_trees[release], problem, m, block_m=16, arch=arch)
        flags = launch_flags(case.kernels.gemm_kernel(problem.quantization), arch)
        _, theirs, options = case.upstream_gemm(gemm, tile, is_sorted=False)
        variant = variant_for(problem, gemm, tile, m=m, sorted_intermediate=False, pdl=flags.pdl)
        ours = gemm_arguments(case.kernels, problem, variant, arch)
        dynamic = {"EM": case.alignment.sorted_token_ids.shape[0], "num_valid_tokens": case.ids.numel()}
        assert list(ours) == list(theirs)
        for name in theirs:
            check(name, ours[name], theirs[name], dynamic)
        pdl = {"launch_pdl": True} if flags.pdl else {}
        assert options == {"num_warps": tile.num_warps, "num_stages": tile.num_stages, **pdl}


@pytest.mark.parametrize("release", RELEASES)
def test_down_tma_of_blocks_is_that_of_sglang(sglang_trees: Trees, release: str) -> None:
    problem, tile = QUANTIZED[2], Tile(16, 64, 128, 1, USE_TMA=True)
    case = Case(release, sglang_trees[release], problem, 9, block_m=16)
    _, theirs, _ = case.upstream_gemm(Gemm.DOWN, tile, is_sorted=True)
    variant = variant_for(
        problem, Gemm.DOWN, tile, m=9, sorted_intermediate=True, pdl=launch_flags(case.kernels.fused_moe, 120).pdl
    )
    ours = gemm_arguments(case.kernels, problem, variant, 120)
    assert isinstance(ours["a_desc"], Descriptor)
    assert ours["a_desc"].dtype == "fp8e4nv"
    for name in theirs:
        check(name, ours[name], theirs[name], {"EM": theirs["EM"], "num_valid_tokens": 18})


@pytest.mark.parametrize("release", RELEASES)
def test_a_and_b_are_swapped_where_sglang_swaps_them(sglang_trees: Trees, release: str) -> None:
    kernels = load_kernels(find_sglang(sglang_trees[release]))
    swapped = set()
    for arch, m, n in itertools.product((89, 90, 100, 120), VALUES["BLOCK_SIZE_M"], VALUES["BLOCK_SIZE_N"]):
        theirs = upstream_swap_ab(sglang_trees[release], release, arch)(m, n)
        assert kernels.swaps_ab(arch, m, n) is theirs
        swapped |= {(arch, m, n)} if theirs else set()
    assert (120, 16, 64) not in swapped
    wide = {(90, m, n) for m in (16, 32) for n in (64, 128, 256)}
    # The first release swaps on an H20 alone.
    assert swapped == (set() if release == "0.5.8.post1" else wide)
    # Only fp8 is swapped.
    for problem, is_fp8 in ((QUANTIZED[1], True), (QUANTIZED[4], False), (PLAIN, False)):
        ours = gemm_arguments(kernels, problem, Variant(Gemm.DOWN, Tile(16, 64, 128, 1)), 90)
        assert ours["swap_ab"] == Constant(is_fp8 and bool(swapped))


@pytest.mark.parametrize("problem", [p for p in QUANTIZED if p.quantization.operand_bytes == 1][1:], ids=str)
@pytest.mark.parametrize("release", RELEASES)
def test_quantize_arguments_are_those_of_sglang(sglang_trees: Trees, release: str, problem: MoEProblem) -> None:
    tree = find_sglang(sglang_trees[release])
    kernel, stored = load_quantize(tree), problem.quantization
    recorder = Recorder(inspect.signature(kernel.fn))
    dtype = operand_dtype(stored)
    x = torch.zeros(5, problem.intermediate, dtype=torch.bfloat16)
    launcher = upstream_function(
        tree.quantize_file,
        "_per_token_group_quant_8bit_raw",
        {
            "torch": torch,
            "triton": triton,
            "Tuple": tuple,
            "Optional": Optional,
            "fp8_dtype": torch.float8_e4m3fn,
            "_is_hip": False,
            "create_per_token_group_quant_fp8_output_scale": lambda x_shape, group_size, **_more: torch.zeros(
                x_shape[0], x_shape[1] // group_size
            ),
            "_per_token_group_quant_8bit": recorder,
        },
    )
    group = quantization_group(stored, x.shape[1])
    launcher(x, group, dtype=dtype)
    ((grid, theirs, options),) = recorder.launches
    assert grid == (x.numel() // group,)
    ours = quantize_arguments(kernel, stored, x.shape[1])
    assert list(ours) == list(theirs)
    for name in theirs:
        check(name, ours[name], theirs[name], {})
    source = CompileSpec(tree.package, "", triton.__version__, 120, problem, QuantizeVariant(x.shape[1]))
    assert build_options(source, kernel) == options


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
