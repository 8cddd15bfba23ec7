from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_line import CARD, InProcess

DATA = Path(__file__).parents[1] / "data" / "models"
CARD_FILE = CARD.replace(" ", "_")


def model_args(command: InProcess, source: str, *more: str) -> list[str]:
    return ["--model", source, "--device", CARD, "--sglang", str(command.line.sglang), *more]


def planned(command: InProcess, source: str, *more: str) -> tuple[list[str], str]:
    """Return the files that a run would write, and what it says before."""
    done = command.run(*model_args(command, source, "--batch-sizes", "1", "--dry-run", "--json", *more))
    assert done.code == 0, done.err
    files = json.loads(done.out)["files"]
    assert isinstance(files, list)
    return files, done.err


@pytest.mark.parametrize("source", ["GLM-5", str(DATA / "glm5.json")])
def test_a_model_brings_its_numbers(command: InProcess, source: str) -> None:
    files, said = planned(command, source, "--tp", "8")
    assert files[0] == f"E=257,N=256,device_name={CARD_FILE}.json"
    assert "(GlmMoeDsaForCausalLM), 256 experts of 2048, hidden 6144, topk 8, bf16, 1 shared expert fused" in said
    assert "problem: E=257 N=256 hidden=6144 topk=9 bf16 shared=1" in said
    assert "assumed" not in said
    assert "hint" not in said


def test_expert_parallelism_of_a_model(command: InProcess) -> None:
    files, _ = planned(command, "GLM-5", "--tp", "8", "--ep", "8")
    assert files[0] == f"E=32,N=2048,device_name={CARD_FILE}.json"


def test_a_models_notes_are_shown(command: InProcess) -> None:
    _, said = planned(command, str(DATA / "gemma4.json"))
    assert "note: the activation is GELU" in said


@pytest.mark.parametrize(
    "number",
    ["--experts 8", "--inter 64", "--hidden 64", "--topk 2", "--dtype bf16", "--shared-experts 0"],
)
def test_numbers_beside_a_model(command: InProcess, number: str) -> None:
    """Even one that is the default."""
    command.refused(*model_args(command, "GLM-5", *number.split()), words=["--model", number.split()[0]])


@pytest.mark.parametrize(
    ("source", "more", "words"),
    [
        ("GLM-55", [], ["--model GLM-55", "GLM-5,"]),
        (str(DATA), [], [f"{DATA} has no config.json"]),
        (str(DATA / "README.md"), [], ["README.md is no JSON"]),
        ("GLM-5", ["--tp", "3"], ["GLM-5", "2048", "tp 3"]),
        ("Qwen3-235B-A22B-FP8", ["--tp", "8"], ["Qwen3-235B-A22B-FP8", "N=192", "128"]),
        (str(DATA / "glm5_nvfp4"), [], ["glm5_nvfp4", "FP4 MoE kernels", "--force"]),
        ("gpt-oss-20b", [], ["gpt-oss-20b", "MXFP4", "changes nothing", "--force"]),
        ("GLM-5", ["--timer", "replay:table.parquet"], ["--timer replay:FILE", "--model"]),
    ],
)
def test_a_model_that_cannot_be_tuned(command: InProcess, source: str, more: list[str], words: list[str]) -> None:
    command.refused(*model_args(command, source, *more), words=words)


def test_force_goes_on(command: InProcess) -> None:
    files, said = planned(command, "gpt-oss-20b", "--tp", "2", "--force")
    assert files[0] == f"E=32,N=1440,device_name={CARD_FILE}.json"
    assert "note: forced; by default SGLang runs these experts in" in said


def test_experts_without_a_gate(command: InProcess) -> None:
    files, said = planned(command, str(DATA / "nemotron_h.json"), "--tp", "8", "--force")
    assert files[0] == f"E=128,N=232,device_name={CARD_FILE}.json"
    assert "bf16 without gate" in said


def test_a_quantized_model_brings_its_blocks(command: InProcess) -> None:
    files, said = planned(command, "GLM-5-FP8", "--tp", "8")
    assert files[0] == f"E=257,N=256,device_name={CARD_FILE},dtype=fp8_w8a8,block_shape=[128, 128].json"
    assert "fp8_w8a8 block 128x128" in said


@pytest.mark.parametrize("bits", [4, 8])
def test_groups_that_a_config_does_not_hold_are_asked_for(command: InProcess, tmp_path: Path, bits: int) -> None:
    config = json.loads((DATA / "mixtral.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": bits, "group_size": -1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    args = model_args(command, str(tmp_path / "config.json"), "--force")
    command.refused(*args, words=["--group-size", f"int{bits}_w{bits}a16", "--dtype"])


@pytest.mark.parametrize("bits", [4, 8])
def test_groups_that_a_config_holds_are_tuned(command: InProcess, tmp_path: Path, bits: int) -> None:
    config = json.loads((DATA / "mixtral.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": bits, "group_size": 64, "sym": False}
    (tmp_path / "config.json").write_text(json.dumps(config))
    files, said = planned(command, str(tmp_path / "config.json"), "--force")
    assert f",dtype=int{bits}_w{bits}a16.json" in files[0]
    assert f"int{bits}_w{bits}a16 group 64 with zero points" in said


def test_bits_and_groups_are_not_guessed(command: InProcess, tmp_path: Path) -> None:
    config = json.loads((DATA / "mixtral.json").read_text())
    for quantization, words in (
        ({"quant_method": "gptq", "bits": 3, "group_size": 128}, ["int3_w3a16", "cannot be tuned"]),
        ({"quant_method": "awq", "w_bit": 4, "q_group_size": 64}, ["names no group size"]),
    ):
        config["quantization_config"] = quantization
        (tmp_path / "config.json").write_text(json.dumps(config))
        command.refused(*model_args(command, str(tmp_path / "config.json"), "--force"), words=words)


def test_force_without_a_model(command: InProcess) -> None:
    command.refused(*command.line.args("--force"), words=["--force", "--model"])


def test_check_takes_a_model(command: InProcess) -> None:
    """Quantized ones too: it only asks SGLang's lookup."""
    args = model_args(command, "GLM-5-FP8", "--tp", "8")
    done = command.run("check", *args)
    assert done.code == 0, done.err
    assert f"E=257,N=256,device_name={CARD_FILE},dtype=fp8_w8a8,block_shape=[128, 128].json" in done.out
    assert "model: GLM-5-FP8" in done.err


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--model", "GLM-5", "--inter", "64"], ["--model", "--inter"]),
        (["--model", "GLM-5", "--per-channel"], ["--model", "--per-channel"]),
        (["--model", "GLM-5", "file.json"], ["--model", "file.json"]),
        (["--model", "gpt-oss-20b"], ["MXFP4", "--force"]),
        (["--model", "Qwen3-235B-A22B-FP8", "--tp", "8"], ["N=192", "128"]),
        (["--experts", "8", "--inter", "64", "--force"], ["--force", "--model"]),
        (["file.json", "--force"], ["--force", "--model"]),
        (["--experts", "8", "--inter", "192", "--dtype", "fp8_w8a8", "--block-shape", "128,128"], ["N=192", "128"]),
    ],
)
def test_check_refuses(command: InProcess, more: list[str], words: list[str]) -> None:
    command.refused("check", "--device", CARD, "--sglang", str(command.line.sglang), *more, words=words)


def test_a_quantized_model_asks_for_its_own_file(command: InProcess) -> None:
    files, _ = planned(command, "GLM-5-FP8", "--tp", "8")
    assert files[0] == f"E=257,N=256,device_name={CARD_FILE},dtype=fp8_w8a8,block_shape=[128, 128].json"
