"""A study's run: ``python -m envace.study.child PIPE ARGUMENT…`` is ``envace ARGUMENT…``, and ends when its study does.

PIPE is a descriptor to read from. Only the study holds the other end and it writes nothing, so reading ends when the study
is gone, whatever ended it; a signal from the kernel for that (``PR_SET_PDEATHSIG``) is Linux's alone.
"""

from __future__ import annotations

import os
import sys
import threading


def _end_with(pipe: int) -> None:
    os.read(pipe, 1)
    os._exit(1)  # as a kill would, at whatever point the run is


def main() -> None:
    pipe = int(sys.argv.pop(1))
    threading.Thread(target=_end_with, args=(pipe,), daemon=True).start()
    from envace.cli import main as envace  # only now, for it takes its time

    envace()


if __name__ == "__main__":
    main()
