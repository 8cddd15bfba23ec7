"""Puts tuned pairs where SGLang loads them, proves that it does, and takes them out again.

Beside the ``configs`` folder that SGLang reads, ``provenance/triton_X_Y_Z/`` holds the pairs' provenance and
``provenance/.backup/`` what was there before, with a manifest that says how to restore it.
"""

from __future__ import annotations

from sm120tune.install.actions import Installed, InstallOptions, Outcome, Uninstalled, install, uninstall
from sm120tune.install.listing import Listed, list_installed
from sm120tune.install.pair import find_pairs
from sm120tune.install.pickup import PickupError
from sm120tune.install.place import Place, find_base, find_place
from sm120tune.install.soundness import Consent

__all__ = [
    "Consent",
    "InstallOptions",
    "Installed",
    "Listed",
    "Outcome",
    "PickupError",
    "Place",
    "Uninstalled",
    "find_base",
    "find_pairs",
    "find_place",
    "install",
    "list_installed",
    "uninstall",
]
