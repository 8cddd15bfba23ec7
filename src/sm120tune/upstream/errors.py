"""SGLang's source does not look as this release of sm120tune expects."""

from __future__ import annotations

from sm120tune.errors import UserError


class UpstreamError(UserError):
    """The installed SGLang cannot be used: it names the file and what no longer matches."""
