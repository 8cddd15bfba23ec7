"""The name of a config file: what it says, and why a server would never ask for it."""

from __future__ import annotations

import difflib
import json
import re
from dataclasses import dataclass

from sm120tune.check.findings import Finding, Level
from sm120tune.devices import DeviceSpec, known_device, known_devices
from sm120tune.problem import MoEProblem

ASSUMED_HIDDEN = 6144
ASSUMED_TOPK = 8
"""No file name holds either; shared memory depends on neither."""

QUANTIZED = ("fp8_w8a8", "int8_w8a8", "int8_w8a16", "int4_w4a16", "float32")
"""Every dtype that SGLang puts into a file name; bf16 and fp16 have none."""

_PLAIN = ("bf16", "bfloat16", "fp16", "float16")

_NAME = re.compile(
    r"E=(?P<E>[1-9]\d*),N=(?P<N>[1-9]\d*),device_name=(?P<device>[^,]+?)(?:,dtype=(?P<dtype>[^,\[\]]+?))?"
    r"(?:,block_shape=(?P<shape>\[[^\]]*\]))?(?P<channel>,per_channel_quant=True)?(?P<down>_down)?\.json"
)


@dataclass(frozen=True)
class ConfigName:
    """A file name taken apart, as it stands."""

    experts: int
    intermediate: int
    device: str
    dtype: str | None
    shape_text: str | None
    per_channel: bool
    down: bool

    @property
    def block_shape(self) -> tuple[int, int] | None:
        """The quantization block, or None where there is none that SGLang would use."""
        try:
            shape = json.loads(self.shape_text or "null")
        except ValueError:
            return None
        if isinstance(shape, list) and len(shape) == 2 and all(type(part) is int and part > 0 for part in shape):
            return (shape[0], shape[1])
        return None

    @property
    def selectors(self) -> tuple[str | None, str | None, bool]:
        """What follows the device in the name."""
        return (self.dtype, self.shape_text, self.per_channel)

    def problem(self) -> MoEProblem | None:
        """Return a layer that asks for this name, with an assumed hidden size and topk; None for an unknown dtype."""
        dtype = self.dtype or "bf16"
        if dtype in _PLAIN:
            dtype = "bf16"
        elif dtype not in QUANTIZED:
            return None
        return MoEProblem(
            experts=self.experts,
            # The name counts bytes, each of which holds two int4 weights.
            intermediate=self.intermediate * 2 if dtype == "int4_w4a16" else self.intermediate,
            hidden=ASSUMED_HIDDEN,
            topk=ASSUMED_TOPK,
            router_experts=self.experts,
            dtype=dtype,
            block_shape=self.block_shape,
            per_channel_quant=self.per_channel,
        )

    def partner(self) -> str:
        """Return the name of the other file of the pair."""
        return _render(self, down=not self.down)

    def corrected(self) -> str:
        """Return the name that a server asks for, as far as it can be told from this one."""
        return _render(self, down=self.down, correct=True)


def parse_name(name: str) -> ConfigName | None:
    """Take a file name apart, or return None for one that no server asks for."""
    found = _NAME.fullmatch(name)
    if found is None:
        return None
    return ConfigName(
        experts=int(found["E"]),
        intermediate=int(found["N"]),
        device=found["device"],
        dtype=found["dtype"],
        shape_text=found["shape"],
        per_channel=bool(found["channel"]),
        down=bool(found["down"]),
    )


def _render(name: ConfigName, *, down: bool, correct: bool = False) -> str:
    device, dtype, shape = name.device, name.dtype, name.shape_text
    if correct:
        known = known_device(device)
        device = known.file_name if known is not None else device.replace(" ", "_")
        dtype = None if dtype in _PLAIN else dtype
        shape = str(list(name.block_shape)) if name.block_shape else None
    parts = [f"E={name.experts},N={name.intermediate},device_name={device}"]
    if dtype:
        parts.append(f"dtype={dtype}")
    if shape:
        parts.append(f"block_shape={shape}")
    if name.per_channel:
        parts.append("per_channel_quant=True")
    return ",".join(parts) + ("_down" if down else "") + ".json"


def name_findings(label: str, name: ConfigName, device: DeviceSpec | None) -> list[Finding]:
    """Return why a server would not ask for this name; ``device`` is the card that a person named, if any."""
    found: list[Finding] = []
    rename = f"rename it to {name.corrected()}"

    def add(code: str, what: str, fix: str = rename, level: Level = Level.ERROR) -> None:
        found.append(Finding(level, code, label, what, fix))

    if name.dtype in _PLAIN:
        add("dtype-plain", f"dtype={name.dtype}: SGLang names no dtype for bf16 and fp16, so it never asks for this")
    elif name.dtype is not None and name.dtype not in QUANTIZED:
        add("dtype-unknown", f"dtype={name.dtype} is no dtype of SGLang", f"one of {', '.join(QUANTIZED)}")
    if name.shape_text is not None:
        shape = name.block_shape
        if shape is None:
            add(
                "block-shape", f"block_shape={name.shape_text}: SGLang drops a block shape with 0 or None from the name"
            )
        elif name.shape_text != str(list(shape)):
            add("block-shape-blank", f"block_shape={name.shape_text}: SGLang writes {list(shape)}, blanks count")
        if name.dtype is None or name.dtype in _PLAIN:
            add(
                "block-shape-dtype",
                f"block_shape={name.shape_text} without a quantized dtype: no server asks for that",
                "add the dtype, for example ,dtype=fp8_w8a8, before the block shape",
            )
    found += _device_findings(label, name, device)
    return found


def _device_findings(label: str, name: ConfigName, device: DeviceSpec | None) -> list[Finding]:
    known = known_device(name.device)
    right = known.file_name if known is not None else name.device.replace(" ", "_")
    found: list[Finding] = []
    if name.device != right:
        what = f"device_name={name.device}: the server asks for {right}, letter by letter"
        found.append(Finding(Level.ERROR, "device-spelling", label, what, f"rename it to {name.corrected()}"))
    if device is not None and right != device.file_name:
        what = f"the file is for {right}, not for {device.file_name}: that card's server never asks for it"
        found.append(Finding(Level.WARNING, "device-other", label, what, "tune on the card itself"))
    elif known is None:
        near = near_devices(right)
        what = f"device_name={right} is not a known card"
        fix = f"near names: {', '.join(near)}" if near else "say with --device which card's limits count"
        found.append(Finding(Level.WARNING, "device-unknown", label, what, fix))
    return found


def near_devices(file_name: str) -> list[str]:
    """Return the known cards whose name in a file is like this one, nearest first."""
    names = [spec.file_name for spec in known_devices()]
    return difflib.get_close_matches(file_name, [name for name in names if name != file_name], n=3, cutoff=0.75)
