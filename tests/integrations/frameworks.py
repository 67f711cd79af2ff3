"""What the tests of the integrations share: a framework that is there, or the test is skipped."""

from __future__ import annotations

import importlib
import os

import pytest


def framework(name):
    """The framework's module; without it the tests are skipped, unless the run says that it must be there."""
    if os.environ.get("NATSRECEIPTS_FRAMEWORKS"):
        return importlib.import_module(name)
    return pytest.importorskip(name)
