"""Config files from vLLM to SGLang and back, and under another card's name. Nothing is measured here."""

from __future__ import annotations

from sm120tune.convert.pair import Converted, convert_to_pair
from sm120tune.convert.sources import Layer, Source, from_sglang, from_vllm
from sm120tune.convert.to_vllm import VllmFile, convert_to_vllm

__all__ = [
    "Converted",
    "Layer",
    "Source",
    "VllmFile",
    "convert_to_pair",
    "convert_to_vllm",
    "from_sglang",
    "from_vllm",
]
