"""The program ``natsreceipts``, up to the point where the package is imported, which takes a moment.

It stands beside the package, so that Ctrl-C in that moment ends it in one line: raised in the middle of an import, it
would show a traceback, or be taken by the module that is imported for a failure of its own.
"""

from __future__ import annotations

import os
import signal
from typing import NoReturn

__all__ = ["main"]


def main() -> None:
    """Run the command line (`natsreceipts.cli.main`)."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _stopped)
    from natsreceipts.cli import main as run

    run()


def _stopped(*_: object) -> NoReturn:
    os.write(2, b"natsreceipts: stopped by Ctrl-C\n")
    os._exit(130)
