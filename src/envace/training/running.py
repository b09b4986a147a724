"""What every long run has: lines that tell how it goes, a log in its folder, and a Ctrl-C that loses nothing."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

Progress = Callable[[str], object]

_log = logging.getLogger(__name__)


def teller(progress: Progress) -> Progress:
    """Tells ``progress`` and the log. Where nobody listens any more (``| head``, a full disk) the log alone is told."""
    listens = True

    def say(line: str) -> None:
        nonlocal listens
        _log.info(line)
        if listens:
            try:
                progress(line)
            except OSError as error:
                listens = False
                _log.warning("progress cannot be printed any more (%s); the run goes on", error.strerror or error)

    return say


@contextmanager
def logged(file: Path) -> Iterator[None]:
    """What the package logs goes to ``file`` too.

    Raises:
        OSError: it cannot be opened.
    """
    package = logging.getLogger("envace")
    handler = logging.FileHandler(file, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    # A disk that is full ends the run where it would cost a result, with one message; not here, with a traceback a line.
    handler.handleError = lambda record: None  # type: ignore[method-assign]
    level = package.level
    package.addHandler(handler)
    package.setLevel(logging.INFO)
    try:
        yield
    finally:
        package.removeHandler(handler)
        package.setLevel(level)
        handler.close()


@contextmanager
def stop_after_step() -> Iterator[Callable[[], bool]]:
    """The first interrupt asks for a stop after the step; a second one stops at once."""
    asked = False

    def ask(signum: int, frame: Any) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True
        # Not by print: the interrupt may have come in the middle of one, and a stream cannot be entered twice.
        os.write(2, b"finishing the step, then saving; press Ctrl-C again to stop at once\n")

    previous = signal.signal(signal.SIGINT, ask)
    try:
        yield lambda: asked
    finally:
        signal.signal(signal.SIGINT, previous)
