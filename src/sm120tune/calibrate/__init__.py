"""Calibrating the cost model on a card: a few chosen tiles are timed there, and its constants are fitted to them."""
