"""What a budget allows: when the search has to end and when everything has to."""

from __future__ import annotations

import time
from dataclasses import dataclass

from sm120tune.job import Job

_SETTLE_S = 0.3
_SETTLE_CALLS = 800
"""What a race, a check and a decision at one M take: so many seconds, and so many calls at the roofline's time."""
_END_S = 1.5
"""Kept back for writing and for ending the processes."""
_LEAST_SEARCH_SHARE = 0.4
"""Of a budget too small for everything."""


@dataclass(frozen=True)
class Budget:
    """Two deadlines on the monotonic clock; both None without a budget."""

    search_until: float | None
    end: float | None

    @classmethod
    def of(cls, job: Job, lanes: int, began: float) -> Budget:
        """Split the job's budget, counted from ``began``, between the search and what follows it."""
        seconds = job.settings.budget_s
        if seconds is None:
            return cls(None, None)
        settle = sum(_SETTLE_S + _SETTLE_CALLS * job.floor(m)[0] / 1e6 for m in job.batch_sizes) / lanes
        search = max(seconds - settle - _END_S, _LEAST_SEARCH_SHARE * seconds)
        return cls(began + search, began + seconds - _END_S)

    @property
    def limited(self) -> bool:
        """Whether there is a budget at all."""
        return self.end is not None

    @property
    def search_is_over(self) -> bool:
        """Whether the search has used its part."""
        return self.search_until is not None and time.monotonic() > self.search_until

    @property
    def is_over(self) -> bool:
        """Whether all of it is used."""
        return self.end is not None and time.monotonic() > self.end
