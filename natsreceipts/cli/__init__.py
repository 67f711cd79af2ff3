"""The command line: ``natsreceipts``."""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> None:
    """Run the command line, or say in one line what to install for it."""
    try:
        from natsreceipts.cli.app import app
        from natsreceipts.cli.edge import run
    except ModuleNotFoundError as missing:
        if (missing.name or "").startswith("natsreceipts"):
            raise
        sys.exit(f"natsreceipts: {missing.name} is not installed. Run: pip install 'natsreceipts[cli]'")
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(run(app))
