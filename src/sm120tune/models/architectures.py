"""Which fields of a config hold what, and when SGLang fuses shared experts: one entry for each class that SGLang runs.

Read off SGLang 0.5.23: ``source`` names the file in ``sglang/srt/models`` whose FusedMoE call decides. Field names
after the first of a tuple are those that transformers 5.24.0 maps to it (``attribute_map``). docs/models.md shows the
table with what was read where.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

Names = tuple[str, ...]

VALIDATED_CLASSES = ("DeepseekV3ForCausalLM", "GlmMoeDsaForCausalLM")
"""What ``fused_shared_experts_architecture`` compares the config's name with: DeepSeek-V3.2's is another."""


class Fusion(enum.Enum):
    """When shared experts become routed ones under plain tensor parallelism."""

    NEVER = "never"
    ALL = "n_shared_experts of them"
    SINGLE = "when there is exactly one"
    VALIDATED = (
        "when there is exactly one, beside 256 routed experts (or 384 and quark), in a class of VALIDATED_CLASSES"
    )
    SAME_WIDTH = "when it is as wide as a routed expert; under expert parallelism too"


@dataclass(frozen=True)
class Architecture:
    """How the experts of one class are described by its config; of several names the first that is there counts."""

    source: str
    experts: Names
    inter: Names
    topk: Names = ("num_experts_per_tok",)
    hidden: Names = ("hidden_size",)
    fusion: Fusion = Fusion.NEVER
    activation: str = "silu"
    gated: bool = True
    switch: str | None = None
    """A field that must be true for the model to have experts at all."""
    unquantized_elsewhere: str | None = None
    """The kernels that SGLang runs for unquantized and ModelOpt weights instead of its Triton kernel."""
    notes: tuple[str, ...] = ()

    @property
    def fields(self) -> Names:
        """Every field that is looked for."""
        return self.experts + self.inter + self.hidden + self.topk


_ROUTED = ("n_routed_experts", "num_local_experts", "num_experts")
_NUMBERED = ("num_experts", "num_local_experts")
_LOCAL = ("num_local_experts", "num_experts")
_MOE = ("moe_intermediate_size",)
_DENSE = ("intermediate_size",)
"""Some configs have no other kind of layer, so the plain name means an expert's size."""

_DEEPSEEK = Architecture("deepseek_v2.py", _ROUTED, _MOE, fusion=Fusion.VALIDATED)
_GLM_DSA = Architecture("glm4_moe.py, deepseek_v2.py", _ROUTED, _MOE, fusion=Fusion.VALIDATED)
_QWEN_MOE = Architecture("qwen3_moe.py", _NUMBERED, _MOE)
_QWEN35 = Architecture("qwen3_5.py, qwen2_moe.py", _NUMBERED, _MOE)
_LLAMA4 = Architecture(
    "llama4.py", _LOCAL, _DENSE, notes=("the router's weight is multiplied in before gate_up, not after down",)
)
_GEMMA4 = Architecture(
    "gemma4_causal.py",
    _NUMBERED,
    _MOE,
    topk=("top_k_experts",),
    activation="gelu",
    switch="enable_moe_block",
    notes=("the activation is GELU; between the two GEMMs SiLU is timed, which moves the same data",),
)
_GRANITE = Architecture("granitemoe.py", _LOCAL, _DENSE)
_NEMOTRON_H = Architecture(
    "nemotron_h.py",
    _ROUTED,
    _MOE,
    # A latent MoE projects down before the experts and up again after them.
    hidden=("moe_latent_size", "hidden_size"),
    activation="relu2",
    gated=False,
    unquantized_elsewhere="FlashInfer's CUTLASS kernel (TRT-LLM on SM100)",
)
_MIMO_V2 = Architecture("mimo_v2.py", _ROUTED, _MOE)

