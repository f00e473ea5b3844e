"""The command ``serve``: parse, call."""

from __future__ import annotations

from contextlib import ExitStack
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from . import __version__
from .cli_open import open_model
from .cli_options import How, Model, above_0, at_least_one, not_below_0, takes_how
from .config import parse_size
from .errors import UsageError
from .find import find_model
from .progress import Progress, loading_libraries
from .serve_settings import Settings

if TYPE_CHECKING:
    from .spec import ModelSpec
    from .tokenizer import Tokenizer

OURS = ("127.0.0.1", "localhost", "::1")  #: addresses that no other machine reaches


class Place(NamedTuple):
    """Where to listen, and to whom."""

    host: Annotated[
        str, typer.Option(help="Address to listen at; 0.0.0.0 lets other machines in.")
    ] = "127.0.0.1"
    port: Annotated[int, typer.Option(help="0 takes a free one, and tells it.")] = 8000
    api_key: Annotated[
        str | None, typer.Option(envvar="K3_API_KEY", help="What every request must bring.")
    ] = None
    cors: Annotated[
        list[str] | None,
        typer.Option(metavar="ORIGIN", help="Pages that may ask from a browser; repeatable."),
    ] = None
    name: Annotated[
        str | None, typer.Option(help="What requests call the model; its folder's name if unset.")
    ] = None


class Limits(NamedTuple):
    """How much at a time, how large, how long."""

    context: Annotated[int, typer.Option(help="Most tokens of a prompt and its answer.")] = 16384
    places: Annotated[int, typer.Option(help="Answers under way at a time.")] = 4
    queue: Annotated[int, typer.Option(help="Requests that may wait for a place.")] = 64
    max_new_tokens: Annotated[
        int, typer.Option("-n", "--max-new-tokens", help="Of an answer, where none are asked for.")
    ] = 2048
    prefix_cache: Annotated[
        str | None,
        typer.Option(
            envvar="K3_PREFIX_CACHE",
            help="Memory for beginnings of prompts; a few of them if unset, 0 for none.",
        ),
    ] = None
    body_limit: Annotated[str, typer.Option(help="Most bytes of a request.")] = "16MiB"
    time_limit: Annotated[
        float | None, typer.Option(help="Most seconds of a request; as long as it takes if unset.")
    ] = None
    keep_alive: Annotated[
        float, typer.Option(help="Seconds between two signs of life in a stream.")
    ] = 4.0
    blanks: Annotated[
        bool,
        typer.Option(
            "--blanks",
            help="Signs of life, as blanks, also before answers that are not streamed; errors on "
            "the way then end the connection.",
        ),
    ] = False


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    app.command()(serve)


@takes_how(place=Place, limits=Limits)
def serve(how: How, place: Place, limits: Limits, model: Model) -> None:
    """Serve a model to clients of OpenAI's interface."""
    at_least_one(
        ("--context", limits.context), ("--places", limits.places), ("-n", limits.max_new_tokens)
    )
    not_below_0(("--queue", limits.queue))
    above_0(("--keep-alive", limits.keep_alive), ("--time-limit", limits.time_limit))
    if place.name is not None and not place.name.strip():
        raise UsageError(f"--name is {place.name!r}.", "Give a name, or leave it out.")
    body = parse_size(limits.body_limit)
    above_0(("--body-limit", body))
    folder = find_model(model)
    settings = Settings(
        model=place.name or (model if model == "nano" else folder.resolve().name),
        key=place.api_key,
        origins=tuple(place.cors or ()),
        hosts=OURS if place.host in OURS and place.api_key is None else (),
        max_new_tokens=limits.max_new_tokens,
        queue=limits.queue,
        body=body,
        ping=limits.keep_alive,
        blanks=limits.blanks,
        time_limit=limits.time_limit,
    )
    with Progress() as progress, ExitStack() as leave:
        with loading_libraries(progress):
            serving = _serving()
        leave.enter_context(serving.ended_by_sigterm())
        sock = leave.enter_context(serving.listen(place.host, place.port))

        def size(tokenizer: Tokenizer, spec: ModelSpec) -> dict[str, int | None]:
            serving.get_ready(tokenizer)
            most, kept = min(limits.context, spec.context), limits.prefix_cache
            if kept is None:
                cache = serving.prefix_bytes(spec, how.dtype, most, how.latent_dtype)
            else:
                cache = parse_size(kept)
            # an answer is decoded, what it answers to is read
            return {"context": most, "sessions": limits.places, "answer": most // 2,
                    "sweep": how.sweep, "prefix_cache": cache}  # fmt: skip

        engine = leave.enter_context(
            open_model(model, size, how, progress, lambda layer, layers: None)
        )
        if place.api_key is None and place.host not in OURS:
            progress.say("warning: whoever reaches this address may ask; --api-key sets a key")
        serving.run(engine, settings, __version__, sock, progress.say)


def _serving() -> ModuleType:
    """What needs the extra.  Raises ``UsageError`` if it is not installed."""
    try:
        from . import run_serve
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "k3offload":
            raise
        raise UsageError(
            f"serve needs the package {error.name}, which is not installed.",
            "Install the extra: pip install 'k3offload[serve]'.",
        ) from None
    return run_serve
