from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from model_data import DATA

from sm120tune.errors import UserError
from sm120tune.models import MoEModel, load_model


@pytest.mark.parametrize(
    ("source", "path"),
    [
        ("gpt_oss.json", "MXFP4"),
        ("deepseek_v4.json", "MXFP4"),
        ("deepseek_v4_nvfp4.json", "the FP4 MoE kernels"),
        ("qwen35_nvfp4.json", "the FP4 MoE kernels"),
        ("qwen36_mixed.json", "the FP4 MoE kernels"),
        ("glm5_nvfp4", "the FP4 MoE kernels"),
        ("glm5_nvfp4/config.json", "the FP4 MoE kernels"),
        ("kimi_k25.json", "Marlin"),
        ("nemotron_h.json", "CUTLASS"),
    ],
)
def test_checkpoints_that_sglang_serves_elsewhere(source: str, path: str) -> None:
    model = load_model(str(DATA / source))
    assert model.served_elsewhere is not None
    assert path in model.served_elsewhere
    assert model.notes == ()


@pytest.mark.parametrize("source", ["glm5_fp8.json", "qwen3_moe.json", "deepseek_v4_fp8.json", "mixtral.json"])
def test_checkpoints_that_the_triton_kernel_serves(source: str) -> None:
    assert load_model(str(DATA / source)).served_elsewhere is None


