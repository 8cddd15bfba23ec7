"""What counts as today's after an install: the files that were there before, in a real tree."""

from __future__ import annotations

from pathlib import Path

import pytest
from made_pairs import CARD, FORCE, Maker, rows

from sm120tune.devices import find_device
from sm120tune.errors import UserError
from sm120tune.install import Place, uninstall
from sm120tune.install.manifest import BACKUP_FOLDER
from sm120tune.install.originals import originals
from sm120tune.job import Job, Settings
from sm120tune.measure.routing import UNIFORM
from sm120tune.problem import MoEProblem
from sm120tune.resolve import Card, JobRequest, resolve_job

SHIPPED = MoEProblem(experts=256, intermediate=512, hidden=2048, topk=8, router_experts=256)
"""A layer for which the release has a pair of files, made with Triton 3.6.0."""
SIZES = (1, 48, 1024, 16384)
OURS = rows(1, 8, 64, stages=5)


def job(maker: Maker) -> Job:
    settings = Settings(trials=1, exhaustive=False, budget_s=None, seed=0)
    request = JobRequest(SHIPPED, SIZES, UNIFORM, settings, maker.site, maker.output.with_name("other"))
    return resolve_job(request, Card(find_device(CARD), (), "model"))


def todays(maker: Maker) -> list[object]:
    made = job(maker)
    return [(made.today(m).pair, Path(made.today(m).up_source).name) for m in SIZES] + [made.ladder_keys(frozenset())]


def replace_the_shipped_pair(maker: Maker) -> Place:
    pair = maker.write(OURS, problem=SHIPPED, versions={"triton": "3.6.0"})
    outcome = maker.install(pair.up_path, consent=FORCE)
    assert len(outcome.pairs[0].kept) == 2
    return maker.place


def test_the_shipped_pair_that_was_replaced_is_todays(whole: Maker) -> None:
    before = todays(whole)
    assert before[0][1].endswith("Server_Edition.json")  # type: ignore[index]
    place = replace_the_shipped_pair(whole)
    # A server does load the new pair ...
    assert place.lookup(CARD, "3.6.0").todays_pair(SHIPPED, 8).pair == OURS[8]
    # ... and a new run compares with what was there before, at every M and with its keys.
    assert todays(whole) == before
    uninstall(place.base, None)
    assert todays(whole) == before
    assert originals(place.base) == {}


def test_each_file_has_its_own_original(whole: Maker) -> None:
    place = replace_the_shipped_pair(whole)
    shipped = originals(place.base)
    assert len(shipped) == 2
    for installed, backup in shipped.items():
        assert backup is not None
        assert backup == place.base / BACKUP_FOLDER / installed.relative_to(place.base)
        assert backup.read_bytes() != installed.read_bytes()
    new = whole.write()
    whole.install(new.up_path)
    replaced = originals(place.base)
    assert [replaced[path] for path in replaced if path not in shipped] == [None, None]


def test_a_file_that_came_with_an_upgrade_is_todays(whole: Maker) -> None:
    place = replace_the_shipped_pair(whole)
    brought = next(path for path in originals(place.base) if not path.stem.endswith("_down"))
    text = brought.read_text().replace('"num_stages": 5', '"num_stages": 2')
    brought.write_text(text)
    assert brought not in originals(place.base)
    pair = job(whole).today(8).pair
    assert pair is not None
    assert pair.gate_up.num_stages == 2


def test_without_the_backup_nobody_guesses(whole: Maker) -> None:
    place = replace_the_shipped_pair(whole)
    backup = next(path for path in originals(place.base).values() if path is not None)
    backup.write_text("{}")
    with pytest.raises(UserError, match=r"backup of .* damaged or gone"):
        job(whole)
