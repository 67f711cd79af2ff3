"""One JetStream message as one turn: kept in progress, acknowledged when the turn ended well, else given back."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING, Protocol

from natsreceipts.announce import NEEDS_A_PERSON
from natsreceipts.background import stopped
from natsreceipts.entries import forget_since, remembered
from natsreceipts.errors import (
    CallInFlight,
    CallWithdrawn,
    InvalidSetting,
    LeaseLost,
    NotClaimed,
    SessionBusy,
)
from natsreceipts.run import delivered, operated

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable

__all__ = ["Delivery", "JetStreamMessage", "deliver"]

_log = logging.getLogger("natsreceipts")

_NEEDS_A_PERSON = tuple(NEEDS_A_PERSON)
_SOON = 1.0
_LONGEST_RETRY = 60.0
"""Seconds between two tries of a turn that fails by itself: given back at once it would fail a thousand times a
second, and write twice each time (measured)."""
_AGAIN = 0.1
_FIRST_DELAY = 30.0
_LONGEST_DELAY = 3600.0


class _Metadata(Protocol):
    @property
    def num_delivered(self) -> int:
        """How often the message was delivered, from 1."""
        ...


class JetStreamMessage(Protocol):
    """What is needed of a message: nats-py's ``Msg`` as a JetStream consumer delivers it."""

    @property
    def metadata(self) -> _Metadata:
        """What the reply subject says of the delivery."""
        ...

    async def ack(self) -> None:
        """Done."""
        ...

    async def nak(self, delay: float | None = None) -> None:
        """Deliver again, after ``delay`` seconds."""
        ...

    async def term(self) -> None:
        """Never deliver again."""
        ...

    async def in_progress(self) -> None:
        """Still at it."""
        ...


class Delivery:
    """The delivery that a body runs in. ``number`` counts from 1; ``redelivered`` from the second one on."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.redelivered = number > 1


@contextlib.asynccontextmanager
async def deliver(
    msg: JetStreamMessage, *, terminate: bool, progress: float, tell: Callable[[Exception], Awaitable[None]] | None
) -> AsyncGenerator[Delivery, None]:
    """The body of ``Toolkit.delivery``. ``tell`` is told of what needs a person, before the message is given back."""
    try:
        delivery = Delivery(msg.metadata.num_delivered)
    except Exception as error:
        raise InvalidSetting(
            "delivery() needs a message as a JetStream consumer delivers it (nats-py's Msg from a JetStream "
            "subscription), and this is another one"
        ) from error
    beat = asyncio.get_running_loop().create_task(_keep_in_progress(msg, progress))
    scope, told = delivered.set(delivery.number), operated.set(tell)
    entries = remembered()
    try:
        yield delivery
    except BaseException as error:
        try:
            if tell is not None:
                # All at once: each is seen through though the turn be cancelled meanwhile.
                needy = [one for one in _errors_in(error) if isinstance(one, _NEEDS_A_PERSON)]
                await asyncio.gather(*map(tell, needy))
        finally:
            await stopped(beat, again=_AGAIN)
            await _give_back(msg, error, delivery.number, terminate=terminate)
        raise
    else:
        await stopped(beat, again=_AGAIN)
        try:
            await msg.ack()
        except Exception as failure:  # noqa: BLE001 - the turn ended well; delivered again, it replays
            _log.warning("a delivery could not be acknowledged, and will come again: %s", failure)
    finally:
        beat.cancel()
        with contextlib.suppress(ValueError):  # the generator was closed in another context
            delivered.reset(scope)
            operated.reset(told)
            forget_since(entries)


async def _keep_in_progress(msg: JetStreamMessage, every: float) -> None:
    while True:
        await asyncio.sleep(every)
        try:
            await msg.in_progress()
        except Exception as error:  # noqa: BLE001 - the connection's trouble; the message is then redelivered
            _log.warning("a delivery could not be kept in progress: %s", error)


def _errors_in(error: BaseException) -> list[BaseException]:
    """The errors that a group holds at any depth, each once; of what is no group, itself."""
    found: dict[int, BaseException] = {}
    groups = [error]
    while groups:
        one = groups.pop()
        if isinstance(one, BaseExceptionGroup):
            groups.extend(reversed(one.exceptions))  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]
        else:
            found[id(one)] = one
    return [*found.values()]


async def _give_back(msg: JetStreamMessage, error: BaseException, number: int, *, terminate: bool) -> None:
    errors = _errors_in(error)
    try:
        if terminate and any(isinstance(one, _NEEDS_A_PERSON) for one in errors):
            await msg.term()
            return
        delays = [delay for one in errors if (delay := _delay(one, number)) is not None]
        if delays:
            await msg.nak(delay=max(delays))
        else:
            await msg.nak()
    except Exception as failure:  # noqa: BLE001 - the body's error is the one to raise; the server redelivers
        _log.warning("a delivery could not be given back: %s", failure)


def _delay(error: BaseException, number: int) -> float | None:
    """Seconds until the turn makes sense again; None where the worker is going down, and another may start at once."""
    if not isinstance(error, Exception):
        return None
    if isinstance(error, (*_NEEDS_A_PERSON, CallWithdrawn)):
        return _growing(number)
    if isinstance(error, CallInFlight | SessionBusy):
        return max(error.retry_after, _SOON)
    if isinstance(error, LeaseLost | NotClaimed):
        return _SOON
    return min(_SOON * 2 ** min(number - 1, 10), _LONGEST_RETRY)


def _growing(number: int) -> float:
    return min(_FIRST_DELAY * 2 ** min(number - 1, 10), _LONGEST_DELAY)