class Quantized:
    """A Qwen3-MoE config with one quantization or another."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "config.json"

    def __call__(self, quantization: Any, base: str = "qwen3_moe") -> MoEModel:
        config = json.loads((DATA / f"{base}.json").read_text()) | {"quantization_config": quantization}
        self._file.write_text(json.dumps(config))
        return load_model(str(self._file))

    def refused(self, quantization: Any) -> str:
        with pytest.raises(UserError) as caught:
            self(quantization)
        return str(caught.value)


@pytest.fixture
def quantized(tmp_path: Path) -> Quantized:
    return Quantized(tmp_path)


def tensors(bits: int, kind: str, strategy: str, activations: str | None = None, **more: Any) -> dict[str, Any]:
    inputs = None if activations is None else {"num_bits": 8, "type": activations, "dynamic": True}
    weights = {"num_bits": bits, "type": kind, "strategy": strategy, **more}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}


def quark(dtype: str, qscheme: str, **more: Any) -> dict[str, Any]:
    return {"quant_method": "quark", "global_quant_config": {"weight": {"dtype": dtype, "qscheme": qscheme, **more}}}


def mixed(*algorithms: str, part: str = "mlp.experts") -> dict[str, Any]:
    layers = {f"model.layers.{i}.{part}": {"quant_algo": algorithm} for i, algorithm in enumerate(algorithms)}
    layers["model.layers.0.self_attn.q_proj"] = {"quant_algo": "NVFP4"}
    return {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}


SERVED: dict[str, tuple[dict[str, Any], tuple[str, tuple[int, int] | None, bool]]] = {
    "fp8 of blocks": ({"quant_method": "fp8", "weight_block_size": [128, 64]}, ("fp8_w8a8", (128, 64), False)),
    "fp8 of tensors": ({"quant_method": "fp8", "activation_scheme": "static"}, ("fp8_w8a8", None, False)),
    "w8a8_fp8": ({"quant_method": "w8a8_fp8"}, ("fp8_w8a8", None, True)),
    "w8a8_int8": ({"quant_method": "w8a8_int8"}, ("int8_w8a8", None, True)),
    "int8 of blocks": (
        {"quant_method": "blockwise_int8", "weight_block_size": [128, 128]}, ("int8_w8a8", (128, 128), False),
    ),
    "modelopt": ({"quant_method": "modelopt", "quant_algo": "FP8"}, ("fp8_w8a8", None, False)),
    "modelopt without a method": ({"quant_algo": "FP8"}, ("fp8_w8a8", None, False)),
    "modelopt, experts in fp8": (mixed("FP8", "FP8"), ("fp8_w8a8", None, False)),
    "modelopt, experts left alone": (mixed(), ("bf16", None, False)),
    "compressed channels": (tensors(8, "float", "channel", "float"), ("fp8_w8a8", None, True)),
    "compressed tensors": (tensors(8, "float", "tensor", "float"), ("fp8_w8a8", None, False)),
    "compressed blocks": (
        tensors(8, "float", "block", "float", block_structure=[128, 128]), ("fp8_w8a8", (128, 128), False),
    ),
    "quark channels": (quark("fp8_e4m3", "per_channel"), ("fp8_w8a8", None, True)),
    "quark blocks": (quark("fp8_e4m3", "per_block", block_size=[128, 128]), ("fp8_w8a8", (128, 128), False)),
    "bitsandbytes": ({"quant_method": "bitsandbytes"}, ("bf16", None, False)),
}  # fmt: skip


@pytest.mark.parametrize("name", SERVED)
def test_what_the_file_name_says(quantized: Quantized, name: str) -> None:
    quantization, expected = SERVED[name]
    model = quantized(quantization)
    assert (model.dtype, model.block_shape, model.per_channel_quant) == expected
    assert model.served_elsewhere is None
    assert model.problem().per_channel_quant is expected[2]


ELSEWHERE: dict[str, tuple[dict[str, Any], str, str]] = {
    # quantization, whose kernels, the dtype for --force
    "gptq": ({"quant_method": "gptq", "bits": 4}, "Marlin", "int4_w4a16"),
    "gptq of 8 bits": ({"quant_method": "gptq", "bits": 8}, "Marlin", "int8_w8a16"),
    "gptq of odd bits": ({"quant_method": "gptq", "bits": [4]}, "Marlin", "bf16"),
    "awq": ({"quant_method": "awq", "bits": 4}, "Marlin", "int4_w4a16"),
    "w4afp8": ({"quant_method": "w4afp8"}, "W4A8", "bf16"),
    "mixed without FP4": ({"quant_algo": "MIXED_PRECISION", "quantized_layers": {}}, "W4A8", "bf16"),
    "mxfp8": ({"quant_method": "modelopt", "quant_algo": "MXFP8"}, "MXFP8", "bf16"),
    "mxfp4 experts in fp8": ({"quant_method": "fp8", "routed_experts_quant_method": "mxfp4"}, "MXFP4", "bf16"),
    "mxfp4 storage": ({"quant_method": "fp8", "store_dtype": "mxfp4"}, "MXFP4", "bf16"),
    "nvfp4": ({"quant_method": "modelopt_fp4"}, "FP4", "bf16"),
    "compressed nvfp4": (tensors(4, "float", "tensor_group", "float"), "FP4", "bf16"),
    "compressed int4": (tensors(4, "int", "group"), "Marlin", "int4_w4a16"),
    "compressed w4a8": (tensors(4, "int", "group", "float"), "W4A8", "bf16"),
    "quark fp4": (quark("fp4", "per_group"), "Quark", "bf16"),
    "modelopt, experts in mxfp8": (mixed("MXFP8"), "MXFP8", "bf16"),
    "gguf": ({"quant_method": "gguf"}, "GGUF", "bf16"),
}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_what_sglang_serves_elsewhere(quantized: Quantized, name: str) -> None:
    quantization, path, dtype = ELSEWHERE[name]
    model = quantized(quantization)
    assert path in (model.served_elsewhere or "")
    assert model.dtype == dtype


@pytest.mark.parametrize(
    ("quantization", "words"),
    [
        ({"quant_method": "tomorrow"}, "quantization method tomorrow is unknown; known: "),
        ({"bits": 4}, "quantization method without a name"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "[128] is no pair"),
        ({"quant_method": "fp8", "weight_block_size": [128, 0]}, "[128, 0] is no pair"),
        ({"quant_method": "fp8", "weight_block_size": "128"}, "'128' is no pair"),
        (["fp8"], "quantization_config is ['fp8'], not an object"),
        (mixed("FP8", "NVFP4"), "experts quantized as FP8, NVFP4 are not known"),
        (tensors(8, "int", "channel", "int"), "no MoE kernel for compressed-tensors weights of 8 bits int by channel"),
        ({"quant_method": "compressed-tensors"}, "no weights for Linear"),
        (quark("int4", "per_group"), "no MoE kernel for quark"),
    ],
)
def test_quantization_that_is_not_known(quantized: Quantized, quantization: Any, words: str) -> None:
    assert words in quantized.refused(quantization)


@pytest.mark.parametrize("odd", [None, 3, "x", {}, [None]])
def test_odd_lists_of_modules(quantized: Quantized, odd: Any) -> None:
    for key in ("exclude_modules", "ignore", "exclude", "quantized_layers", "modules_to_not_convert"):
        assert quantized({"quant_algo": "NVFP4", key: odd}, "glm5").fused_shared_experts == 1
        assert quantized({"quant_algo": "FP8", key: odd}).dtype == "fp8_w8a8"


def test_groups_that_differ_over_experts(quantized: Quantized) -> None:
    one, other = tensors(8, "float", "channel", "float"), tensors(4, "int", "group")
    one["config_groups"]["group_1"] = other["config_groups"]["group_0"] | {"targets": ["re:.*mlp.experts.*"]}
    assert "gives experts several schemes" in quantized.refused(one)
    one["config_groups"]["group_1"]["targets"] = ["re:.*mlp.shared_expert.*"]
    assert quantized(one).dtype == "fp8_w8a8"


def test_experts_that_are_left_out(quantized: Quantized) -> None:
    left_out = ["lm_head", "model.layers.3.mlp.shared_experts.up_proj", "model.layers.7.mlp.experts"]
    (note,) = quantized({"quant_method": "fp8", "modules_to_not_convert": left_out}).notes
    assert note.startswith("model.layers.7.mlp.experts is not quantized")
    assert quantized({"quant_method": "fp8", "modules_to_not_convert": left_out[:2]}).notes == ()


def test_nemotron_is_served_by_the_triton_kernel_in_plain_fp8_alone(quantized: Quantized) -> None:
    assert quantized({"quant_method": "fp8"}, "nemotron_h").served_elsewhere is None
    assert "CUTLASS" in (quantized({"quant_algo": "FP8"}, "nemotron_h").served_elsewhere or "")


@pytest.mark.parametrize(
    ("base", "dtype", "expected"),
    [
        ("qwen3_moe", "float32", "fp16"),
        ("qwen3_moe", None, "fp16"),
        ("qwen3_moe", "torch.bfloat16", "bf16"),
        ("qwen3_moe", "float16", "fp16"),
        ("gemma4", "float32", "bf16"),
    ],
)
def test_the_dtype_of_plain_weights(tmp_path: Path, base: str, dtype: str | None, expected: str) -> None:
    config = json.loads((DATA / f"{base}.json").read_text())
    for part in (config, config.get("text_config", {})):
        part.pop("dtype", None)
        part.pop("torch_dtype", None)
    (tmp_path / "config.json").write_text(json.dumps(config | {"torch_dtype": dtype}))
    model = load_model(str(tmp_path))
    assert model.dtype == expected
    said = [note for note in model.notes if f"dtype {dtype}" in note]
    assert len(said) == (dtype in (None, "float32"))


def test_where_a_quantization_is_looked_for(tmp_path: Path) -> None:
    """In the order of SGLang's model_config.py; Kimi-K2.5 has it inside its language model."""
    config = json.loads((DATA / "qwen3_moe.json").read_text())
    (tmp_path / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "NVFP4"}}')
    found = []
    for more in (
        {},
        {"compression_config": tensors(8, "float", "channel", "float")},
        {"quantization_config": {"quant_method": "fp8"}, "compression_config": tensors(4, "int", "group")},
    ):
        (tmp_path / "config.json").write_text(json.dumps(config | more))
        model = load_model(str(tmp_path))
        found.append((model.dtype, model.per_channel_quant))
    assert found == [("bf16", False), ("fp8_w8a8", True), ("fp8_w8a8", False)]
