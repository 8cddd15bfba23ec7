"""SGLang's own questions about fusing shared experts, cut out of its source and asked, against what a model says."""

from __future__ import annotations

import ast
import functools
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from model_data import DATA
from wheels import model_sources

from sm120tune.models import load_model
from sm120tune.models.architectures import ARCHITECTURES, Fusion

GATE = "shared_experts_fusion_disable_reason"
GATED = {
    # architecture: the file and the class whose gate SGLang asks
    "DeepseekV2ForCausalLM": ("deepseek_v2.py", "DeepseekV2ForCausalLM"),
    "DeepseekV3ForCausalLM": ("deepseek_v2.py", "DeepseekV2ForCausalLM"),
    "DeepseekV32ForCausalLM": ("deepseek_v2.py", "DeepseekV2ForCausalLM"),
    "DeepseekV4ForCausalLM": ("deepseek_v4.py", "DeepseekV4ForCausalLM"),
    "Glm4MoeForCausalLM": ("glm4_moe.py", "Glm4MoeForCausalLM"),
    "Glm4MoeLiteForCausalLM": ("glm4_moe_lite.py", "Glm4MoeLiteForCausalLM"),
    "GlmMoeDsaForCausalLM": ("deepseek_v2.py", "DeepseekV2ForCausalLM"),
    "KimiK25ForConditionalGeneration": ("deepseek_v2.py", "DeepseekV2ForCausalLM"),
}
NAMES = {"GlmMoeDsaForCausalLM": "GlmMoeDsaForCausalLM", "Glm4MoeLiteForCausalLM": "Glm4MoeLiteForCausalLM"}
"""Classes that fuse another architecture than DeepSeek-V3's: ``fused_shared_experts_architecture``."""


@pytest.fixture(scope="module")
def srt() -> Path:
    return model_sources("0.5.23") / "sglang" / "srt"


class Nothing:
    """Answers every question of a server that was started without options with no."""

    def __getattr__(self, name: str) -> Any:
        return lambda: False


def server(ep: int) -> dict[str, Any]:
    """Return what the gates look up, for an NVIDIA card and a server without options."""
    exec_config = SimpleNamespace(
        moe=SimpleNamespace(enforce_shared_experts_fusion=False, disable_shared_experts_fusion=False)
    )

    def blocks(quant: Any) -> bool:
        # deepseek_common/utils.py, less the annotation.
        ask = getattr(quant, "can_fuse_shared_expert", None)
        return ask is not None and not ask()

    def no(*_: Any) -> bool:
        return False

    return {
        "_is_cuda": True,
        "_is_hip": False,
        "_is_musa": False,
        "_device_sm": 120,
        "torch": SimpleNamespace(cuda=SimpleNamespace(get_device_capability=lambda _: (12, 0))),
        "get_parallel": lambda: SimpleNamespace(moe_ep_size=ep),
        "get_exec": lambda: exec_config,
        "get_moe_runner_backend": Nothing,
        "get_moe_a2a_backend": Nothing,
        "quant_blocks_shared_experts_fusion": blocks,
        "is_wint4afp8_or_wint4a16_config": no,
        "is_sm90_supported": no,
        "is_sbo_enabled": no,
        "is_tbo_enabled": no,
        "is_deepep_class_backend": no,
        "uses_per_rank_fused_shared_slots": no,
    }


@functools.cache
def parsed(file: Path) -> list[ast.stmt]:
    return ast.parse(file.read_text()).body


def cut_out(file: Path, name: str, ep: int, within: str | None = None) -> Callable[..., Any]:
    """Return one function of a source file that cannot be imported here."""
    body = parsed(file)
    if within is not None:
        (owner,) = [node for node in body if isinstance(node, ast.ClassDef) and node.name == within]
        body = owner.body
    (function,) = [node for node in body if isinstance(node, ast.FunctionDef) and node.name == name]
    function.decorator_list = []
    function.returns = None
    for argument in function.args.args:
        argument.annotation = None
    space = server(ep)
    exec(compile(ast.Module([function], []), str(file), "exec"), space)
    made = space[name]
    assert callable(made)
    return made


def described(file: Path) -> tuple[SimpleNamespace, Any]:
    """Return a config as SGLang's gates see it, and its quantization."""
    whole = json.loads(file.read_text())
    text = {"architectures": whole["architectures"]} | whole.get("text_config", whole)
    quantization = text.get("quantization_config") or whole.get("quantization_config")
    method = quantization and quantization["quant_method"]
    return SimpleNamespace(**text), SimpleNamespace(get_name=lambda: method) if method else None


def gated_files() -> list[Path]:
    return [file for file in sorted(DATA.glob("*.json")) if load_model(str(file)).architecture in GATED]


@pytest.mark.parametrize("ep", [1, 2])
@pytest.mark.parametrize("file", gated_files(), ids=lambda file: file.stem)
def test_sglangs_gate_says_the_same(srt: Path, file: Path, ep: int) -> None:
    model = load_model(str(file))
    source, owner = GATED[model.architecture]
    config, quantization = described(file)
    gate = cut_out(srt / "models" / source, GATE, ep, owner)
    fused_name = NAMES.get(model.architecture, "DeepseekV3ForCausalLM")
    reason = gate(SimpleNamespace(fused_shared_experts_architecture=fused_name), config, quantization)
    expected = 0 if reason else config.n_shared_experts
    assert model.problem(tp=ep, ep=ep).shared_experts == expected, reason


def test_every_class_that_may_fuse_was_asked() -> None:
    fusing = {name for name, entry in ARCHITECTURES.items() if entry.fusion not in (Fusion.NEVER, Fusion.SAME_WIDTH)}
    asked = {load_model(str(file)).architecture for file in gated_files()}
    assert fusing <= set(GATED)
    assert set(GATED) == asked


@pytest.mark.parametrize(("width", "fused"), [(512, True), (1024, False), (0, False)])
def test_qwen3_nexts_question(srt: Path, tmp_path: Path, width: int, fused: bool) -> None:
    ask = cut_out(srt / "models" / "qwen2_moe.py", "can_fuse_shared_expert", 1)
    space = ask.__globals__
    space["get_moe_a2a_backend"] = Nothing
    config = json.loads((DATA / "qwen3_next.json").read_text()) | {"shared_expert_intermediate_size": width}
    assert ask(SimpleNamespace(**config), None) is fused
    (tmp_path / "config.json").write_text(json.dumps(config))
    for ep in (1, 2):
        assert load_model(str(tmp_path)).problem(tp=2, ep=ep).shared_experts == int(fused)
