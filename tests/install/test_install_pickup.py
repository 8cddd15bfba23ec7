"""SGLang imported in a process of its own; what it needs besides the lookup is made up here."""

from __future__ import annotations

from pathlib import Path

import pytest
from made_pairs import Maker, picture

from sm120tune.install import PickupError, pickup

UTILS = """
import os

def get_device_name(*_args):
    return "another card"

def is_hip():
    return False
"""
CONTEXT = """
def get_exec():
    raise RuntimeError("no server here")
"""


@pytest.fixture
def importable(maker: Maker, monkeypatch: pytest.MonkeyPatch) -> Maker:
    """Return a tree that can be imported: SGLang's real lookup, without the rest of SGLang."""
    package = maker.site / "sglang"
    for init in package.rglob("__init__.py"):
        init.write_text("")
    (package / "__init__.py").touch()
    (package / "srt" / "utils.py").write_text(UTILS)
    (package / "srt" / "runtime_context.py").write_text(CONTEXT)
    monkeypatch.syspath_prepend(maker.site)
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    return maker


def test_an_sglang_that_imports_is_asked_itself(importable: Maker) -> None:
    (item,) = importable.install(importable.write().up_path).pairs
    assert item.pickup is not None
    assert item.pickup.imported == "the same"


def test_an_sglang_that_answers_otherwise_is_no_pickup(importable: Maker, tmp_path: Path) -> None:
    # Something in the real process that nobody sees from outside.
    (tmp_path / "elsewhere" / "configs").mkdir(parents=True)
    utils = importable.site / "sglang" / "srt" / "utils.py"
    utils.write_text(f"{UTILS}\nos.environ['SGLANG_MOE_CONFIG_DIR'] = {str(tmp_path / 'elsewhere')!r}\n")
    written = importable.write()
    before = picture(importable.site)
    with pytest.raises(PickupError, match=r"imported, does not load E=12.*built-in default"):
        importable.install(written.up_path)
    assert picture(importable.site) == before


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("raise ImportError('no orjson')", "ImportError: no orjson"),
        ("import os; os._exit(3)", "ended the process"),
        ("import time; time.sleep(60)", "more than 3 s"),
    ],
)
def test_an_sglang_that_does_not_import_is_passed_over(
    importable: Maker, text: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pickup, "_CHILD_TIMEOUT_S", 3.0 if "sleep" in text else 60.0)
    (importable.site / "sglang" / "__init__.py").write_text(text)
    (item,) = importable.install(importable.write().up_path).pairs
    assert item.pickup is not None
    assert said in item.pickup.imported


def test_another_sglang_that_is_importable_is_not_asked(
    maker: Maker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "other" / "sglang").mkdir(parents=True)
    (tmp_path / "other" / "sglang" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path / "other")
    (item,) = maker.install(maker.write().up_path).pairs
    assert item.pickup is not None
    assert "another sglang" in item.pickup.imported
