"""From a Hugging Face ``config.json`` or a preset to the MoE layer that SGLang makes of it."""

from sm120tune.models.load import load_model
from sm120tune.models.model import MoEModel

__all__ = ["MoEModel", "load_model"]
