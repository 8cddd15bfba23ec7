"""What an estimate may decide, and by how much it has to gain."""

from __future__ import annotations

from sm120tune.job import Job
from sm120tune.measure.cost_constants import fitted_class
from sm120tune.search.race import ESTIMATE_LEAST_M, Ratio, compare_estimates
from sm120tune.upstream.lookup import BUILT_IN


def out_of_reach(job: Job, m: int, *, today_runs: bool) -> str:
    """Return why nothing may be estimated into the row of M, or nothing where times are measured or it may.

    A file that SGLang loads today is for this very card: whoever made it could measure. Where its pair cannot run
    (``today_runs``) it is replaced even so.
    """
    if job.timer != "model":
        return ""
    if m < ESTIMATE_LEAST_M:
        return f"an estimate changes no row below M={ESTIMATE_LEAST_M}"
    today = job.today(m)
    if today_runs and not today.up_source == today.down_source == BUILT_IN:
        return "an estimate changes no row that a file for this card holds"
    return ""


def estimated_ratio(job: Job, m: int, pair_us: float, today_us: float) -> Ratio:
    """Return the ratio of two estimated chain times with the model's error at M as its interval."""
    return compare_estimates(pair_us, today_us, fitted_class(job.device).margin(m, job.problem.dtype))
