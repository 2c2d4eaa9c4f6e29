"""Comparison of runs: curves, metrics, settings, time breakdown and caveats.

`load_run.py` and `wandb_runs.py` load a run directory or a W&B offline run into `RunFacts`; `make.py` turns several of
them into a `Comparison`; `html.py`, `markdown.py` and `terminal.py` render it.
"""

from launcher.analysis.compare.load_run import RunFacts, load_run_facts
from launcher.analysis.compare.make import make_comparison
from launcher.analysis.compare.model import Comparison

__all__ = ["Comparison", "RunFacts", "load_run_facts", "make_comparison"]
