"""A pair judged by SGLang itself: its own call, with the pair and without, on a GPU.

The calls run in a child process (``child``), since importing SGLang and starting CUDA is nothing for the parent.
"""

from __future__ import annotations

from sm120tune.verify.run import Judged, VerifyOptions, verify_pair
from sm120tune.verify.verdict import Verdict, Word

__all__ = ["Judged", "Verdict", "VerifyOptions", "Word", "verify_pair"]
