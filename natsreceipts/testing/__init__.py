"""For tests: faults between NATS clients and a server, and workers that are killed.

::

    async with FaultProxy("127.0.0.1", server.port) as proxy:
        lost = proxy.drop_answer("$KV.receipts.>")  # the next claim lands, and its writer never hears of it
        async with connect(proxy.url) as toolkit:
            ...
        await lost.answered()

Every fault is an event to wait for, so a test needs no sleeps. Plain TCP only: no TLS, no websockets.

`kill_worker` kills a worker at each of its writes, runs it again, and shows what became of its effects. With pytest
all of it comes as fixtures: ``receipts_server``, ``receipts_namespace``, ``receipts_toolkit``, ``receipts_proxy``
and ``kill_worker``. See docs/testing.md.
"""

from __future__ import annotations

from natsreceipts.testing.faults import Fault, HeldFault, Match
from natsreceipts.testing.frames import Published
from natsreceipts.testing.proxy import Direction, FaultProxy
from natsreceipts.testing.servers import ServerAddress
from natsreceipts.testing.trials import Moment, Trial, WorkerFailed, is_write, kill_worker

__all__ = [
    "Direction",
    "Fault",
    "FaultProxy",
    "HeldFault",
    "Match",
    "Moment",
    "Published",
    "ServerAddress",
    "Trial",
    "WorkerFailed",
    "is_write",
    "kill_worker",
]
