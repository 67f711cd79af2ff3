"""A run: the scope in which equal calls are one call, and the two doors into it, `execute` and `call`."""

from __future__ import annotations

import asyncio
import inspect
import logging
from contextvars import ContextVar
from functools import partial
from types import CoroutineType
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeVar, cast, overload

from natsreceipts.background import Pulse, Stragglers, see_through
from natsreceipts.decision import Effect
from natsreceipts.entering import recorded
from natsreceipts.entries import ambient_entries, remembered
from natsreceipts.errors import (
    CallInFlight,
    InvalidSetting,
    NatsReceiptsError,
    NoActiveRun,
    NotClaimed,
    Unreachable,
    with_key,
)
from natsreceipts.guard import Call, inside, mark_left
from natsreceipts.identity import Digest, ReceiptKey, args_hash, key_token
from natsreceipts.notice import check_run
from natsreceipts.options import CallOptions, takes_argument
from natsreceipts.telemetry import CallDecided
from natsreceipts.wire import quick_result

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine
    from types import TracebackType

    from natsreceipts._jetstream import Entry
    from natsreceipts.attempts import Attempts
    from natsreceipts.entries import SessionEntry
    from natsreceipts.notices import NoticeBoard

__all__ = ["Executions", "Run", "active_run", "current_run", "delivered", "operated"]

_log = logging.getLogger("natsreceipts")

_T = TypeVar("_T")


class _Scope(NamedTuple):
    run: Run
    outer: _Scope | None


_scope: ContextVar[_Scope | None] = ContextVar("natsreceipts_run", default=None)

delivered: ContextVar[int] = ContextVar("natsreceipts_delivered", default=0)
"""How often the message whose turn this is was delivered; 0 outside a delivery.

From the second time on receipts are probably there already, so calls read before they claim; the first time there
are none, so a run is not prefetched.
"""

operated: ContextVar[Callable[[Exception], Awaitable[None]] | None] = ContextVar("natsreceipts_operated", default=None)
"""How the operator whom the delivery around names is told of an error; None where it names nobody.

Where it names one, runs have names that notices can be filed on.
"""

_PREFETCH = (16 * 1024, 4 * 1024 * 1024)
"""Bytes of the largest record that is prefetched, and of all of them."""


def active_run() -> Run | None:
    """The run of the innermost ``async with run:``, or None outside one."""
    scope = _scope.get()
    return scope.run if scope is not None else None


def current_run() -> Run:
    """The run of the innermost ``async with run:``. Raises NoActiveRun outside one."""
    run = active_run()
    if run is None:
        raise NoActiveRun
    return run


class Executions:
    """The `execute` calls under way in this process: equal ones share one execution."""

    def __init__(self) -> None:
        self._shared: dict[object, _Shared] = {}

    async def join(self, identity: object, work: Callable[[], Coroutine[Any, Any, _T]], *, wait: float) -> _T:
        """Take part in the execution with this identity, or start it as a task of its own.

        One waiter's cancellation detaches it; the last one's cancels the execution and waits for its end. Who joins
        waits up to ``wait`` seconds, as it would for another process, and then gets `_StillRunning` (else two
        bodies that execute each other's call would wait for ever).
        """
        shared = self._shared.get(identity)
        if shared is not None and not shared.abandoned:
            return cast("_T", await shared.result(wait))
        shared = self._shared[identity] = _Shared(self, identity, work())
        return cast("_T", await shared.result())

    def forget(self, identity: object, shared: object) -> None:
        """An execution ended. (If it was abandoned, another of the same identity may have followed it.)"""
        if self._shared.get(identity) is shared:
            del self._shared[identity]


class _StillRunning(Exception):
    """A shared execution took longer than its joiner would wait."""


