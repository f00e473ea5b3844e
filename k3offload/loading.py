"""``load``: a model folder and a memory budget become an ``Engine`` that sessions share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from .checkpoint import Checkpoint
from .config import parse_size
from .engine import Engine
from .find import find_model
from .options import POLICY, PREDICT, Options, Watch
from .spec import ModelSpec
from .tiers.device import Device
from .tokenizer import Tokenizer


def load(
    path: str | Path,
    *,
    ram: str | int | None = None,
    cache: str | int | None = None,
    dtype: str = "bfloat16",
    trunk: str | None = None,
    latent_dtype: str | None = None,
    context: int = 4096,
    sessions: int = 1,
    sweep: int | None = None,
    threads: int | None = None,
    kernels: Mapping[str, str] | None = None,
    isa: str | None = None,
    policy: str = POLICY,
    predict: str = PREDICT,
    device: str | Device = "auto",
    vram: str | int | None = None,
    experts_on: str | None = None,
    trunk_on: str | None = None,
    adaptive: bool = False,
    latents: str | int | None = None,
    summaries: str | int | None = None,
    scratch: str | Path | None = None,
    prefix_cache: str | int | None = None,
    prefix_dir: str | None = None,
    prefix_disk: str | int | None = None,
    watch: Watch | None = None,
) -> Engine:
    """Open the model in folder ``path`` (or ``"nano"``, the one that comes with the package).

    ``ram``: bytes this process may use in all (``"16G"`` = 16e9); ``cache``: cap on the part of it
    that holds routed experts; ``dtype``: of the activations; ``trunk``: precision of the trunk's
    large matrices, as the folder has it, or ``int8`` or ``mxfp4``, which lose some;
    ``latent_dtype``: of what attention remembers of each token, as ``dtype``, or ``int8`` or
    ``fp8``, which lose some and take 57 % of the bytes of bfloat16 in K3; ``context``: tokens a
    session may reach; ``sessions``: how many sequence states (sessions and snapshots) to reserve
    for; ``sweep``: most prompt tokens in one pass; ``kernels``: operator -> backend, like
    ``{"linear": "reference"}``; ``isa``: instruction set of the native kernels; ``policy``,
    ``predict``: which expert leaves a full cache, and which are read ahead; ``device``: ``auto``,
    ``cuda``, ``cuda:N`` or ``cpu``; ``vram``: bytes of it to use; ``experts_on``, ``trunk_on``:
    ``gpu``, ``cpu``, and for the trunk ``split:N``, the first N layers; ``adaptive``: let the CPU
    compute experts that would have to be copied, where that is quicker; ``latents``: bytes of RAM
    for what attention remembers of all sessions, the rest of which goes to files in the folder
    ``scratch`` (one in the user's cache folder if it is None) and goes away with the engine; if it
    is None, files are used only where memory is too small; ``summaries``: the same of the block
    summaries of a sweep, all of them if it is None; ``prefix_cache``: bytes of snapshots that
    prompts with the same beginning share, written to the folder ``prefix_dir`` as well, at most
    ``prefix_disk`` bytes of them. None but ``dtype``, ``trunk``, ``latent_dtype``, ``kernels``,
    ``isa``, ``adaptive`` and what is computed where changes a bit of the results, as long as
    ``sweep`` is a multiple of 64.

    Raises ``ConfigError``, ``CheckpointError``, ``TokenizerError``, or ``DoesNotFit`` with the
    missing bytes, before any weight is read.
    """
    how: dict[str, Any] = dict(locals())  # the arguments, nothing else is there yet
    sizes = {name: how.pop(name) for name in ("context", "sessions", "sweep")}
    return open_engine(how.pop("path"), lambda tokenizer, spec: sizes, **how)


def open_engine(
    path: str | Path,
    sizes: Callable[[Tokenizer, ModelSpec], Mapping[str, int | None]],
    *,
    device: str | Device = "auto",
    watch: Watch | None = None,
    **how: Any,
) -> Engine:
    """``load`` for callers who know ``context``, ``sessions``, ``sweep``, ``answer`` (tokens of the
    context that are decoded) or ``extra`` (bytes they will keep themselves) only once they can
    count tokens: ``sizes`` returns them, given the tokenizer and the spec, before any memory is
    planned.  ``how``: the other options of ``load``.
    """
    folder = find_model(path)
    checkpoint = Checkpoint.open(folder)
    tokenizer = Tokenizer.load(folder, checkpoint.spec)
    # what nobody has set keeps the default of ``Options``
    given = {name: value for name, value in how.items() if value is not None}
    for name in ("ram", "cache", "vram", "latents", "summaries", "prefix_cache", "prefix_disk"):
        if name in given:
            given[name] = parse_size(given[name])
    if "scratch" in given:
        given["scratch"] = Path(given["scratch"])
    given.update(sizes(tokenizer, checkpoint.spec))
    return Engine(checkpoint, tokenizer, Options(**given), watch or Watch(), device)
