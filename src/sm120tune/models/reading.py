"""Where a checkpoint's description comes from: a ``config.json``, the folder around it, or a preset."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sm120tune.errors import UserError
from sm120tune.models.presets import PRESETS, find_preset

CONFIG = "config.json"
MODELOPT_CONFIG = "hf_quant_config.json"
"""ModelOpt's checkpoints may say how they are quantized in this file alone; SGLang reads it then."""

_LANGUAGE = ("thinker_config", "llm_config", "language_config", "text_config")
"""Where a multimodal config keeps its language model, in the order in which SGLang looks."""


@dataclass(frozen=True)
class Checkpoint:
    """What a checkpoint says about itself."""

    name: str
    source: str
    """What errors call it."""
    config: Mapping[str, Any]
    text: Mapping[str, Any]
    """The language model's part, the whole config where there is only one."""
    quantization: Mapping[str, Any] | None

    @property
    def architectures(self) -> tuple[str, ...]:
        """The classes that the config names; raises UserError where there is none."""
        names = self.config.get("architectures")
        if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
            raise UserError(f"{self.source} names no architectures; is it the config.json of a checkpoint?")
        return tuple(names)

    @property
    def text_architecture(self) -> str:
        """The class of the language model, which a multimodal config names apart."""
        names = self.text.get("architectures")
        return str(names[0]) if isinstance(names, list) and names else self.architectures[0]

    def dtype(self) -> str | None:
        """Return what the config calls the dtype of unquantized weights, the language model's own first."""
        for part in (self.text, self.config):
            value = part.get("dtype") or part.get("torch_dtype")
            if value:
                return str(value).removeprefix("torch.")
        return None


def read_checkpoint(source: str) -> Checkpoint:
    """Read a file, a folder with a ``config.json``, or a preset; raises UserError for anything else."""
    file = _file_of(source)
    if file is not None:
        return _from_file(file)
    preset = find_preset(source)
    if preset is None:
        names = ", ".join(sorted(PRESETS, key=str.lower))
        raise UserError(f"--model {source} is no file, no folder and no preset; presets: {names}")
    return _checkpoint(preset, f"preset {preset}", PRESETS[preset].config, None)


def language_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of a config that describes the language model."""
    for key in _LANGUAGE:
        part = config.get(key)
        if isinstance(part, dict):
            inner = part.get("text_config") if key == "thinker_config" else None
            return inner if isinstance(inner, dict) else part
    return config


def _file_of(source: str) -> Path | None:
    """Return the config that a path means, or None for what is no path."""
    path = Path(source)
    try:
        if source and path.is_dir():
            return path / CONFIG
        return path if path.is_file() else None
    except (OSError, ValueError):
        # Too long a name, or one with a zero byte.
        return None


def _from_file(file: Path) -> Checkpoint:
    config = _read_object(file)
    if file.name != CONFIG:
        # Copied out of its checkpoint: neither the folder's name nor what lies beside it belongs to it.
        return _checkpoint(file.stem, str(file), config, None)
    beside = file.with_name(MODELOPT_CONFIG)
    modelopt = _read_object(beside) if beside.is_file() else None
    return _checkpoint(file.parent.resolve().name, str(file), config, modelopt)


def _checkpoint(name: str, source: str, config: Mapping[str, Any], modelopt: Mapping[str, Any] | None) -> Checkpoint:
    text = language_part(config)
    candidates = (
        config.get("quantization_config"), text.get("quantization_config"), config.get("compression_config"), modelopt,
    )  # fmt: skip
    quantization = next((value for value in candidates if value), None)
    if quantization is not None and not isinstance(quantization, dict):
        raise UserError(f"{source}: quantization_config is {quantization!r}, not an object")
    return Checkpoint(name, source, config, text, quantization)


def _read_object(file: Path) -> dict[str, Any]:
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(
            f"{file.parent} has no {file.name}; give the folder of a checkpoint, or its config.json"
        ) from None
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file} is no JSON: {error}; fetch it again") from None
    if not isinstance(data, dict):
        raise UserError(f"{file} holds no JSON object; is it the config.json of a checkpoint?")
    return data
