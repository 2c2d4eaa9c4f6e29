"""A script that starts one training process in place of `accelerate launch`, which would import torch first.

It accepts the same arguments, and ends with the exit code of the training; the caller sets the environment that
accelerate would set.
"""

from __future__ import annotations

import signal
import subprocess
import sys


def main() -> None:
    """Run the training script and exit with its code; if a signal killed it, with 128 + its number and a message."""
    command = [sys.executable, *sys.argv[sys.argv.index("--config_file") + 2 :]]
    with subprocess.Popen(command) as process:
        returncode = process.wait()
    if returncode < 0:
        print(f"the training process died with {signal.Signals(-returncode)!r}", file=sys.stderr)
        sys.exit(128 - returncode)
    sys.exit(returncode)


if __name__ == "__main__":
    main()
