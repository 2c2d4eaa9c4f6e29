"""One piece of work beside the training: writing what was copied to the host while the next steps run."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Background:
    """Never two pieces at once. An error of one is raised where it is waited for."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, work: Callable[[], None]) -> None:
        self.wait()
        self._thread = threading.Thread(target=self._run, args=(work,), name="checkpoint", daemon=True)
        self._thread.start()

    def wait(self, beat: Callable[[], None] = lambda: None) -> None:
        """`beat` is called every second: whoever waits is alive."""
        if self._thread is not None:
            while self._thread.is_alive():
                self._thread.join(1.0)
                beat()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            self._error = error
