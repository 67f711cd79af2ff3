"""The command line: ``natsreceipts``."""

from __future__ import annotations

import os
import signal
import sys

__all__ = ["main"]


def main() -> None:
    """Run the command line, or say in one line what to install for it.

    Ctrl-C is answered as `natsreceipts_cli` has it until all is imported, and again at the end.
    """
    quietly = signal.getsignal(signal.SIGINT)
    try:
        from natsreceipts.cli.app import app
        from natsreceipts.cli.edge import run

        if callable(quietly):  # and not ignored, as in the background of a script
            signal.signal(signal.SIGINT, signal.default_int_handler)
        code = run(app)
        signal.signal(signal.SIGINT, quietly)
    except ModuleNotFoundError as missing:
        if (missing.name or "").startswith("natsreceipts"):
            raise
        sys.exit(f"natsreceipts: {missing.name} is not installed. Run: pip install 'natsreceipts[cli]'")
    except KeyboardInterrupt:
        os.write(2, b"natsreceipts: stopped by Ctrl-C\n")
        os._exit(130)
    sys.exit(code)
