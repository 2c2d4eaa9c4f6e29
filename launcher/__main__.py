"""`python -m launcher` is `launcher`."""

import sys


def run() -> int:
    """Imports take a moment in which somebody may lose patience."""
    try:
        from launcher.cli.main import main

        return main()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(run())
