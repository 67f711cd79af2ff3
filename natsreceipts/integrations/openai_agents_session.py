"""A session log as the `Session` of the OpenAI Agents SDK. Public as `natsreceipts.integrations.openai_agents`.

=================  ==================================================================================================
the SDK's          on a log to which things are only added
=================  ==================================================================================================
``get_items``      wakes the session, unless calls of this process are open, then what a model may be shown of it: a
                   call without a result is closed by what its receipt says, and not dropped
``add_items``      appends what the log does not have yet, one entry an item
``pop_item``       the next item follows the one before the last: the last is left on a branch that ends there
``clear_session``  the next item begins anew
=================  ==================================================================================================

The last two are known to other processes once the next item is added. Nothing is deleted.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, cast

from natsreceipts.dialects.base import OWN_FIELD
from natsreceipts.errors import InvalidSetting
from natsreceipts.integrations.openai_agents_log import DIALECT, GUARDED, OWN, Item, answer_in, calls_in, same, turn_of
from natsreceipts.numbering import Step, call_number, distinct_of
from natsreceipts.transcript import view_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from agents.items import TResponseInputItem
    from agents.memory import SessionSettings

    from natsreceipts.decision import Effect
    from natsreceipts.run import Run
    from natsreceipts.sessions import SessionLog

__all__ = ["NatsSession"]


class NatsSession:
    """A `Session` for ``Runner.run(…, session=…)``, kept in a session log: ``toolkit.sessions.open(…)``.

    ``log``: opened with ``dialect="openai-responses"``. ``tools``: the agent's tools; wake asks the receipts of the
    calls of those that went through `guarded`, or that are given by name. ``effects``: the effects of the others by
    name, as in `SessionLog.wake`. Used with `Turn`, an answer of the model is in the log before its tools are executed,
    so that a turn that is cut off in them goes on from there.

    Raises InvalidSetting. Every method raises what `SessionLog` does, ``get_items`` also SessionBusy.
    """

    def __init__(
        self,
        log: SessionLog,
        tools: Iterable[Any] = (),
        *,
        effects: Mapping[str, Effect | str] | None = None,
        session_settings: SessionSettings | None = None,
    ) -> None:
        if log.dialect != DIALECT:
            raise InvalidSetting(f"{log!r} is in the dialect {log.dialect!r}: open it with dialect={DIALECT!r}")
        self.log = log
        self.session_id = log.session
        self.session_settings = session_settings
        self._effects: dict[str, Effect | str] = dict(effects or {})
        self._guarded: list[str] = []
        for tool in tools:
            if isinstance(tool, str) or GUARDED in getattr(tool, "__dict__", ()):
                name = tool if isinstance(tool, str) else str(tool.name)
                self._guarded.append(name)
                if (effect := getattr(tool, GUARDED, None)) is not None:
                    self._effects.setdefault(name, effect)
        self._ahead: list[Item] = []
        self._open: set[str] = set()
        self._came: set[str] = set()

    async def get_items(self, limit: int | None = None) -> list[TResponseInputItem]:
        """The conversation as a model may be shown it, or the last ``limit`` items of that."""
        if not self._open:
            guarded = {name: partial(self._key, name) for name in self._guarded}
            await self.log.wake(guarded=guarded, effects=self._effects)
        items = (await self.log.context()).messages
        return cast("list[TResponseInputItem]", items if limit is None else items[max(len(items) - limit, 0) :])

    async def add_items(self, items: Sequence[TResponseInputItem]) -> None:
        """Append items, except for those that `answered` wrote down already."""
        for item in cast("Sequence[Item]", items):
            known = next((each for each in self._ahead if same(each, item)), None)
            if known is not None:
                self._ahead.remove(known)
                continue
            answers = [result.id for result in view_of(item, dialect=DIALECT).results]
            own = [each for each in answers if each in self._came]
            await self.log.append({**item, OWN_FIELD: {OWN: True}} if own else dict(item))
            self._open.difference_update(answers)

    async def pop_item(self) -> TResponseInputItem | None:
        """Take the last item off the conversation, and return it."""
        entries = (await self.log.load()).entries
        while entries:
            entry = entries.pop()
            if entry.kind in ("message", "marker"):
                await self.log.branch(entry.parent_id)
                return cast(
                    "TResponseInputItem", {name: part for name, part in entry.body.items() if name != OWN_FIELD}
                )
        return None

    async def clear_session(self) -> None:
        """Begin anew: what there was stays in the log."""
        await self.log.branch(None)

    # ------------------------------------------------------------------ for `Turn`

    async def begun(self, said: list[Item], *, turn: str) -> str | None:
        """Write down what a turn begins with, once; where the turn has ended, return the text that it ended with."""
        await self.get_items()
        loaded = await self.log.load()
        known = {entry.id for entry in loaded.all_entries}
        names = [f"{turn}/{number}" if number else turn for number in range(len(said))]
        if names[-1] not in known:
            for name, item in zip(names, said, strict=True):
                await self.log.append(item, entry_id=name)
            return None
        return answer_in(loaded.messages[-1]) if loaded.messages else None

    async def answered(self, items: list[Item], *, run: Run) -> None:
        """Write down an answer of the model that calls tools, before they are executed."""
        called = [call.call_id for item in items for call in calls_in(item) if call.call_id is not None]
        if not called:
            return
        self._open.update(called)
        for item in items:
            await self.log.append(item, run=run)
            self._ahead.append(item)

    async def claims_from(self, call_id: str) -> bool:
        """Let a call's claim name its entry, if the log has it; a call that was on hold is released."""
        store = self.log.store
        await store.ensure_loaded()
        if call_id not in store.branch().sites:
            return False
        if call_id in store.branch().suspended:
            await self.log.resume([call_id])
        await self.log.entry_of(call_id)
        return True

    def came(self, call_id: str) -> None:
        """A call has come to a result of the tool's own."""
        self._came.add(call_id)

    def left(self) -> None:
        """The turn has ended, or was cut off: from here on what has no result is woken."""
        self._open.clear()
        self._ahead.clear()

    def turn_of(self, call_id: str) -> list[Step]:
        """What stands in the log of the turn with the latest call of this id, as far as it was read."""
        return turn_of(self.log.store.branch().entries, call_id)

    def _key(self, tool: str, arguments: dict[str, Any], call_id: str) -> tuple[object, str | None]:
        return arguments, distinct_of(call_number(self.turn_of(call_id), tool, arguments, call_id))
