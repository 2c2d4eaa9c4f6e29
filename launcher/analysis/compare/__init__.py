"""Comparison of runs: curves, metrics, settings, time breakdown and caveats.

`load_run.py` loads a run directory into `RunFacts`; `make.py` turns several of them into a `Comparison`; `html.py` and
`render_text.py` render it.
"""

from launcher.analysis.compare.load_run import RunFacts, load_run_facts
from launcher.analysis.compare.make import make_comparison
from launcher.analysis.compare.model import Comparison

__all__ = ["Comparison", "RunFacts", "load_run_facts", "make_comparison"]
