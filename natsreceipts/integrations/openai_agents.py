"""The OpenAI Agents SDK: its tools under a guard, and its turns in a run. Needs the extra ``openai-agents``.

`guarded` gives a `FunctionTool` back with its calls guarded; `Turn` is what they are made in. What reaches the model is
the same as in all frameworks: `natsreceipts.integrations.outcomes`.
"""

from __future__ import annotations

from natsreceipts.integrations.openai_agents_session import NatsSession
from natsreceipts.integrations.openai_agents_tools import guarded
from natsreceipts.integrations.openai_agents_turn import Turn

__all__ = ["NatsSession", "Turn", "guarded"]
