"""The server's clock at one moment: how long leases and receipts have left by it, never by this machine's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from natsreceipts.attempt import margin_of

if TYPE_CHECKING:
    import datetime as dt

    from natsreceipts.receipt import Receipt

__all__ = ["ServerTime"]


@dataclass(frozen=True, slots=True)
class ServerTime:
    """The server's clock. Ask for it before you read receipts: what was written since then only has more time.

    ``leader_since``: when the bucket's leader took over (None on a single server). ``retention``: seconds that a
    receipt is kept after its last write; 0: for ever.
    """

    now: dt.datetime
    leader_since: dt.datetime | None
    retention: float

    def lease_left(self, receipt: Receipt) -> float | None:
        """Seconds until others may judge a running attempt dead, with the margin; 0 or less: they may. Else None.

        A leader change gives every lease its whole length again.
        """
        if receipt.status != "running" or receipt.lease is None:
            return None
        since = max(receipt.updated, self.leader_since) if self.leader_since is not None else receipt.updated
        return receipt.lease + margin_of(receipt.lease) - (self.now - since).total_seconds()

    def kept_for(self, receipt: Receipt) -> float | None:
        """Seconds until the receipt expires, after which its call can be executed again; None: never."""
        return None if not self.retention else self.retention - (self.now - receipt.updated).total_seconds()
