from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from model_data import DATA

from sm120tune.errors import UserError
from sm120tune.models import load_model


def config(**fields: Any) -> dict[str, Any]:
    base = json.loads((DATA / "qwen3_moe.json").read_text())
    return {key: value for key, value in (base | fields).items() if value != "gone"}


def written(folder: Path, **fields: Any) -> str:
    file = folder / "config.json"
    file.write_text(json.dumps(config(**fields)))
    return str(file)


def refused(source: str) -> str:
    with pytest.raises(UserError) as caught:
        load_model(source)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_an_unknown_architecture_names_what_was_looked_for(tmp_path: Path) -> None:
    message = refused(written(tmp_path, architectures=["TomorrowMoeForCausalLM"]))
    assert "TomorrowMoeForCausalLM is unknown" in message
    for field in ("num_experts", "n_routed_experts", "moe_num_experts", "moe_intermediate_size", "moe_topk"):
        assert field in message
    assert "found num_experts=128, moe_intermediate_size=768" in message
    assert "--experts, --inter, --hidden and --topk" in message


def test_an_unknown_architecture_without_any_field(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text('{"architectures": ["TomorrowMoeForCausalLM"]}')
    assert "found none of them" in refused(str(file))


@pytest.mark.parametrize(
    ("field", "words"),
    [
        ("num_experts", "no num_experts or num_local_experts"),
        ("moe_intermediate_size", "no moe_intermediate_size"),
        ("hidden_size", "no hidden_size"),
        ("num_experts_per_tok", "no num_experts_per_tok"),
    ],
)
def test_a_missing_field(tmp_path: Path, field: str, words: str) -> None:
    """The size of a dense layer is there, and is not taken for an expert's."""
    assert words in refused(written(tmp_path, **{field: "gone"}))
    assert words in refused(written(tmp_path, **{field: None}))


@pytest.mark.parametrize("value", [0, -1, "128", 12.5, True, [], [128, 0]])
def test_a_field_that_is_no_number_of_experts(tmp_path: Path, value: Any) -> None:
    assert "num_experts is " in refused(written(tmp_path, num_experts=value))


def test_layers_that_differ(tmp_path: Path) -> None:
    message = refused(written(tmp_path, moe_intermediate_size=[768, 1536]))
    assert "moe_intermediate_size differs between layers ([768, 1536])" in message


@pytest.mark.parametrize("text", ["", "{", '{"a": 1', "[]", "3", "\x00", "[" * 100_000])
def test_damaged_json(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    message = refused(str(tmp_path))
    assert str(tmp_path / "config.json") in message
    assert "JSON" in message


def test_no_text_at_all(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b"\xff\xfe\x00\x80")
    assert "is no JSON" in refused(str(tmp_path))


def test_infinity_as_hugging_face_writes_it(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config())[:-1] + ', "time_step_limit": [0.0, Infinity]}')
    assert load_model(str(tmp_path)).experts == 128


def test_a_folder_without_a_config(tmp_path: Path) -> None:
    assert f"{tmp_path} has no config.json" in refused(str(tmp_path))


@pytest.mark.parametrize("source", ["GLM-55", "", "x" * 5000, "a\0b"])
def test_neither_path_nor_preset(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    written(tmp_path)
    message = refused(source)
    assert f"--model {source} is no file" in message
    assert "GLM-5," in message


@pytest.mark.parametrize("names", ["gone", [], None, "Qwen3MoeForCausalLM", [3]])
def test_no_architecture(tmp_path: Path, names: Any) -> None:
    assert "names no architectures" in refused(written(tmp_path, architectures=names))


def test_gemma_without_experts(tmp_path: Path) -> None:
    gemma = json.loads((DATA / "gemma4.json").read_text())
    gemma["text_config"]["enable_moe_block"] = False
    (tmp_path / "config.json").write_text(json.dumps(gemma))
    assert "enable_moe_block is not true" in refused(str(tmp_path))


def test_a_dtype_that_no_server_takes(tmp_path: Path) -> None:
    assert "dtype int3 is unknown" in refused(written(tmp_path, torch_dtype="int3"))


def test_the_name_of_a_checkpoint_is_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "My-Qwen"
    folder.mkdir()
    written(folder)
    assert load_model(str(folder)).name == "My-Qwen"
    assert load_model(str(folder / "config.json")).name == "My-Qwen"


def test_a_path_comes_before_a_preset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "GLM-5"
    folder.mkdir()
    written(folder)
    monkeypatch.chdir(tmp_path)
    assert load_model("GLM-5").architecture == "Qwen3MoeForCausalLM"


def test_a_file_by_another_name_stands_alone(tmp_path: Path) -> None:
    written(tmp_path)
    (tmp_path / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "FP8"}}')
    (tmp_path / "other.json").write_text(json.dumps(config()))
    assert load_model(str(tmp_path)).dtype == "fp8_w8a8"
    other = load_model(str(tmp_path / "other.json"))
    assert (other.name, other.dtype) == ("other", "bf16")


def test_a_damaged_file_of_modelopt(tmp_path: Path) -> None:
    written(tmp_path)
    (tmp_path / "hf_quant_config.json").write_text("{")
    assert "hf_quant_config.json is no JSON" in refused(str(tmp_path))


@pytest.mark.parametrize(
    "nest", [("text_config",), ("llm_config",), ("language_config",), ("thinker_config", "text_config")]
)
def test_a_nested_language_model(tmp_path: Path, nest: tuple[str, ...]) -> None:
    whole: dict[str, Any] = config()
    whole.pop("architectures")
    for key in reversed(nest):
        whole = {key: whole}
    (tmp_path / "config.json").write_text(
        json.dumps(whole | {"architectures": ["Qwen3OmniMoeForConditionalGeneration"], "hidden_size": 1})
    )
    model = load_model(str(tmp_path))
    assert (model.experts, model.inter, model.hidden, model.topk) == (128, 768, 2048, 8)


ODD: tuple[Any, ...] = (None, [], {}, "", "x", -1, 0, 1.5, True, [None], [[]], {"a": 1}, ["x", 3])


def places(data: Any) -> Iterator[tuple[Any, Any]]:
    """Yield every place in a document as its holder and key."""
    pairs = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in list(pairs):
        yield data, key
        yield from places(value)


def outcome(source: str) -> str:
    try:
        return str(load_model(source).problem())
    except UserError as error:
        return str(error)


@pytest.mark.parametrize("name", sorted(file.stem for file in DATA.glob("*.json")))
def test_any_odd_value_anywhere_is_one_line_or_harmless(name: str, tmp_path: Path) -> None:
    text = (DATA / f"{name}.json").read_text()
    file = tmp_path / "config.json"
    data = json.loads(text)
    tried = 0
    for holder, key in places(data):
        original = holder[key]
        for odd in ODD:
            holder[key] = odd
            file.write_text(json.dumps(data))
            assert "\n" not in outcome(str(file))
            tried += 1
        holder[key] = original
    assert tried >= 5 * len(ODD)