class _Shared:
    __slots__ = ("_executions", "_identity", "_waiting", "abandoned", "task")

    def __init__(self, executions: Executions, identity: object, work: Coroutine[Any, Any, Any]) -> None:
        self._executions = executions
        self._identity = identity
        self.task: asyncio.Task[Any] = asyncio.get_running_loop().create_task(work)
        self.task.add_done_callback(self._wake)
        self.abandoned = False
        self._waiting: list[asyncio.Future[None]] = []

    async def result(self, wait: float | None = None) -> Any:
        task = self.task
        if not task.done():
            waiter = asyncio.get_running_loop().create_future()
            self._waiting.append(waiter)
            try:
                if wait is None:
                    await waiter
                else:
                    await asyncio.wait([waiter], timeout=wait)
                    if not waiter.done() and len(self._waiting) > 1:
                        self._waiting.remove(waiter)
                        raise _StillRunning
                    await waiter  # whoever started it is gone: somebody must stay with it
            except asyncio.CancelledError:
                self._waiting.remove(waiter)
                if not self._waiting and not task.done():
                    self.abandoned = True
                    task.cancel()
                    await see_through(_settled(task), within=None)
                elif task.done() and not task.cancelled():
                    task.exception()  # looked at, though this caller is told of its cancellation only
                raise
        return task.result()

    def _wake(self, task: asyncio.Task[Any]) -> None:
        self._executions.forget(self._identity, self)
        for waiter in self._waiting:
            if not waiter.done():
                waiter.set_result(None)
        if not self._waiting and not task.cancelled():
            task.exception()  # nobody is left to be told


async def _settled(task: asyncio.Task[Any]) -> None:
    await asyncio.wait([task])


