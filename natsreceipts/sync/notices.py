"""Notices, for code without an event loop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias, cast, overload

from natsreceipts.notice_table import render_notices

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence

    from natsreceipts import notices
    from natsreceipts.errors import NatsReceiptsError
    from natsreceipts.notice import RunNoticeFact
    from natsreceipts.notice_record import FiledNotice, Notice, NoticeStatus
    from natsreceipts.sync.portal import Portal

__all__ = ["NoticeBoard"]

_Fact: TypeAlias = "RunNoticeFact | Mapping[str, Any]"
_Notices: TypeAlias = "list[Notice]"


class NoticeBoard:
    """The notices of one endpoint, or of one run. Every verb is that of `natsreceipts.NoticeBoard`."""

    def __init__(self, portal: Portal, inner: notices.NoticeBoard) -> None:
        self._portal = portal
        self._inner = inner
        self.endpoint = inner.endpoint
        """What separates the boards of one bucket, as it stands in the keys."""

    def __repr__(self) -> str:
        return repr(self._inner)

    def at(self, endpoint: str) -> NoticeBoard:
        """The board of another endpoint. Raises InvalidName."""
        return NoticeBoard(self._portal, self._inner.at(endpoint))

    def of(self, tenant: str, run: str) -> NoticeBoard:
        """The board of a tenant's run, at the endpoint that separates tenants (``run.notices``). Raises InvalidName."""
        return NoticeBoard(self._portal, self._inner.of(tenant, run))

    @overload
    def file(
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
    def file(
        self,
        *,
        run: str | None = None,
        step: str,
        request_id: str,
        addressees: Sequence[str],
        fact: _Fact,
        at: int | None = None,
    ) -> list[FiledNotice]: ...

    def file(
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
        """File one notice to ``addressee``, or one to each of ``addressees``, unless it stands there already."""
        file = cast("Callable[..., Coroutine[Any, Any, Any]]", self._inner.file)
        return self._portal.run(
            file,
            run=run,
            step=step,
            request_id=request_id,
            addressee=addressee,
            addressees=addressees,
            fact=fact,
            at=at,
        )

    def consume(
        self, *, run: str | None = None, addressee: str, notice_id: str, by: str, at: int | None = None
    ) -> NoticeStatus:
        """Put on record that the turn ``by`` carries this notice, and return what is on record."""
        return self._portal.run(self._inner.consume, run=run, addressee=addressee, notice_id=notice_id, by=by, at=at)

    def read(self, *, run: str | None = None, addressee: str, notice_id: str) -> Notice | None:
        """One notice with its consumption, from the leader; None where none was filed under this id."""
        return self._portal.run(self._inner.read, run=run, addressee=addressee, notice_id=notice_id)

    def list(self, *, run: str | None = None, addressee: str) -> _Notices:
        """All notices to one agent on a run, by ``at`` and then by notice id."""
        return self._portal.run(self._inner.list, run=run, addressee=addressee)

    def list_run(self, *, run: str | None = None) -> _Notices:
        """All notices on a run, whoever they are addressed to, by ``at`` and then by notice id."""
        return self._portal.run(self._inner.list_run, run=run)

    def find(
        self,
        *,
        endpoint: str | None = None,
        run: str | None = None,
        addressee: str | None = None,
        unreadable: Callable[[NatsReceiptsError], None] | None = None,
    ) -> dict[str, Notice]:
        """The notices of the whole bucket that match, by the keys of their specs, in the order of `list`."""
        return self._portal.run(
            self._inner.find, endpoint=endpoint, run=run, addressee=addressee, unreadable=unreadable
        )

    def get(self, key: str) -> Notice | None:
        """The notice under a key of the bucket (of its spec or its status), as `read`. Raises InvalidName."""
        return self._portal.run(self._inner.get, key)

    def pending(self, *, run: str | None = None, addressee: str, by: str | None = None) -> _Notices:
        """The notices to one agent on a run that no turn has carried, or that the turn ``by`` has."""
        return self._portal.run(self._inner.pending, run=run, addressee=addressee, by=by)

    def unconsumed_steps(self, *, run: str | None = None) -> set[str]:
        """The steps that filed a notice on this run which its addressee's turn has not carried yet."""
        return self._portal.run(self._inner.unconsumed_steps, run=run)

    def watch(self, *, run: str | None = None, addressee: str) -> Iterator[Notice]:
        """The pending notices to one agent on a run, and then every further one, for ever; each once."""
        return self._portal.iterate(self._inner.watch(run=run, addressee=addressee))

    @staticmethod
    def render(notices: Iterable[Notice]) -> str:
        """The notices as a table for a person or a model, in the order given: `render_notices`."""
        return render_notices(notices)
