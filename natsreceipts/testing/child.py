"""A function as a process of its own: what `natsreceipts.testing.kill_worker` starts, and kills."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib
import importlib.util
import inspect
import json
import os
import pickle
import sys
import threading
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

__all__ = ["command_for", "main"]

_START = """
import json, sys
path, task, report = json.loads(sys.argv[1])
sys.path[:] = path
from natsreceipts.testing.child import main
main(task, report)
"""


def command_for(worker: Callable[..., object], args: tuple[object, ...], task: Path, report: Path) -> list[str]:
    """Write down the call ``worker(*args)`` in the file ``task``, and return the command that makes it.

    How it ended by an error is written to ``report``. Raises TypeError for what a process cannot be given.
    """
    function: Any = worker
    while isinstance(function, functools.partial):
        function = function.func
    home = str(function.__module__)
    module = sys.modules.get(home)
    try:
        call = pickle.dumps((worker, args))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TypeError(
            f"{worker!r} cannot be run in a process of its own ({error}): use a function at the top level of its "
            f"module, and arguments that can be pickled"
        ) from error
    if home == "__main__":
        raise TypeError(f"{worker!r} is part of the script that runs: put it into a module that can be imported")
    file = getattr(module, "__file__", None)
    task.write_bytes(pickle.dumps((home, file, call)))
    return [sys.executable, "-c", _START, json.dumps([sys.path, str(task), str(report)])]


def main(task: str, report: str) -> None:
    """Make the call that was written down, and end with the process that started this one."""
    threading.Thread(target=_end_with_the_parent, daemon=True).start()
    module, file, call = pickle.loads(Path(task).read_bytes())  # noqa: S301 - written by our parent a moment ago
    try:
        _load(module, file)
        worker, args = pickle.loads(call)  # noqa: S301
        outcome = worker(*args)
        if inspect.isawaitable(outcome):
            asyncio.run(_await(outcome))
    except Exception as error:  # noqa: BLE001 - whatever it is, it is how the worker ended
        traceback.print_exc()
        told = {"error": f"{type(error).__name__}: {error}", "retry_after": getattr(error, "retry_after", None)}
        Path(report).write_text(json.dumps(told), encoding="utf-8")
        sys.exit(1)


async def _await(outcome: Awaitable[object]) -> None:
    await outcome


def _end_with_the_parent() -> None:
    with contextlib.suppress(OSError):
        while os.read(0, 1024):
            pass
    os._exit(1)


def _load(name: str, file: str | None) -> None:
    """Import a module as the test run has it: a test file is imported by its name only where that is on the path."""
    if name in sys.modules:
        return
    if "." in name or file is None:
        try:
            importlib.import_module(name)
        except ImportError:
            if file is None:
                raise
        else:
            return
    spec = importlib.util.spec_from_file_location(name, str(file))
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} cannot be imported as {name}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
