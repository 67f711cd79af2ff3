"""One thin module per agent framework, imported where it is used: each needs its framework's extra.

What is the same in all of them is in `natsreceipts.integrations.outcomes`, which needs none.
"""

from __future__ import annotations

from natsreceipts.integrations.outcomes import CallFailed, Outcome, ToolGuard, current_call
from natsreceipts.numbering import NumberedCalls

__all__ = ["CallFailed", "NumberedCalls", "Outcome", "ToolGuard", "current_call"]
