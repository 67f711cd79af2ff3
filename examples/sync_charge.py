"""A script without an event loop that charges a card, is killed in the middle (kill -9), and is run again.

    python examples/sync_charge.py

The script is `charge` below: plain blocking code, with `natsreceipts.sync` around the one call that must not happen
twice. The bank is a ledger in a file. The first run is killed after the bank has booked the charge and before that is
on record, the moment in which nobody can know. The second run asks the bank (`verify=`) instead of charging again, and
the third one finds the result on record.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import tempfile
from pathlib import Path

import natsreceipts
from natsreceipts import sync

LEASE = 1.5  # seconds of silence after which the next run takes over: short, since somebody is watching


def book(ledger: Path, amount: int, key: str) -> str:
    """The bank: one line in the ledger for every charge that it is asked for."""
    with ledger.open("a") as file:
        file.write(json.dumps({"key": key, "amount": amount}) + "\n")
    return f"charge {key[:8]}"


def charge(url: str, ledger: Path, *, killed: bool) -> None:
    """The script."""

    def pay(call: sync.Call) -> str:
        booked = book(ledger, 4200, call.idempotency_key)
        if killed:
            os.kill(os.getpid(), signal.SIGKILL)
        return booked

    def ask_the_bank(call: sync.Call) -> natsreceipts.Landed | natsreceipts.NotLanded:
        for line in ledger.read_text().splitlines():
            if json.loads(line)["key"] == call.idempotency_key:
                return natsreceipts.Landed(f"charge {call.idempotency_key[:8]}")
        return natsreceipts.NotLanded()

    with sync.connect(url, provision=True) as toolkit:
        run = toolkit.run("acme", "order-42")
        with run.call("charge", {"amount": 4200}, verify=ask_the_bank, lease=LEASE) as call:
            if not call.replayed:
                call.result = pay(call)
        how = "replayed from its receipt" if call.replayed else "charged"
        print(f"{call.result}: {how}, attempt {call.attempt}", flush=True)


async def show() -> bool:
    """Run the script three times. Whether the card was charged once."""
    with tempfile.TemporaryDirectory() as folder:
        ledger = Path(folder, "ledger")
        async with natsreceipts.embedded() as server:
            for number in (1, 2, 3):
                print(f"run {number}:", flush=True)
                arguments = [server.url, str(ledger), *(["killed"] if number == 1 else [])]
                process = await asyncio.create_subprocess_exec(sys.executable, __file__, *arguments)
                if await process.wait() == -signal.SIGKILL:
                    print("kill -9: booked, and not yet on record", flush=True)
        lines = ledger.read_text().splitlines()
        print(f"the bank booked {len(lines)} charge{'s' if len(lines) != 1 else ''}")
        return len(lines) == 1


if __name__ == "__main__":
    if len(sys.argv) > 2:
        charge(sys.argv[1], Path(sys.argv[2]), killed=len(sys.argv) > 3)
    else:
        sys.exit(0 if asyncio.run(show()) else 1)
