"""`python -m launcher` is `launcher`."""

import gc
import sys


def run() -> int:
    """Run the command line and return its exit code; Ctrl-C during the slow imports prints no traceback."""
    try:
        from launcher.cli.main import main

        return main()
    except (KeyboardInterrupt, RuntimeError) as error:
        # Python 3.11 raises a RuntimeError from what interrupts the creation of a class.
        if not isinstance(error.__cause__ or error, KeyboardInterrupt):
            raise
        print("interrupted", file=sys.stderr)
        return 130
    finally:
        gc.freeze()  # the collections of Python's exit would take 0.13 s, and nothing needs the memory


if __name__ == "__main__":
    sys.exit(run())
