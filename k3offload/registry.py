"""A file name is the registry key: finds the files that implement one interface.

``scheduler/policy_NAME.py`` holds a policy, ``kernels/OP_BACKEND.py`` an implementation of an
operator.  Adding one is adding its file; there is no list to keep.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from types import ModuleType

_PACKAGE = Path(__file__).parent


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
