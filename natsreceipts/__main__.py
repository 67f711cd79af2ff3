"""``python -m natsreceipts`` is ``natsreceipts``."""

from __future__ import annotations

from natsreceipts.cli import main

if __name__ == "__main__":
    main()
