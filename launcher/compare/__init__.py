"""Runs side by side: curves, figures, settings, shares of the time, and what spoils the comparison.

`facts.py` and `wandb_runs.py` read a run, ours or a foreign one, into `RunFacts`; `make.py` turns several of them into
one `Comparison`, by pure functions; `html.py`, `markdown.py` and `terminal.py` write it down.
"""

from launcher.compare.facts import RunFacts, read_run
from launcher.compare.make import make_comparison
from launcher.compare.model import Comparison

__all__ = ["Comparison", "RunFacts", "make_comparison", "read_run"]
