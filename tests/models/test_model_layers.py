from __future__ import annotations

import json
from typing import Any

import pytest
from model_data import DATA, EXPECTED

from sm120tune.errors import UserError
from sm120tune.models import MoEModel, load_model
from sm120tune.models.architectures import ARCHITECTURES
from sm120tune.models.presets import PRESETS
from sm120tune.problem import Gemm, MoEProblem

CASES = [(name, tp, ep) for name, (_, _, layers) in EXPECTED.items() for tp, ep in layers]


def load(name: str) -> MoEModel:
    return load_model(str(DATA / f"{name}.json"))


@pytest.mark.parametrize(("name", "tp", "ep"), CASES)
def test_the_layer_of_one_gpu(name: str, tp: int, ep: int) -> None:
    hidden, dtype, layers = EXPECTED[name]
    problem = load(name).problem(tp=tp, ep=ep)
    assert (problem.experts, problem.intermediate, problem.topk) == layers[tp, ep]
    assert (problem.hidden, problem.dtype) == (hidden, dtype)


@pytest.mark.parametrize("name", EXPECTED)
def test_quantization_blocks(name: str) -> None:
    problem = load(name).problem()
    blocks = {"fp8_w8a8": (128, 128), "int4_w4a16": (0, 32)}
    assert problem.block_shape == blocks.get(problem.dtype)
    assert not problem.per_channel_quant


def test_every_architecture_has_a_config_here() -> None:
    shown = {ARCHITECTURES[load_model(str(file)).architecture] for file in DATA.glob("*.json")}
    assert [name for name, entry in ARCHITECTURES.items() if entry not in shown] == []


def test_every_config_here_has_its_source_listed() -> None:
    listed = (DATA / "README.md").read_text()
    files = [str(file.relative_to(DATA)) for file in DATA.rglob("*.json")]
    assert len(files) > 30
    assert [file for file in files if f"`{file}`" not in listed] == []


def test_a_fused_expert_is_in_every_tokens_list() -> None:
    problem = load("glm5").problem(tp=8)
    assert (problem.shared_experts, problem.routed_topk, problem.router_experts) == (1, 8, 256)
    assert problem == MoEProblem.from_parallelism(experts=256, tp=8, inter=2048, hidden=6144, topk=8, shared_experts=1)


def test_qwen3_next_keeps_its_shared_expert_on_every_rank() -> None:
    problem = load("qwen3_next").problem(tp=8, ep=8)
    assert (problem.shared_experts, problem.routed_topk, problem.router_experts) == (1, 10, 512)
    assert problem.expert_parallel


@pytest.mark.parametrize(("name", "shared"), [("glm4_moe", 2), ("glm5", 0), ("glm4_moe_lite", 0), ("deepseek_v3", 0)])
def test_two_shared_experts(name: str, shared: int, tmp_path: Any) -> None:
    """GLM-4.5's class fuses as many as there are, the others exactly one."""
    assert changed(tmp_path, name, n_shared_experts=2).fused_shared_experts == shared


def changed(tmp_path: Any, name: str, **fields: Any) -> MoEModel:
    config = json.loads((DATA / f"{name}.json").read_text()) | fields
    file = tmp_path / f"{name}.json"
    file.write_text(json.dumps(config))
    return load_model(str(file))


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("deepseek_v3", {"n_routed_experts": 160}),
        ("glm5", {"n_shared_experts": None}),
        ("qwen3_next", {"shared_expert_intermediate_size": 1024}),
        ("qwen3_next", {"shared_expert_intermediate_size": 0}),
        ("glm4_moe", {"quantization_config": {"quant_method": "w4afp8"}}),
    ],
)
def test_what_keeps_a_shared_expert_apart(name: str, fields: dict[str, Any], tmp_path: Any) -> None:
    assert load(name).fused_shared_experts == 1
    assert changed(tmp_path, name, **fields).fused_shared_experts == 0


def test_qwen3_nexts_shared_expert_at_another_precision(tmp_path: Any) -> None:
    fp4 = {"quant_algo": "NVFP4", "ignore": ["model.layers.0.mlp.shared_expert_gate"]}
    assert changed(tmp_path, "qwen3_next", quantization_config=fp4).fused_shared_experts == 1
    fp4["ignore"] = ["model.layers.0.mlp.shared_expert.up_proj"]
    assert changed(tmp_path, "qwen3_next", quantization_config=fp4).fused_shared_experts == 0


