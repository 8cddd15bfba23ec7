"""The table of architectures against SGLang's own source."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from wheels import model_sources

from sm120tune.models.architectures import ARCHITECTURES, Fusion
from sm120tune.models.presets import PRESETS
from sm120tune.models.quantization import KNOWN_METHODS


@pytest.fixture(scope="module")
def srt() -> Path:
    return model_sources("0.5.23") / "sglang" / "srt"


def read(srt: Path, name: str) -> str:
    return "\n".join((srt / "models" / file).read_text() for file in ARCHITECTURES[name].source.split(", "))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_sglang_reads_these_fields(srt: Path, name: str) -> None:
    source, entry = read(srt, name), ARCHITECTURES[name]
    for names in (entry.experts, entry.inter, entry.topk, entry.hidden):
        assert re.search(rf"config\.{names[0]}\b", source), names


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_sglang_has_the_class(srt: Path, name: str) -> None:
    assert any(f"class {name}(" in file.read_text() for file in (srt / "models").glob("*.py"))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_sglang_fuses_where_the_table_says_so(srt: Path, name: str) -> None:
    source = read(srt, name)
    hooks = "num_fusable_shared_experts" in source
    on_cuda = "enable_cuda_shared_expert_fusion=True" in source
    fusion = ARCHITECTURES[name].fusion
    if fusion is Fusion.NEVER and name != "DeepseekV4ForCausalLM":
        assert not hooks
        assert not on_cuda
    assert hooks or fusion not in (Fusion.ALL, Fusion.SINGLE, Fusion.VALIDATED)
    assert on_cuda == (fusion is Fusion.SAME_WIDTH)


def test_experts_without_a_gate(srt: Path) -> None:
    for name, entry in ARCHITECTURES.items():
        assert ("is_gated=False" in read(srt, name)) is not entry.gated, name


def test_the_validated_numbers_of_experts(srt: Path) -> None:
    source = read(srt, "DeepseekV3ForCausalLM")
    assert "n_routed_experts not in (256, 384)" in source
    assert 'fused_shared_experts_architecture = "DeepseekV3ForCausalLM"' in source
    assert 'fused_shared_experts_architecture = "GlmMoeDsaForCausalLM"' in read(srt, "GlmMoeDsaForCausalLM")


def test_the_quantization_methods(srt: Path) -> None:
    registry = (srt / "layers/quantization/__init__.py").read_text()
    assert [method for method in KNOWN_METHODS if f'"{method}"' not in registry] == []


def test_the_docs_list_every_architecture_and_preset() -> None:
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
    assert [name for name in (*ARCHITECTURES, *PRESETS) if f"`{name}`" not in page] == []
    for name, entry in ARCHITECTURES.items():
        row = next(line for line in page.splitlines() if line.startswith("|") and f"`{name}`" in line)
        assert entry.source in row
        assert all(f"`{names[0]}`" in row for names in (entry.experts, entry.inter, entry.topk))
    assert [name for name, preset in PRESETS.items() if preset.source.rpartition("/")[2] not in page] == []
