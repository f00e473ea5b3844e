"""The command line: what all commands share, and how errors end.

Data goes to stdout, everything else to stderr.  Exit 0 fine, 1 failed, 2 wrong usage, 3 some
documents of a batch failed, 130 interrupted.  Commands stand in ``cli_*.py``: parse, call, print.
"""

from __future__ import annotations

import errno
import os
import sys
from typing import Annotated, Any

import typer

from . import (
    __version__,
    cli_batch,
    cli_bench,
    cli_chat,
    cli_damage,
    cli_evaluate,
    cli_kernels,
    cli_model,
    cli_pack,
    cli_plan,
    cli_report,
    cli_run,
    cli_serve,
    cli_trace,
)
from .errors import K3Error, UsageError
from .paths import show_path
from .progress import INTERRUPTED, failed, last_words, let_go, steady_streams, write_out

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

app = typer.Typer(
    help="Run Kimi K3 exactly, inside a memory budget.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)
for commands in (
    cli_run,
    cli_chat,
    cli_serve,
    cli_batch,
    cli_model,
    cli_pack,
    cli_plan,
    cli_damage,
    cli_bench,
    cli_kernels,
    cli_evaluate,
    cli_trace,
    cli_report,
):
    commands.add_to(app)


def _version(value: bool) -> None:
    if value:
        write_out(__version__)
        raise typer.Exit()


@app.callback()
def _options(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True)] = False,
) -> None:
    pass


def main(arguments: list[str] | None = None) -> None:
    """Entry point: runs a command and turns errors into one line and an exit code."""
    steady_streams()
    code: Any = 0
    try:
        if sys.stdout is None:
            raise K3Error("stdout is closed.", "Send it to a file or to /dev/null.")
        code = app(arguments, prog_name="k3offload", standalone_mode=False)
    except K3Error as error:
        code = failed(str(error), 2 if isinstance(error, UsageError) else 1)
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    except BrokenPipeError:
        code = 1
    except OSError as error:
        named_one = isinstance(error.filename, str | os.PathLike)
        place = f"{show_path(error.filename)}: " if named_one else ""
        remedy = "Make room or choose another place." if error.errno in _FULL else "Check the path."
        code = failed(f"{place}{error.strerror or error}. {remedy if place else ''}".rstrip(), 1)
    except UnicodeError as error:
        code = failed(f"{error}.", 1)
    except Exception as error:
        if not hasattr(error, "format_message"):  # the parser's own errors have it
            raise
        code = _misused(error)
    if code == INTERRUPTED:  # some versions of the parser return it, some raise
        last_words("\ninterrupted")
    let_go()
    sys.exit(code if isinstance(code, int) else 0)


def _misused(error: Any) -> int:
    """What the parser has to say, in one line; without any command that is the whole help."""
    text, context = error.format_message(), getattr(error, "ctx", None)
    if "\n" in text:
        last_words(text)
        return 2
    command = context.command_path if context else "k3offload"
    end = "" if text.endswith((".", "?", "!")) else "."
    return failed(f"{text}{end} See {command} --help.", 2)
