"""The fence of a wake in a receipt: from which place in a session's log on this call may be claimed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from natsreceipts.errors import Unreachable
from natsreceipts.fence import InDoubt, Landed, NotWritten, advance, raise_refusal
from natsreceipts.wire import ReceiptRecord, read_receipt

if TYPE_CHECKING:
    from natsreceipts._jetstream import Bucket, Entry
    from natsreceipts.fence import Pace
    from natsreceipts.identity import ReceiptKey
    from natsreceipts.seen import Seen

__all__ = ["withdraw"]


async def withdraw(
    bucket: Bucket, key: ReceiptKey, seen: Seen | None, *, token: str, position: int, pace: Pace
) -> int | None:
    """Make sure that no claim from ``position`` of the session ``token``, or from before it, is accepted any more.

    On what was ``seen``: nothing, a withdrawn or a failed record. The revision at which the fence stands; None: the
    receipt has moved on, so look again. A fence never goes down. Raises Unreachable where it could not be written or
    that is not known (it does no harm where it stands: nobody was told anything), and what the seam raises.
    """
    bucket = bucket.of(key.kv_key)
    fences = dict(seen.record.fences or {}) if seen is not None else {}
    if seen is not None and fences.get(token, -1) >= position:
        return seen.revision
    fences[token] = position
    nonce = bucket.nonce()
    if seen is None:
        record = ReceiptRecord(
            v=1,
            write=nonce,
            status="withdrawn",
            tenant_id=key.tenant,
            run_id=key.run,
            tool_name=key.tool,
            args_hash=key.args_hash,
            attempts=0,
            fences=fences,
        )
    else:
        record = seen.record.model_copy(update={"write": nonce, "fences": fences})

    def is_mine(entry: Entry) -> bool:
        return not entry.erased and read_receipt(bucket.name, key, entry.revision, entry.value).write == nonce

    try:
        outcome = await advance(
            bucket,
            key.kv_key,
            record.to_bytes(),
            expected=seen.revision if seen is not None else 0,
            is_mine=is_mine,
            pace=pace,
        )
    except (NotWritten, InDoubt) as failure:
        raise_refusal(failure)
        raise Unreachable(
            f"{key.kv_key}: that a claim from before is refused could not be written ({failure}), so the model is told "
            f"nothing yet; wake the session again"
        ).because(failure.cause) from failure.cause
    return outcome.revision if isinstance(outcome, Landed) else None
