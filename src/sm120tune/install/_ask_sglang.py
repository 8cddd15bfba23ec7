"""Runs by itself in a fresh process: import SGLang, ask its own lookup for one key, print its answer as JSON.

Only what depends on the machine is answered for it: the card's name, the Triton version, and that inference is not
deterministic.
"""

from __future__ import annotations

import importlib
import json
import sys
import types
from typing import Any


def main(request: dict[str, Any]) -> dict[str, Any]:
    """Return ``up`` and ``down`` rows, or ``error`` where SGLang cannot be imported or asked."""
    try:
        module: Any = importlib.import_module(request["module"])
        flags = types.SimpleNamespace(enable_deterministic_inference=False)
        stand_ins = {
            "get_device_name": lambda *_args: request["device_name"],
            "get_global_server_args": lambda: flags,
            "get_exec": lambda: types.SimpleNamespace(deterministic=flags),
            "triton": types.SimpleNamespace(__version__=request["triton_version"]),
        }
        for name, stand_in in stand_ins.items():
            if hasattr(module, name):
                setattr(module, name, stand_in)
        ask = module.get_moe_configs
        options = {"per_channel_quant": request["per_channel_quant"]}
        return {
            key: ask(*request["arguments"], **options, down_moe=down) for key, down in (("up", False), ("down", True))
        }
    except Exception as error:
        return {"error": " ".join(f"{type(error).__name__}: {error}".split())[:200]}


if __name__ == "__main__":
    print("\n" + json.dumps(main(json.loads(sys.argv[1]))))
