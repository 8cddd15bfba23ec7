"""The child process: ``python -m sm120tune.verify.child REQUEST``.

Prints one JSON object a line on the real standard output: ``{"ready": ...}``, then an answer for each M, or
``{"error": ...}``. Whatever SGLang prints goes to standard error.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sm120tune.errors import UserError
from sm120tune.verify.messages import Request
from sm120tune.verify.stopwatch import CudaStopwatch, Stopwatch


def main(argument: str, stopwatch: Callable[[], Stopwatch] = CudaStopwatch) -> None:
    """Answer one request."""
    lines = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)

    def say(line: dict[str, Any]) -> None:
        print(json.dumps(line), file=lines, flush=True)

    try:
        _answer(Request.from_json(json.loads(argument)), stopwatch, say)
    except UserError as error:
        say({"error": str(error)})
    except Exception as error:
        say({"error": " ".join(f"{type(error).__name__}: {error}".split())[:400]})
    lines.flush()


def _answer(request: Request, stopwatch: Callable[[], Stopwatch], say: Callable[[dict[str, Any]], None]) -> None:
    import torch
    import triton

    from sm120tune.upstream import find_sglang
    from sm120tune.upstream.running import RunningSGLang, import_fused_moe
    from sm120tune.verify.judge import Judge

    tree = find_sglang(Path(request.package))
    fused_moe = import_fused_moe(tree, None if request.preload is None else Path(request.preload))
    judge = Judge(request, RunningSGLang(tree, request.problem, fused_moe), stopwatch())
    say({"ready": {"sglang": tree.version, "triton": triton.__version__, "torch": torch.__version__}})
    for answer in judge.answers():
        say(answer.to_json())


if __name__ == "__main__":
    main(sys.argv[1])
    # SGLang's own threads and process groups have nothing left to do, and may wait for each other at the end.
    sys.stderr.flush()
    os._exit(0)
