"""How much a call's identity costs, next to the plain ``json.dumps`` and SHA-256 that it replaces.

Run ``python benchmarks/identity.py``. The two are timed in alternating rounds, so that a busy machine
slows down both, and the median of the rounds' ratios is printed.
"""

from __future__ import annotations

import hashlib
import json
import statistics
from time import perf_counter_ns
from typing import TYPE_CHECKING

from natsreceipts.identity import ReceiptKey, args_hash

if TYPE_CHECKING:
    from collections.abc import Callable

ARGS = {
    "to": ["ada@example.org", "grace@example.org", "zoë@example.org"],
    "subject": "Ihre Bestellung: Größe geändert",
    "body": "Guten Tag, die Lieferung ist unterwegs.",
    "priority": 2,
    "weight": 0.75,
    "html": False,
    "meta": {"campaign": "spring", "customer": 40711},
    "reply_to": None,
}
LOOPS = 2_000
ROUNDS = 41


def plain() -> str:
    return hashlib.sha256(json.dumps(ARGS, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def ours() -> str:
    return args_hash(ARGS)


def microseconds(function: Callable[[], object]) -> float:
    start = perf_counter_ns()
    for _ in range(LOOPS):
        function()
    return (perf_counter_ns() - start) / LOOPS / 1000


def compare(one: Callable[[], object], other: Callable[[], object]) -> tuple[float, float, float]:
    rounds = [(microseconds(one), microseconds(other)) for _ in range(ROUNDS)]
    return (
        statistics.median(a for a, _ in rounds),
        statistics.median(b for _, b in rounds),
        statistics.median(b / a for a, b in rounds),
    )


def main() -> None:
    size = len(json.dumps(ARGS, ensure_ascii=False, separators=(",", ":")).encode())
    base, mine, ratio = compare(plain, ours)
    print(f"arguments: {len(ARGS)} keys, {size} bytes")
    print(f"json.dumps(sort_keys) + sha256   {base:6.2f} µs")
    print(f"args_hash                        {mine:6.2f} µs   {ratio:.2f} times")
    hashed = ours()
    key = statistics.median(
        microseconds(lambda: ReceiptKey("acme", "order-42", "send_email", hashed).kv_key) for _ in range(ROUNDS)
    )
    print(f"ReceiptKey(...).kv_key           {key:6.2f} µs")


if __name__ == "__main__":
    main()