ARCHITECTURES: dict[str, Architecture] = {
    "DeepseekV2ForCausalLM": _DEEPSEEK,
    "DeepseekV3ForCausalLM": _DEEPSEEK,
    "DeepseekV32ForCausalLM": _DEEPSEEK,
    "DeepseekV4ForCausalLM": Architecture(
        "deepseek_v4.py, deepseek_v2.py",
        _ROUTED,
        _MOE,
        notes=("SGLang looks into the weights: where they are FP4, FlashInfer serves them and no Triton file counts",),
    ),
    "Ernie4_5_MoeForCausalLM": Architecture(
        "ernie4.py", ("moe_num_experts", "num_experts"), _MOE, topk=("moe_k", "num_experts_per_tok")
    ),
    "Gemma4ForCausalLM": _GEMMA4,
    "Gemma4ForConditionalGeneration": _GEMMA4,
    "Glm4MoeForCausalLM": Architecture("glm4_moe.py", _ROUTED, _MOE, fusion=Fusion.ALL),
    "Glm4MoeLiteForCausalLM": Architecture("glm4_moe_lite.py", _ROUTED, _MOE, fusion=Fusion.SINGLE),
    "GlmMoeDsaForCausalLM": _GLM_DSA,
    "GptOssForCausalLM": Architecture(
        "gpt_oss.py",
        _LOCAL,
        _DENSE,
        activation="swiglu, clamped",
        notes=(
            "the experts have biases and a clamped SwiGLU, which are not timed",
            "unquantized gpt-oss runs in the triton_kernels package by default, except under expert parallelism and "
            "on Blackwell with driver 595 or newer; --moe-runner-backend triton asks for this kernel",
        ),
    ),
    "GraniteMoeForCausalLM": _GRANITE,
    "GraniteMoeHybridForCausalLM": Architecture("granitemoehybrid.py, granitemoe.py", _LOCAL, _DENSE),
    "GraniteMoeSharedForCausalLM": _GRANITE,
    "HYV3ForCausalLM": Architecture("hunyuan_v3.py", _NUMBERED, _MOE),
    "HunYuanMoEV1ForCausalLM": Architecture(
        "hunyuan.py",
        _NUMBERED,
        ("moe_intermediate_size", "intermediate_size"),
        topk=("moe_topk", "num_experts_per_tok"),
    ),
    "KimiK25ForConditionalGeneration": Architecture(
        "kimi_k25.py, deepseek_v2.py", _ROUTED, _MOE, fusion=Fusion.VALIDATED
    ),
    "KimiLinearForCausalLM": Architecture(
        "kimi_linear.py", _NUMBERED, _MOE, topk=("num_experts_per_token", "num_experts_per_tok")
    ),
    "Lfm2MoeForCausalLM": Architecture("lfm2_moe.py", _NUMBERED, _MOE),
    "Llama4ForCausalLM": _LLAMA4,
    "Llama4ForConditionalGeneration": _LLAMA4,
    "MiMoV2FlashForCausalLM": _MIMO_V2,
    "MiMoV2ForCausalLM": _MIMO_V2,
    "MiniMaxM2ForCausalLM": Architecture("minimax_m2.py", _LOCAL, _DENSE),
    "MixtralForCausalLM": Architecture("mixtral.py", _LOCAL, _DENSE),
    "NemotronHForCausalLM": _NEMOTRON_H,
    "OlmoeForCausalLM": Architecture("olmoe.py", _NUMBERED, _DENSE),
    "PhiMoEForCausalLM": Architecture("phimoe.py", _LOCAL, _DENSE),
    "Qwen2MoeForCausalLM": Architecture("qwen2_moe.py", _NUMBERED, _MOE),
    "Qwen3MoeForCausalLM": _QWEN_MOE,
    "Qwen3NextForCausalLM": Architecture("qwen3_next.py, qwen2_moe.py", _NUMBERED, _MOE, fusion=Fusion.SAME_WIDTH),
    "Qwen3OmniMoeForConditionalGeneration": _QWEN_MOE,
    "Qwen3VLMoeForConditionalGeneration": _QWEN_MOE,
    # The fusion of the Qwen2 block is asked for here too, but for CUDA it has a switch of its own, which is left off.
    "Qwen3_5MoeForCausalLM": _QWEN35,
    "Qwen3_5MoeForConditionalGeneration": _QWEN35,
}


def all_fields() -> Names:
    """Return every field that some architecture looks for, in a fixed order."""
    return tuple(dict.fromkeys(name for entry in ARCHITECTURES.values() for name in entry.fields))
