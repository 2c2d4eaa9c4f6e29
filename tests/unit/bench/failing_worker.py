"""A measuring process that fails with a traceback."""

from __future__ import annotations

import json
import sys
from pathlib import Path

if __name__ == "__main__":
    raise RuntimeError(f"{json.loads(Path(sys.argv[1]).read_text())['backend']} needs a GPU")
