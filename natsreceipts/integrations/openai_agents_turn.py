"""A turn of the OpenAI Agents SDK in a run. Public as `natsreceipts.integrations.openai_agents`."""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Self, cast

from agents import RunHooks, UserError

from natsreceipts.errors import InvalidSetting, NatsReceiptsError
from natsreceipts.integrations.openai_agents_log import calls_in
from natsreceipts.numbering import Came, Step, call_number, distinct_of

if TYPE_CHECKING:
    from types import TracebackType

    from agents import Agent, ModelResponse, RunContextWrapper
    from agents.items import TResponseInputItem

    from natsreceipts.integrations.openai_agents_session import NatsSession
    from natsreceipts.run import Run

__all__ = ["Turn", "active_turn"]


class Turn(RunHooks[Any]):
    """One turn of an agent in a run, as an async context manager and as the hooks of ``Runner.run``.

    It enters the run, tells two equal calls of one answer of the model apart, writes the model's answers into the
    session before their tools are executed, and lets our errors through as they are: the SDK would wrap them.
    Hooks of your own go into a subclass, which calls these.
    """

    def __init__(self, run: Run, session: NatsSession | None = None) -> None:
        self.run = run
        self.session = session
        self._steps: list[Step] = []
        self._outer: Turn | None = None

    async def __aenter__(self) -> Self:
        await self.run.__aenter__()
        self._outer = _turn.get()
        _turn.set(self)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        _turn.set(self._outer)
        if self.session is not None:
            self.session.left()
        await self.run.__aexit__(kind, error, traceback)
        if isinstance(error, UserError) and isinstance(error.__cause__, NatsReceiptsError):
            raise error.__cause__

    async def begin(self, said: str | list[TResponseInputItem], *, turn: str) -> str | None:
        """Begin a turn of the session, or go on with it: ``Runner.run(agent, [], session=…, hooks=…)`` comes next.

        ``said``: what the user said, a text or input items. It is in the log once, under the name ``turn``: that of the
        job that brought it, say, which a redelivery repeats. Returns None; or, where the log ends with the model's
        answer, its text: the model is not to be asked again then.

        Raises InvalidSetting without a session or anything said, and what ``get_items`` and `SessionLog.append` do.
        """
        if self.session is None:
            raise InvalidSetting("a turn is begun in a session: use Turn(run, session)")
        items = cast("list[dict[str, Any]]", [{"role": "user", "content": said}] if isinstance(said, str) else said)
        if not items:
            raise InvalidSetting("nothing was said that a turn could begin with")
        return await self.session.begun(items, turn=turn)

    async def on_llm_end(self, context: RunContextWrapper[Any], agent: Agent[Any], response: ModelResponse) -> None:
        """Note the calls of an answer, and write it down before they are made. Raises what `SessionLog.append` does."""
        del context, agent
        items = cast("list[dict[str, Any]]", response.to_input_items())
        self._steps.append([call for item in items for call in calls_in(item)])
        if self.session is not None:
            await self.session.answered(items, run=self.run)

    async def site_of(self, call_id: str, tool: str, args: object, *, run: Run) -> str | None:
        """What sets a call apart from its equals. Its entry in the session, if it has one, becomes the ambient one.

        Raises InvalidSetting where the call is made in another run than a wake of the session would look in.
        """
        steps = self._steps
        if self.session is not None and (run.tenant, run.run) != (self.run.tenant, self.run.run):
            raise InvalidSetting(
                f"{tool} is guarded in {run!r}, and its turn, with a session, is in {self.run!r}: leave run= out there"
            )
        if self.session is not None and await self.session.claims_from(call_id):
            steps = self.session.turn_of(call_id)
        return distinct_of(call_number(steps, tool, args, call_id))

    def came(self, call_id: str) -> None:
        """A call has come to a result of the tool's own."""
        self._steps.append(Came(call_id))
        if self.session is not None:
            self.session.came(call_id)


_turn: ContextVar[Turn | None] = ContextVar("natsreceipts_openai_turn", default=None)


def active_turn() -> Turn | None:
    """The turn that the code runs in, if any."""
    return _turn.get()
