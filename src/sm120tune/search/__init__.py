"""Choose what to try next and what wins; knows neither which timer answers nor which GPU."""

from __future__ import annotations
