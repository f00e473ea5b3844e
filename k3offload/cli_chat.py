"""The command ``chat``: parse, call."""

from __future__ import annotations

import os
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .chat import EFFORTS, Encoder
from .cli_open import open_model, seeded
from .cli_options import Choice, How, Model, at_least_one, takes_how
from .errors import UsageError
from .find import find_model
from .progress import Meter, Progress, loading_libraries
from .session_manifest import refuse_in_model

if TYPE_CHECKING:
    from .spec import ModelSpec
    from .tokenizer import Tokenizer


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    app.command()(chat)


@takes_how("ignore_end", choice=Choice)
def chat(
    how: How,
    choice: Choice,
    model: Model,
    session: Annotated[
        Path | None, typer.Option(help="Folder of a conversation to go on with, and to save to.")
    ] = None,
    system: Annotated[str | None, typer.Option(help="What the model is told first.")] = None,
    thinking: Annotated[bool, typer.Option(help="Whether answers begin with reasoning.")] = True,
    effort: Annotated[
        str | None, typer.Option(help=f"Of thinking: {', '.join(EFFORTS)}, or none.")
    ] = None,
    context: Annotated[int, typer.Option(help="Most tokens of the conversation.")] = 16384,
    max_new_tokens: Annotated[
        int, typer.Option("-n", "--max-new-tokens", help="Most tokens of an answer.")
    ] = 2048,
) -> None:
    """Talk with a model that knows K3's chat format; /help lists commands."""
    at_least_one(("-n", max_new_tokens), ("--context", context), ("--sweep", how.sweep))
    wanted = _wanted(effort, thinking)
    folder = find_model(model)
    if session is not None:
        refuse_in_model(session, folder)
    with Progress() as progress, ExitStack() as leave:
        with loading_libraries(progress):
            from .conversation import FILE, STATES, Conversation, Hold, Manner, check_folder
            from .run_chat import Chat
        hold = leave.enter_context(closing(Hold()))
        if session is not None:
            check_folder(session)
            hold.move(session)
        sampling = choice.sampling()
        if not sampling.greedy:
            sampling = seeded(sampling, progress)
        encoders: list[Encoder] = []

        def size(tokenizer: Tokenizer, spec: ModelSpec) -> dict[str, int | None]:
            encoders.append(Encoder.of(tokenizer, folder))
            if wanted is not None:
                encoders[0].check_effort(wanted)
            most = min(context, spec.context)
            # an answer is decoded, what it answers to is read
            return {"context": most, "sessions": STATES, "answer": most // 2, "sweep": how.sweep}

        meter = Meter(progress.show)
        with open_model(model, size, how, progress, meter.layer) as engine:
            meter.read = lambda: engine.disk.counts.bytes
            told = encoders[0].usual_effort if effort is None else wanted
            manner = Manner(sampling, max_new_tokens, thinking, told)
            talk = Conversation(engine, encoders[0], manner)
            if session is not None and os.path.lexists(session / FILE):
                talk.load(session)
                progress.say(f"going on after {len(talk.messages)} messages")
            if system is not None:
                talk.system = system
            fine = Chat(talk, progress, meter, session, hold).run()
            talk.close()
    if not fine:
        raise typer.Exit(1)


def _wanted(effort: str | None, thinking: bool) -> str | None:
    """The effort that ``--effort`` asks for, if any.  Raises ``UsageError``."""
    if effort is None or effort == "none":
        return None
    if effort not in EFFORTS:
        raise UsageError(f"--effort is {effort!r}.", f"Use {', '.join(EFFORTS)} or none.")
    if not thinking:
        raise UsageError(
            "--effort says how much to think, and --no-thinking not to.", "Leave one of them out."
        )
    return effort
