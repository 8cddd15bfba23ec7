"""Tune SGLang's fused-MoE Triton kernel and write the config pair that SGLang loads."""

from __future__ import annotations

__version__ = "0.1.0"
