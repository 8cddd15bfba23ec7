"""Everything that is SGLang's: where it lies, its kernels, its launch arguments, its config lookup.

SGLang is read from its installed source and never imported, so neither its dependencies nor a GPU are needed. Only
``running`` imports it, and only in a child process.
"""

from __future__ import annotations

from sm120tune.upstream.errors import UpstreamError
from sm120tune.upstream.locate import SGLangTree, find_sglang

__all__ = ["SGLangTree", "UpstreamError", "find_sglang"]
