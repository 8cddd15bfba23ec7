"""Judge one pair: make its folders, run the child, read its answers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from sm120tune.devices import LocalGPU
from sm120tune.errors import UserError
from sm120tune.install import Place
from sm120tune.install.pair import ConfigPair
from sm120tune.measure.memory import weight_copies
from sm120tune.problem import MoEProblem
from sm120tune.verify.folders import both_sides
from sm120tune.verify.messages import Answer, Request
from sm120tune.verify.verdict import Expected, Verdict, judge

CHILD = (sys.executable, "-m", "sm120tune.verify.child")
"""Takes the request as its argument."""

SILENCE_S = 600.0
"""The child's limit from one line to the next; SGLang's import and the compilation of one M's rows are within."""


@dataclass(frozen=True)
class VerifyOptions:
    """How to judge."""

    gpu: LocalGPU
    problem: MoEProblem
    """The layer whose call runs."""
    batch_sizes: tuple[int, ...]
    routing: str
    seed: int
    preload: Path | None = None
    installed: bool = False
    """The pair is judged where it is installed."""


@dataclass(frozen=True)
class Judged:
    """One pair's verdicts."""

    pair: ConfigPair
    problem: MoEProblem
    """The layer whose call ran: a pair may serve several."""
    verdicts: tuple[Verdict, ...]
    versions: dict[str, str]
    """SGLang's, Triton's and torch's in the child."""

    @property
    def holds(self) -> bool:
        """Whether the pair holds at every M."""
        return all(verdict.holds for verdict in self.verdicts)


def verify_pair(
    pair: ConfigPair, place: Place, options: VerifyOptions, on_verdict: Callable[[Verdict], None]
) -> Judged:
    """Run SGLang's call with and without the pair; raises UserError where SGLang or the GPU cannot be used."""
    problem = options.problem
    with both_sides(pair, place, installed=options.installed) as folders:
        request = Request(
            package=str(place.tree.package),
            preload=None if options.preload is None else str(options.preload.absolute()),
            problem=problem,
            routing=options.routing,
            batch_sizes=options.batch_sizes,
            seed=options.seed,
            copies=weight_copies(
                problem, options.gpu.spec.l2_bytes, options.gpu.free_bytes // 2, max(options.batch_sizes)
            ),
            without=str(folders.without),
            with_pair=None if folders.with_pair is None else str(folders.with_pair),
        )
        expected = Expected(problem.dtype, folders.up_path, folders.down_path, pair.up_rows, pair.down_rows)
        verdicts: list[Verdict] = []
        versions: dict[str, str] = {}
        for line in _lines(request, place, options.gpu):
            if "error" in line:
                raise UserError(str(line["error"]))
            if "ready" in line:
                versions = line["ready"]
                continue
            verdicts.append(judge(Answer.from_json(line), expected))
            on_verdict(verdicts[-1])
    return Judged(pair, problem, tuple(verdicts), versions)


def _lines(request: Request, place: Place, gpu: LocalGPU) -> Iterator[dict[str, Any]]:
    """Yield what the child says; raises UserError where it ends early or says nothing for too long."""
    env = {name: value for name, value in os.environ.items() if name != "SGLANG_MOE_CONFIG_DIR"}
    env["CUDA_VISIBLE_DEVICES"] = gpu.visible_token
    # With it SGLang expects int8 and fp8 weights whose rows are padded in memory, and these are not.
    env.pop("SGLANG_MOE_PADDING", None)
    # SGLang's own folder stays as it is, without the import's leavings.
    env["PYTHONDONTWRITEBYTECODE"] = "1"
    paths = (str(place.tree.package.parent), str(Path(__file__).parents[2]), env.get("PYTHONPATH"))
    env["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    done = 0
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as noise:
        child = subprocess.Popen(
            [*CHILD, json.dumps(request.to_json())],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=noise,
            text=True,
            # Ctrl-C is the parent's: it ends the child.
            start_new_session=True,
        )
        watch = _Watch(child)
        try:
            assert child.stdout is not None
            for text in child.stdout:
                watch.feed()
                line = json.loads(text)
                done += "m" in line
                yield line
                if "error" in line:
                    return
            code = child.wait()
        finally:
            watch.stop()
            child.kill()
            child.wait()
        if watch.expired:
            raise UserError(f"SGLang's call said nothing for {SILENCE_S:g} s; is the GPU free? {_last(noise)}".strip())
        if done < len(request.batch_sizes):
            m = request.batch_sizes[done]
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
            raise UserError(f"SGLang's process ended at M={m} ({how}): {_last(noise) or 'it said nothing'}")


def _last(noise: IO[str]) -> str:
    noise.seek(0)
    lines = [line.strip() for line in noise if line.strip()]
    return lines[-1][:300] if lines else ""


class _Watch:
    """Kills a child that is silent for too long."""

    def __init__(self, child: subprocess.Popen[str]) -> None:
        self._child = child
        self._timer: threading.Timer | None = None
        self.expired = False
        self.feed()

    def feed(self) -> None:
        """Start to count anew."""
        self.stop()
        self._timer = threading.Timer(SILENCE_S, self._expire)
        self._timer.daemon = True
        self._timer.start()

    def stop(self) -> None:
        """Count no more."""
        if self._timer is not None:
            self._timer.cancel()

    def _expire(self) -> None:
        self.expired = True
        self._child.kill()
