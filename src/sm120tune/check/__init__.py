"""Whether a server will use config files as meant, and whether it can run them: nothing here needs a GPU."""

from __future__ import annotations

from sm120tune.check.findings import Finding, Level, Report

__all__ = ["Finding", "Level", "Report"]
