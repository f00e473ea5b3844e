"""A file name is the registry key: finds the files that implement one interface.

``scheduler/policy_NAME.py`` holds a policy, ``kernels/OP_BACKEND.py`` an implementation of an
operator.  Adding one is adding its file; there is no list to keep.  Policies and predictors may
also lie outside the package: then a path to ``policy_NAME.py`` stands for NAME.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from traceback import extract_tb
from types import ModuleType
from typing import Any, Final

from .errors import UsageError
from .paths import show_path

_PACKAGE = Path(__file__).parent

#: of files of ``scheduler`` that may be a user's own: their class, and what it must have (the
#: contracts are ``CachePolicy`` and ``Predictor``)
_CLASSES: Final = {
    "policy": ("Policy", ("hit", "insert", "forget", "evict", "note")),
    "predict": ("Predictor", ("guess", "learn")),
}
_WORDS: Final = {"policy": "policy", "predict": "predictor"}


def names(folder: str, prefix: str) -> list[str]:
    """Every NAME of ``folder/prefix_NAME.py``, sorted; a NAME has no underscore.

    Without that rule ``kda_gate_reference.py`` would also be an implementation of ``kda``.
    """
    found = (p.stem[len(prefix) + 1 :] for p in (_PACKAGE / folder).glob(f"{prefix}_*.py"))
    return sorted(name for name in found if name and "_" not in name)


def implementation(folder: str, prefix: str, name: str) -> ModuleType:
    """The module ``folder/prefix_NAME.py`` of this package, imported."""
    return import_module(f"{__package__}.{folder}.{prefix}_{name}")


def implementations(folder: str, prefix: str) -> dict[str, ModuleType]:
    """The modules ``folder/prefix_NAME.py`` of this package by NAME, imported."""
    return {name: implementation(folder, prefix, name) for name in names(folder, prefix)}


# ---- policies and predictors, which may be a user's own ----


def is_file(name: str) -> bool:
    """Whether ``name`` is a path to a file and not a NAME of this package."""
    return name.endswith(".py")


def short(name: str) -> str:
    """NAME, also of a path to ``policy_NAME.py`` and of ``NAME=FIT``: what tables show."""
    return Path(name).stem.partition("_")[2] if is_file(name) else name.partition("=")[0]


def chosen(kind: str, name: str) -> Any:
    """The class of the policy or predictor (``kind``) that is called ``name`` or lies in the file
    ``name``, ``KIND_NAME.py``.  Raises ``UsageError``."""
    if is_file(name):
        return _own(kind, Path(name))
    known = names("scheduler", kind)
    if name not in known:
        raise UsageError(
            f"There is no {_WORDS[kind]} {name!r}.",
            f"Use {', '.join(known)}, or the path of a file {kind}_NAME.py of your own.",
        )
    return getattr(implementation("scheduler", kind, name), _CLASSES[kind][0])


def _own(kind: str, path: Path) -> Any:
    """The class of a user's file."""
    name, where = short(path.name), show_path(path)
    if not path.is_file():
        raise UsageError(f"There is no {_WORDS[kind]} {where}: no such file.", "Check the path.")
    if path.stem != f"{kind}_{name}" or not name.isalnum():
        raise UsageError(
            f"{where} holds no {_WORDS[kind]} by its name.",
            f"Call it {kind}_NAME.py; NAME has letters and digits.",
        )
    if name in names("scheduler", kind):
        raise UsageError(
            f"{where}: k3offload has a {_WORDS[kind]} {name!r} already.", "Give it another name."
        )
    wanted, parts = _CLASSES[kind]
    made = getattr(_loaded(path.resolve()), wanted, None)
    if not isinstance(made, type):
        raise UsageError(f"{where} has no class {wanted}.", "Name it so.")
    if lacking := [part for part in parts if not hasattr(made, part)]:
        raise UsageError(
            f"The class {wanted} of {where} has no {', '.join(lacking)}.",
            "See examples/new_policy.md.",
        )
    return made


def _loaded(path: Path) -> ModuleType:
    """``path``, run once as long as it does not change.  Raises ``UsageError``."""
    key = f"{path} {path.stat().st_mtime_ns}".replace(".", ":")  # without dots it has no parent
    if key in sys.modules:
        return sys.modules[key]
    spec = spec_from_file_location(key, path)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[key] = module  # dataclasses and pickle look there
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[key]
        lines = [frame.lineno for frame in extract_tb(error.__traceback__)
                 if frame.filename == str(path)]  # fmt: skip
        line = error.lineno if isinstance(error, SyntaxError) else (lines or [None])[-1]
        at = "" if line is None else f" in line {line}"
        raise UsageError(
            f"{show_path(path)} cannot be imported{at}: {type(error).__name__}: {error}.",
            "Try it by python.",
        ) from error
    return module
