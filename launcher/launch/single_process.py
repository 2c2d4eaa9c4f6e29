"""A script that starts one training process in place of `accelerate launch`, which would import torch first.

It accepts the same arguments and ends in the same way; the caller sets the environment that accelerate would set.
"""

from __future__ import annotations

import subprocess
import sys


def main() -> None:
    """Run the training script, and raise CalledProcessError if it fails."""
    command = [sys.executable, *sys.argv[sys.argv.index("--config_file") + 2 :]]
    with subprocess.Popen(command) as process:
        returncode = process.wait()
    if returncode:
        raise subprocess.CalledProcessError(returncode, command)


if __name__ == "__main__":
    main()