class Run:
    """One run of an agent for one tenant: within it, equal calls of a tool are one call.

    As an async context manager it becomes the ambient run, in which `@tool` functions find themselves. Made by
    ``toolkit.run(tenant, run)``; keyword arguments given there are the defaults of its calls.
    """

    def __init__(
        self,
        store: Attempts,
        pulse: Pulse,
        stragglers: Stragglers,
        executions: Executions,
        tenant: str,
        run: str,
        *,
        digest: Digest,
        defaults: dict[str, Any],
        notices: NoticeBoard,
    ) -> None:
        # Bad names and settings are refused here, not at the first call.
        ReceiptKey(tenant, run, "-", "0" * 64)
        self.tenant = tenant
        self.run = run
        self._check_room()
        self._notices = notices
        self._store = store
        self._pulse = pulse
        self._stragglers = stragglers
        self._executions = executions
        self._digest = digest
        self._defaults = defaults
        self._entered = 0
        self._warned = False
        self._prefetched = False
        self._known: dict[str, Entry] = {}
        self._plain: CallOptions | None = None
        self._plain = self._options_of({})

    def __repr__(self) -> str:
        return f"Run({self.tenant!r}, {self.run!r})"

    @property
    def options(self) -> CallOptions:
        """The options of its calls that do not say others."""
        return self._options_of({})

    @property
    def notices(self) -> NoticeBoard:
        """The notices of this run, at the endpoint of its tenant. Raises InvalidName for a run that has no room there.

        (1 to 64 of A-Z, a-z, 0-9, _ and - have.)
        """
        return self._notices.of(self.tenant, self.run)

    def _check_room(self) -> None:
        """Where an operator is to hear of calls, nothing is executed of which no notice could be filed."""
        if operated.get() is not None:
            check_run(self.run)

    async def __aenter__(self) -> Self:
        self._check_room()
        self._entered += 1
        _scope.set(_Scope(self, _scope.get()))
        if self._entered == 1 and delivered.get() != 1:
            try:
                await self._prefetch()
            except BaseException:
                await self.__aexit__(None, None, None)
                raise
        return self

    async def _prefetch(self) -> None:
        """Fetch the run's receipts in one request, so that a retried turn replays without a round trip per call.

        Bounded: over 1,024 keys, and for records over 16 KiB, it reads as it goes. What cannot be fetched is no
        error: every call finds out for itself.
        """
        pattern = f"{key_token(self.tenant)}.{key_token(self.run)}.*.*"
        try:
            known = await self._store.prefetch(
                pattern, most_keys_bytes=_PREFETCH, pace=self._store.pace(30.0, patience=5.0)
            )
        except NatsReceiptsError as error:
            _log.info("run %s of %s is not prefetched: %s", self.run, self.tenant, error)
            return
        if known is not None:
            self._known, self._prefetched = known, True

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        scope = _scope.get()
        _scope.set(scope.outer if scope is not None else None)
        self._entered -= 1
        if self._entered == 0:
            self._known, self._prefetched = {}, False

    def key(self, tool: str, args: object, *, distinct: str | None = None) -> ReceiptKey:
        """The key of a call. Raises NotCanonical (the arguments have no canonical JSON) and InvalidName."""
        return ReceiptKey(self.tenant, self.run, tool, args_hash(args, digest=self._digest, distinct=distinct))

    def call(self, tool: str, args: object, *, distinct: str | None = None, **options: Any) -> Call:
        """Guard one call of ``tool`` with these arguments (plain JSON data).

        ``distinct`` sets apart two calls of equal arguments that are meant to be two. Options as in `CallOptions`.
        Raises NotCanonical, InvalidName and InvalidSetting before anything is written.
        """
        self._check_room()
        key = self.key(tool, args, distinct=distinct)
        chosen = self._options_of(options)
        entries = self._entries_for(chosen)
        return self._call(key, chosen, args, self._known.get(key.kv_key), self._reads_first(), entries)

    def _entries_for(self, options: CallOptions) -> tuple[SessionEntry, ...]:
        """Where in a session a call is asked for: as it says, or in an ambient entry."""
        entry = options.entry
        if entry is None:
            entries = ambient_entries(self.tenant, self.run, stream=self._store.session_stream)
            if not entries and not self._warned:
                self._warn_of_another_run()
            return entries
        if self._store.session_stream not in (None, entry.stream):
            raise InvalidSetting(f"entry= is of session {entry.session} in another namespace, or on another server")
        if entry.tenant != self.tenant:
            raise InvalidSetting(
                f"entry= is of session {entry.session} of tenant {entry.tenant}, and this run of {self.tenant}"
            )
        if entry.run is not None and entry.run != self.run:
            raise InvalidSetting(
                f"entry= says that its calls are made in run {entry.run}, and this is run {self.run}: wake would look "
                f"for the receipt there, and tell the model that the call never started"
            )
        return (entry,)

    def _warn_of_another_run(self) -> None:
        """Once: a call that is made in another run than its entry names is one that wake looks for in vain."""
        stream = self._store.session_stream
        others = [each for each in remembered() if each.tenant == self.tenant and stream in (None, each.stream)]
        if others and others[-1].run is not None:
            self._warned = True
            _log.warning(
                "a call in run %s, and entry %d of session %s says that its calls are made in run %s: if this is one "
                "of them, wake will not find it, and will say that it never started",
                self.run,
                others[-1].seq,
                others[-1].session,
                others[-1].run,
            )

    def _reads_first(self) -> bool:
        return delivered.get() > 1 and not self._prefetched

    def _call(
        self,
        key: ReceiptKey,
        options: CallOptions,
        args: object,
        known: Entry | None,
        read_first: bool,
        entries: tuple[SessionEntry, ...],
    ) -> Call:
        return Call(
            self._store,
            self._pulse,
            self._stragglers,
            key,
            options,
            args=args,
            known=known,
            read_first=read_first,
            entries=entries,
        )

    async def _peek(self, key: ReceiptKey) -> Entry | None:
        try:
            return await self._store.peek(key, self._store.pace(30.0, patience=5.0))
        except NatsReceiptsError as error:
            raise with_key(error, key)  # noqa: B904 - it is the same error

    @overload
    async def execute(
        self,
        tool: str,
        args: object,
        fn: Callable[[], Awaitable[_T]],
        *,
        distinct: str | None = None,
        **options: Any,
    ) -> _T: ...

    @overload
    async def execute(
        self,
        tool: str,
        args: object,
        fn: Callable[[Call], Awaitable[_T]],
        *,
        distinct: str | None = None,
        **options: Any,
    ) -> _T: ...

    async def execute(
        self,
        tool: str,
        args: object,
        fn: Callable[..., Awaitable[Any]],
        *,
        distinct: str | None = None,
        **options: Any,
    ) -> Any:
        """Execute ``fn`` once for this call, or return the recorded result of the attempt that did.

        ``fn`` takes no argument, or one: the `Call`. What it returns (awaited) is the result, and comes back as a
        replay would give it. Equal calls in this process share one execution, and get the very same result object.
        Raises what `Call` raises, and what ``fn`` raises.
        """
        self._check_room()
        wants_call = takes_argument(fn)
        key = self.key(tool, args, distinct=distinct)
        chosen = self._options_of(options)
        entries = self._entries_for(chosen)
        known = self._known.get(key.kv_key)
        if known is not None:
            quick = quick_result(key, known.revision, known.value)
            if quick is not None and chosen.result_type is None and chosen.effect is not Effect.READ:
                if self._store.hooks is not None:
                    self._store.hooks.emit(CallDecided(key, "replay", quick.attempts, None))
                return quick.result
        if chosen.effect is not Effect.READ and inside(key):
            raise CallInFlight(key, retry_after=0.0, reason="this call is made inside its own body")
        began = None
        if known is None and self._reads_first() and chosen.effect is not Effect.READ:
            began = asyncio.get_running_loop().time()
            known = await self._peek(key)
        if known is not None:
            try:
                found = await recorded(self._store, key, chosen, known)
            except Unreachable as error:
                raise NotClaimed(key, str(error)) from error
            if found is not None:
                if self._store.hooks is not None:
                    seconds = None if began is None else asyncio.get_running_loop().time() - began
                    self._store.hooks.emit(CallDecided(key, "replay", found.attempts, seconds))
                return found.result

        # No closure: its cells would be a quarter of all objects that a waiting call keeps alive.
        work = partial(self._carried_out, fn, wants_call, key, chosen, args, known, entries)
        if chosen.effect is Effect.READ:
            return await work()
        where = tuple([(entry.token, entry.seq) for entry in entries])
        identity = (key, where, chosen.effect, chosen.result_type, chosen.store_args)
        try:
            return await self._executions.join(identity, work, wait=chosen.wait)
        except _StillRunning:
            raise CallInFlight(
                key, retry_after=chosen.lease / 3, reason="this process is executing the call right now"
            ) from None
        except BaseException as error:
            mark_left(error)
            raise

    async def _carried_out(
        self,
        fn: Callable[..., Awaitable[Any]],
        wants_call: bool,
        key: ReceiptKey,
        chosen: CallOptions,
        args: object,
        known: Entry | None,
        entries: tuple[SessionEntry, ...],
    ) -> Any:
        async with self._call(key, chosen, args, known, False, entries) as call:
            if not call.replayed:
                value: object = fn(call) if wants_call else fn()
                # The type is the quick look; the other asks an abstract base class.
                if type(value) is CoroutineType or inspect.isawaitable(value):
                    value = await cast("Awaitable[object]", value)
                call.result = value
        return call.result

    def _options_of(self, options: dict[str, Any]) -> CallOptions:
        if not options and self._plain is not None:
            return self._plain
        chosen = {**self._defaults, **options}
        if unknown := chosen.keys() - CallOptions.__dataclass_fields__.keys():
            names = ", ".join(CallOptions.__dataclass_fields__)
            raise InvalidSetting(f"{', '.join(sorted(unknown))}: no option of a call, which takes {names}")
        return CallOptions(**chosen)