def test_kimi_is_fused_by_quark_alone(tmp_path: Any) -> None:
    quark = {"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "fp4"}}}
    assert changed(tmp_path, "kimi_k2", quantization_config=quark).fused_shared_experts == 1
    apart = quark | {"exclude": ["model.layers.1.mlp.shared_experts.up_proj"]}
    assert changed(tmp_path, "kimi_k2", quantization_config=apart).fused_shared_experts == 0
    gate = quark | {"exclude": ["model.layers.1.mlp.shared_expert_gate"]}
    assert changed(tmp_path, "kimi_k2", quantization_config=gate).fused_shared_experts == 1


@pytest.mark.parametrize(("name", "tp"), [("minimax_m2", 8), ("qwen3_moe_fp8", 8), ("deepseek_v3", 32)])
def test_blocks_that_a_rank_cannot_hold(name: str, tp: int) -> None:
    model = load(name)
    with pytest.raises(UserError, match=rf"^{name}: .*N={model.inter // tp}.*not divisible by 128.*\[128, 128\]"):
        model.problem(tp=tp)


def test_n_ends_with_a_whole_block_both_ways() -> None:
    """Down is split by the block's k, and the activations before it are quantized by it even without a split."""
    numbers = {"experts": 8, "inter": 192, "hidden": 512, "topk": 2, "block_shape": (64, 128), "dtype": "fp8_w8a8"}
    whole = {**numbers, "inter": 384}
    assert MoEProblem.from_parallelism(tp=1, **whole).block_shape == (64, 128)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="N=64, which is not divisible by 128"):
        MoEProblem.from_parallelism(tp=3, **numbers)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="N=192, which is not divisible by the quantization group of 128"):
        MoEProblem.from_parallelism(tp=1, **numbers)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="N=192, which is not divisible by 128"):
        MoEProblem.from_parallelism(tp=1, **numbers | {"inter": 192, "block_shape": (128, 64)})  # type: ignore[arg-type]


@pytest.mark.parametrize(("tp", "ep", "words"), [(3, 1, "14336"), (4, 3, "--ep 3"), (16, 16, "--experts 8")])
def test_a_split_that_no_server_runs(tp: int, ep: int, words: str) -> None:
    with pytest.raises(UserError, match=f"^mixtral: .*{words}"):
        load("mixtral").problem(tp=tp, ep=ep)


def test_experts_without_a_gate() -> None:
    gateless = {name for name in EXPECTED if not load(name).gated}
    assert gateless == {"nemotron_h", "nemotron_h_latent"}
    assert load("nemotron_h").activation == "relu2"
    layer = load("nemotron_h").problem(tp=8)
    assert layer.gemm(Gemm.GATE_UP).n == layer.gemm(Gemm.DOWN).k == 232


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_loads_and_says_where_it_is_from(name: str) -> None:
    model = load_model(name)
    assert model.name == name
    assert model.problem(tp=2).intermediate * 2 == model.inter
    assert ":" in PRESETS[name].source


@pytest.mark.parametrize(
    ("preset", "file"),
    [
        ("DeepSeek-V3", "deepseek_v3"), ("DeepSeek-V3.2", "deepseek_v32"), ("GLM-4.5", "glm4_moe"), ("GLM-5", "glm5"),
        ("GLM-5-FP8", "glm5_fp8"), ("Kimi-K2-Instruct", "kimi_k2"), ("MiniMax-M2.5", "minimax_m2"),
        ("Mixtral-8x7B", "mixtral"), ("Qwen3-235B-A22B-FP8", "qwen3_moe_fp8"), ("Qwen3-30B-A3B", "qwen3_moe"),
        ("Qwen3.5-35B-A3B", "qwen3_5_moe"),
    ],
)  # fmt: skip
def test_a_preset_is_its_checkpoint(preset: str, file: str) -> None:
    assert load_model(preset).problem(tp=4) == load(file).problem(tp=4)


def test_a_preset_by_the_checkpoints_whole_name() -> None:
    assert load_model("zai-org/glm-5") == load_model("GLM-5")
