"""Launch compiled kernels over a workload, in SGLang's order and with SGLang's arguments."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch

from sm120tune.compiler.build import arguments_of, build
from sm120tune.compiler.spec import ActivationVariant, AnyVariant, KernelSource, QuantizeVariant
from sm120tune.measure.align import Alignment
from sm120tune.measure.stored import quantize_static
from sm120tune.measure.workload import Operands
from sm120tune.problem import Gemm, MoEProblem
from sm120tune.quantization import Granularity
from sm120tune.tiles import Tile, TilePair
from sm120tune.upstream.arguments import intermediate_rows, launch_flags, variant_for
from sm120tune.upstream.locate import find_sglang
from sm120tune.upstream.source import load_kernels
from sm120tune.upstream.values import Argument, launch_values

_LOADED_MAX = 256


class Launcher:
    """Loads binaries on the current CUDA device and launches them; keeps the last few hundred loaded."""

    def __init__(self, source: KernelSource) -> None:
        self._source = source
        self.problem: MoEProblem = source.template.problem
        self._kernels = load_kernels(find_sglang(source.template.package))
        self._pdl = launch_flags(self._kernels.gemm_kernel(self.problem.quantization), source.template.arch).pdl
        self._loaded: OrderedDict[AnyVariant, tuple[Any, Mapping[str, Argument]]] = OrderedDict()

    def rows(self, m: int, block_size_m: int, sorted_intermediate: bool) -> int:
        """Return the intermediate's rows for M tokens."""
        return intermediate_rows(self.problem, m, block_size_m, sorted_intermediate)

    def gemm(self, gemm: Gemm, tile: Tile, operands: Operands, alignment: Alignment, *, sorted_rows: bool) -> None:
        """Launch one GEMM on the current stream."""
        m = operands.hidden.codes.shape[0]
        variant = variant_for(self.problem, gemm, tile, m=m, sorted_intermediate=sorted_rows, pdl=self._pdl)
        compiled, arguments = self._load(variant)
        up = gemm is Gemm.GATE_UP
        weights = operands.w1 if up else operands.w2
        a = operands.hidden if up else operands.down_in
        padded = alignment.sorted_token_ids.shape[0]
        dynamic = {
            "a_ptr": a.codes,
            "a_scale_ptr": a.scales,
            "b_ptr": weights.codes,
            "b_scale_ptr": weights.scales,
            "b_zp_ptr": weights.zeros,
            "c_ptr": operands.gate_up_out if up else operands.down_out,
            "topk_weights_ptr": operands.route.weights,
            "sorted_token_ids_ptr": alignment.sorted_token_ids,
            "expert_ids_ptr": alignment.expert_ids,
            "num_tokens_post_padded_ptr": alignment.num_tokens_post_padded,
            "EM": padded,
            "num_valid_tokens": operands.route.ids.numel(),
        }
        blocks_m = -(-padded // tile.BLOCK_SIZE_M)
        blocks_n = -(-weights.codes.shape[1] // tile.BLOCK_SIZE_N)
        compiled[(blocks_m * blocks_n, 1, 1)](*launch_values(arguments, dynamic, _descriptor))

    def activation(self, block_size_m: int, operands: Operands, alignment: Alignment, *, sorted_rows: bool) -> None:
        """Launch SiLU-and-multiply on the current stream, one program per row of the intermediate.

        Without a gate it is torch's squared ReLU, two kernels, as in SGLang's own call.
        """
        if not self.problem.gated:
            torch.clamp_min(operands.gate_up_out, 0.0, out=operands.activated)
            torch.square(operands.activated, out=operands.activated)
            return
        variant = ActivationVariant(block_size_m if sorted_rows else 0, sorted_rows)
        compiled, arguments = self._load(variant)
        dynamic = {
            "gateup_output": operands.gate_up_out,
            "down_input": operands.activated,
            "expert_ids_ptr": alignment.expert_ids if sorted_rows else operands.route.ids,
        }
        compiled[(operands.activated.shape[0], 1, 1)](*launch_values(arguments, dynamic, _descriptor))

    def quantize(self, operands: Operands) -> None:
        """Quantize the activated rows for the down GEMM; nothing where A is not quantized."""
        stored, activated, down_in = self.problem.quantization, operands.activated, operands.down_in
        if stored.operand_bytes != 1:
            return
        assert down_in.scales is not None
        if stored.granularity is Granularity.TENSOR:
            # The GEMM is done with gate_up's output, which is twice as wide.
            scaled = operands.gate_up_out[:, : activated.shape[1]]
            quantize_static(activated, scaled, down_in.codes, down_in.scales, stored)
            return
        compiled, arguments = self._load(QuantizeVariant(activated.shape[1]))
        dynamic = {"y_ptr": activated, "y_q_ptr": down_in.codes, "y_s_ptr": down_in.scales}
        compiled[(down_in.scales.numel(), 1, 1)](*launch_values(arguments, dynamic, _descriptor))

    def chain(self, pair: TilePair, operands: Operands, alignment: Alignment) -> None:
        """Launch gate_up, activation, quantization of its result and down as SGLang does for this pair."""
        sorted_rows = pair.down.USE_TMA
        self.gemm(Gemm.GATE_UP, pair.gate_up, operands, alignment, sorted_rows=sorted_rows)
        self.activation(pair.block_size_m, operands, alignment, sorted_rows=sorted_rows)
        self.quantize(operands)
        self.gemm(Gemm.DOWN, pair.down, operands, alignment, sorted_rows=sorted_rows)

    def _load(self, variant: AnyVariant) -> tuple[Any, Mapping[str, Argument]]:
        found = self._loaded.get(variant)
        if found is None:
            spec = self._source.spec(variant)
            found = (build(spec), arguments_of(spec, self._kernels)[1])
            self._loaded[variant] = found
            if len(self._loaded) > _LOADED_MAX:
                self._loaded.popitem(last=False)
        else:
            self._loaded.move_to_end(variant)
        return found


def _descriptor(tensor: torch.Tensor, block: tuple[int, ...]) -> Any:
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), list(block))
