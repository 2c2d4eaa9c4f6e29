"""A script that starts one training process in place of `accelerate launch`, which would import torch first.

It accepts the same arguments, and ends with the exit code of the training; the caller sets the environment that
accelerate would set.
"""

from __future__ import annotations

import subprocess
import sys


def main() -> None:
    """Run the training script, exit with its code, and raise CalledProcessError if it died of a signal."""
    command = [sys.executable, *sys.argv[sys.argv.index("--config_file") + 2 :]]
    with subprocess.Popen(command) as process:
        returncode = process.wait()
    if returncode > 0:  # the training has reported the reason; a traceback of this script would follow in the log
        sys.exit(returncode)
    if returncode:
        raise subprocess.CalledProcessError(returncode, command)


if __name__ == "__main__":
    main()
