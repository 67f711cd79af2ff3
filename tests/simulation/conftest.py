"""The rules of the vendors' APIs, which a session's request view is held against, are those of the session tests."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent / "sessions_pure"))
