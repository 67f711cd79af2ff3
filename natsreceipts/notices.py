"""The notices of one bucket: filed once, carried by one turn, listed in one order.

A notice is two records, both create-only: the spec, which says what was decided, and the status, which says which
turn carried it. So the server is the only arbiter, of who filed a notice and of who consumes it; a look before the
write would decide nothing.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, TypeAlias, cast, overload

from natsreceipts.errors import AlreadyConsumed, InvalidName, InvalidSetting, NoticeConflict, Unreachable, brief
from natsreceipts.notice import (
    RunNoticeFact,
    check_endpoint,
    check_instant,
    check_notice_id,
    check_run,
    check_text,
    endpoint_of,
    notice_addressee_id,
    run_notice_id,
)
from natsreceipts.notice_record import FiledNotice, Notice, NoticeSpec, NoticeStatus, read_spec
from natsreceipts.notice_store import NoticeStore
from natsreceipts.notice_table import render_notices

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence

    from natsreceipts._jetstream import Bucket
    from natsreceipts.errors import NatsReceiptsError

__all__ = ["NoticeBoard"]

_AT_ONCE = 64
"""Notices that one call files at the same time."""

_WATCH_AGAIN = 0.5
"""Seconds after which a watch tries again while no server answers."""

_WATCH_EVERY = 5.0
"""Seconds after which a watch reads although no sign of a write came."""

_Fact: TypeAlias = "RunNoticeFact | Mapping[str, Any]"
_Notices: TypeAlias = "list[Notice]"


class NoticeBoard:
    """The notices of one endpoint; of one run, where the board is a run's (``run=`` is filled in then).

    All reads but `read` come from any replica, and may lag for a moment behind what was just filed; on a single
    server they do not. What is filed and consumed is decided by the leader alone. Nothing but `file` and `consume`
    writes. Raised by all of them: Unreachable, PermissionDenied, NotProvisioned, BucketReplaced; InvalidName for names
    that the layout has no room for; and by all that read, CorruptRecord and UnsupportedRecord for a record that cannot
    be read: it is never left out in silence.
    """

    def __init__(self, bucket: Bucket, *, endpoint: str = "local", run: str | None = None) -> None:
        check_endpoint(endpoint)
        if run is not None:
            check_run(run)
        self._bucket = bucket
        self._store = NoticeStore(bucket)
        self._run = run
        self.endpoint = endpoint
        """What separates the boards of one bucket, as it stands in the keys."""

    def __repr__(self) -> str:
        return f"NoticeBoard({self.endpoint!r}{f', run={self._run!r}' if self._run else ''})"

    def at(self, endpoint: str) -> NoticeBoard:
        """The board of another endpoint. Raises InvalidName."""
        return NoticeBoard(self._bucket, endpoint=endpoint)

    def of(self, tenant: str, run: str) -> NoticeBoard:
        """The board of a tenant's run, at the endpoint that separates tenants (``run.notices``). Raises InvalidName."""
        return NoticeBoard(self._bucket, endpoint=endpoint_of(tenant), run=run)

    # ------------------------------------------------------------------ filing

    @overload
    async def file(
        self,
        *,
        run: str | None = None,
        step: str,
        request_id: str,
        addressee: str,
        fact: _Fact,
        at: int | None = None,
    ) -> FiledNotice: ...

    @overload
    async def file(
        self,
        *,
        run: str | None = None,
        step: str,
        request_id: str,
        addressees: Sequence[str],
        fact: _Fact,
        at: int | None = None,
    ) -> list[FiledNotice]: ...

    async def file(
        self,
        *,
        run: str | None = None,
        step: str,
        request_id: str,
        addressee: str | None = None,
        addressees: Sequence[str] | None = None,
        fact: _Fact,
        at: int | None = None,
    ) -> FiledNotice | list[FiledNotice]:
        """File one notice to ``addressee``, or one to each of ``addressees``, unless it stands there already.

        ``fact`` is a `RunNoticeFact` or a mapping of its fields, ``step`` the step that decided it, ``request_id``
        what this step is always called by: the ids come from it, so a retry lands on its own notices, and gets
        ``created=False``. ``at``: milliseconds since the epoch; None is the server's now, and then the instant of the
        first filing stands.

        ``created`` is False for what was filed before. After a lost answer it is True where what stands was written
        since this call began and is byte for byte what was sent: of two who file the very same, ``at`` included, at
        the same time, both may be told so.

        Raises NoticeConflict where something else stands under the id (``at`` counts, if it was given); InvalidFact,
        InvalidName and InvalidSetting before anything is written; Unreachable where it is not filed, or not known to
        be: file it again. Of several notices each is tried, whatever becomes of the others, and then the first
        error is raised.
        """
        run = self._run_of(run)
        names = _addressed(addressee, addressees)
        for what, text in (("step", step), ("request_id", request_id), *(("addressee", name) for name in names)):
            check_text(what, text)
        said = RunNoticeFact.of(fact)
        if at is not None:
            check_instant("at", at)
        now = await self._store.now(self._prefix(run))
        instant = at if at is not None else now // 1_000_000
        specs = [NoticeSpec(run=run, step=step, addressee=name, fact=said, at=instant) for name in names]
        if addressee is not None:
            return await self._file(specs[0], request_id, at, now)
        filed: list[FiledNotice] = []
        failed: list[BaseException] = []
        for first in range(0, len(specs), _AT_ONCE):
            together = [self._file(spec, request_id, at, now) for spec in specs[first : first + _AT_ONCE]]
            for outcome in await asyncio.gather(*together, return_exceptions=True):
                if isinstance(outcome, BaseException):
                    failed.append(outcome)
                else:
                    filed.append(outcome)
        if failed:
            raise failed[0]
        return filed

    async def _file(self, spec: NoticeSpec, request_id: str, at: int | None, now: int) -> FiledNotice:
        notice_id = run_notice_id(request_id, spec.addressee)
        key = f"{self._stem(spec.run, notice_addressee_id(spec.addressee), notice_id)}.spec"
        again = "file it again: the same notice is not filed twice"
        standing = await self._store.create(key, spec.to_bytes(), done="filed", again=again, since=now)
        if standing is None:
            return FiledNotice(key, notice_id, True)
        if standing.erased:
            raise NoticeConflict(key, existing=None, refused=spec)
        existing = read_spec(self._bucket.name, key, standing.revision, standing.value)
        same = (existing.step, existing.fact) == (spec.step, spec.fact) and at in (None, existing.at)
        if not same:
            raise NoticeConflict(key, existing=existing, refused=spec)
        return FiledNotice(key, notice_id, False)

    # ------------------------------------------------------------------ consuming

    async def consume(
        self, *, run: str | None = None, addressee: str, notice_id: str, by: str, at: int | None = None
    ) -> NoticeStatus:
        """Put on record that the turn ``by`` carries this notice, and return what is on record.

        Consume before acting: of many turns exactly one gets through. The same ``by`` again is that turn repeating
        itself, and gets what it put down first. ``at``: milliseconds since the epoch; None is the server's now.

        Raises AlreadyConsumed, which names the turn that carried it; InvalidName also where nothing was filed under
        the id, as far as the servers know that answer (one that is cut off from the others knows it some seconds
        later); InvalidSetting; Unreachable where it is not on record, or not known to be: consume again, by the same
        ``by``.
        """
        stem = self._stem(self._run_of(run), notice_addressee_id(addressee), notice_id)
        check_text("by", by)
        if at is not None:
            check_instant("at", at)
        spec = await self._store.written_once(f"{stem}.spec")
        if spec is None:
            await self._store.check(f"{stem}.spec")
            raise InvalidName(
                "notice_id",
                notice_id,
                f"the servers that answered have no notice under {stem}.spec; if it was filed a moment ago, try again",
            )
        if spec.erased:
            marker = f"its notice was deleted by hand: no notice, but a delete marker stands under {stem}.spec"
            raise InvalidName("notice_id", notice_id, f"{marker}, at revision {spec.revision}")
        read_spec(self._bucket.name, spec.key, spec.revision, spec.value)
        instant = at if at is not None else await self._store.now(f"{stem}.spec") // 1_000_000
        status = NoticeStatus(consumed_at=instant, by=by, observed_spec_revision=spec.revision)
        key = f"{stem}.status"
        standing = await self._store.create(
            key, status.to_bytes(), done="consumed", again=f"consume it again as {brief(by)}"
        )
        if standing is None:
            return status
        winner = self._store.status(standing)
        if winner.by != by:
            raise AlreadyConsumed(key, by=winner.by, consumed_at=winner.consumed_at)
        return winner

    # ------------------------------------------------------------------ reading

    async def read(self, *, run: str | None = None, addressee: str, notice_id: str) -> Notice | None:
        """One notice with its consumption, from the leader; None where none was filed under this id, or it was deleted.

        Records that do not fit together (a status without its spec, or of a later one than was read) are read again
        for a second, and then are a CorruptRecord.
        """
        return await self._store.read(self._stem(self._run_of(run), notice_addressee_id(addressee), notice_id))

    async def list(self, *, run: str | None = None, addressee: str) -> _Notices:
        """All notices to one agent on a run, by ``at`` and then by notice id."""
        return await self._store.list(f"{self._prefix(self._run_of(run))}.{notice_addressee_id(addressee)}.*")

    async def list_run(self, *, run: str | None = None) -> _Notices:
        """All notices on a run, whoever they are addressed to, by ``at`` and then by notice id."""
        return await self._store.list(f"{self._prefix(self._run_of(run))}.*.*")

    async def find(
        self,
        *,
        endpoint: str | None = None,
        run: str | None = None,
        addressee: str | None = None,
        unreadable: Callable[[NatsReceiptsError], None] | None = None,
    ) -> dict[str, Notice]:
        """The notices of the whole bucket that match, by the keys of their specs, in the order of `list`.

        For people who look after many runs: None stands for any endpoint, run or addressee. Where one cannot be read,
        ``unreadable`` is called with its CorruptRecord or UnsupportedRecord, or else that is raised.
        """
        if endpoint is not None:
            check_endpoint(endpoint)
        if run is not None:
            check_run(run)
        agent = notice_addressee_id(addressee) if addressee is not None else "*"
        return await self._store.find(f"notice.{endpoint or '*'}.{run or '*'}.{agent}.*", unreadable)

    async def get(self, key: str) -> Notice | None:
        """The notice under a key of the bucket (of its spec or its status), as `read`. Raises InvalidName."""
        parts = key.split(".") if type(cast("object", key)) is str else []
        if len(parts) != 6 or parts[0] != "notice" or parts[5] not in ("spec", "status"):
            raise InvalidName("key", key, "it is not notice.<endpoint>.<run>.<addressee id>.<notice id>.spec")
        _, endpoint, run, addressee_id, notice_id, _ = parts
        check_endpoint(endpoint)
        check_run(run)
        check_notice_id(addressee_id)
        check_notice_id(notice_id)
        return await self._store.read(".".join(parts[:5]))

    async def pending(self, *, run: str | None = None, addressee: str, by: str | None = None) -> _Notices:
        """The notices to one agent on a run that no turn has carried, by ``at`` and then by notice id.

        With ``by`` also those that the turn of this name has carried: it is killed after it has consumed one and before
        it has acted on it, is carried out again, and nobody else will be told of that notice. Consume all of them as
        ``by``: those that another turn has taken meanwhile are AlreadyConsumed.
        """
        if by is not None:
            check_text("by", by)
        pattern = f"{self._prefix(self._run_of(run))}.{notice_addressee_id(addressee)}.*"
        return await self._store.list(pattern, of_interest=lambda notice: _carrier(notice) in (None, by))

    async def unconsumed_steps(self, *, run: str | None = None) -> set[str]:
        """The steps that filed a notice on this run which its addressee's turn has not carried yet.

        A run may be moved to a program without one of its steps only if that step is not among these: everybody
        whom it told has heard it. Since that rests on what is not there, the leader is asked whether the replica that
        listed the notices had all of them.
        """
        pattern = f"{self._prefix(self._run_of(run))}.*.*"
        notices = await self._store.list(pattern, of_interest=lambda notice: notice.consumed is None, whole=True)
        return {notice.spec.step for notice in notices}

    def watch(self, *, run: str | None = None, addressee: str) -> AsyncGenerator[Notice, None]:
        """The pending notices to one agent on a run, and then every further one, for ever; each once.

        Of what is found at one time, in the order of `list`. A notice is looked up at the leader just before it is
        given, and left out if a turn has carried it, or it was deleted, by then. Lives through a server restart: a
        subscription is only the hint, and what is given is read from the stream. Raises as `list`, except Unreachable,
        which it waits out. What a turn had consumed when it was killed is not given again: a turn that is carried out
        again asks `pending` for that. Leave it with ``contextlib.aclosing`` to give up the subscription at once.
        """
        run = self._run_of(run)
        return self._watch(f"{self._prefix(run)}.{notice_addressee_id(addressee)}.*.*")

    async def _watch(self, pattern: str) -> AsyncGenerator[Notice, None]:
        revision, waiting = 0, dict[str, Notice]()
        known: dict[str, int] = {}
        async with self._bucket.hints(pattern) as hint:
            while True:
                try:
                    if not waiting:
                        await self._store.check(pattern)
                        entries, read_to = await self._store.since(pattern, revision)
                        waiting = await self._store.fresh(entries, known)
                        revision = read_to
                    notice = await self._next_of(waiting)
                except Unreachable:
                    await hint.wait(_WATCH_AGAIN)
                    continue
                if notice is not None:
                    yield notice
                else:
                    await hint.wait(_WATCH_EVERY)

    async def _next_of(self, waiting: dict[str, Notice]) -> Notice | None:
        """Take out the first one that is neither consumed nor deleted by now, by the leader's word."""
        while waiting:
            stem = next(iter(waiting))
            notice = await self._store.read(stem)
            del waiting[stem]
            if notice is not None and notice.consumed is None:
                return notice
        return None

    @staticmethod
    def render(notices: Iterable[Notice]) -> str:
        """The notices as a table for a person or a model, in the order given: `render_notices`."""
        return render_notices(notices)

    # ------------------------------------------------------------------ keys

    def _run_of(self, run: str | None) -> str:
        if self._run is not None and run not in (None, self._run):
            given = f"run={brief(run)}: this is the board of run {self._run!r}"
            raise InvalidSetting(f"{given}; use toolkit.notices for others")
        if run is None:
            run = self._run
        if run is None:
            raise InvalidSetting("run=: say which run, or use the board of one (run.notices)")
        check_run(run)
        return run

    def _prefix(self, run: str) -> str:
        return f"notice.{self.endpoint}.{run}"

    def _stem(self, run: str, addressee_id: str, notice_id: str) -> str:
        check_notice_id(notice_id)
        return f"{self._prefix(run)}.{addressee_id}.{notice_id}"


def _carrier(notice: Notice) -> str | None:
    return notice.consumed.by if notice.consumed is not None else None


def _addressed(addressee: object, addressees: object) -> list[Any]:
    if (addressee is None) == (addressees is None):
        raise InvalidSetting("say one of addressee=NAME and addressees=[NAME, …]")
    if addressee is not None:
        return [addressee]
    if isinstance(addressees, str) or not isinstance(addressees, list | tuple) or not addressees:
        raise InvalidSetting(f"addressees={brief(cast('object', addressees))}: use a list of at least one name")
    return [*addressees]
