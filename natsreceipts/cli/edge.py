"""Where the program meets its caller: what is no use of it, and what is nobody's fault but ours, in one line too."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import TYPE_CHECKING, Any

import typer

from natsreceipts.cli.exits import Exit
from natsreceipts.cli.output import plain
from natsreceipts.cli.stdout import CannotWrite, PipeClosed, telling_stdout

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["run"]

# click's, or the copy of it that newer versions of typer bring along.
_WRONG_USE: tuple[type[Exception], ...] = tuple(
    kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException"
)


def run(app: Callable[..., Any], arguments: Sequence[str] | None = None) -> int:
    """Run the program (on the process's own arguments), and give its exit code."""
    try:
        with telling_stdout():
            return app(args=arguments, prog_name="natsreceipts", standalone_mode=False) or Exit.DONE
    except _WRONG_USE as wrong:
        context = getattr(wrong, "ctx", None)
        path = context.command_path if context is not None else "natsreceipts"
        said: str = wrong.format_message().rstrip(".")  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType, reportUnknownVariableType]
        given = sys.argv[1:] if arguments is None else arguments
        _say(f"{said}{'' if said[-1:] == '?' else '.'} {_about_dashes(wrong, given)}See: {path} --help")
        return Exit.USAGE
    except PipeClosed:
        return Exit.PIPE_CLOSED
    except CannotWrite as failure:
        _say(str(failure))
        return Exit.FAILED
    except (KeyboardInterrupt, typer.Abort):
        _say("stopped by Ctrl-C")
        return Exit.INTERRUPTED
    except Exception as error:
        if os.environ.get("NATSRECEIPTS_TRACEBACK"):
            raise
        _say(
            f"this is a mistake of natsreceipts ({type(error).__name__}: {error}); please report it with what "
            f"NATSRECEIPTS_TRACEBACK=1 shows"
        )
        return Exit.FAILED


def _about_dashes(wrong: Exception, given: Sequence[str]) -> str:
    if type(wrong).__name__ != "NoSuchOption" or not any(word.startswith("-") and "." in word for word in given):
        return ""
    return "A key that begins with - goes last, behind -- . "


def _say(text: str) -> None:
    with contextlib.suppress(OSError):
        sys.stderr.write("natsreceipts: " + plain(" ".join(text.split())) + "\n")
