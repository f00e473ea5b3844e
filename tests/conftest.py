"""Says so in one sentence when the checkout lost its links; makes property tests repeatable; lets
the files that take longest begin first."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings

# Triton reads this when a kernel is defined: the tests run kernels in its interpreter.
os.environ["TRITON_INTERPRET"] = "1"

# The same examples in every run and on every machine; a slow machine is no failure.
settings.register_profile("repeatable", deadline=None, derandomize=True, database=None)
settings.load_profile("repeatable")

_PACKAGE = Path(__file__).resolve().parent.parent / "k3offload"
for _name in ("kernels", "tiers", "scheduler"):
    if not (_PACKAGE / _name).is_dir():
        raise pytest.UsageError(
            f"k3offload/{_name} is not a link to ../{_name}, so k3offload.{_name} cannot be "
            "imported: this copy of the repository lost its symbolic links; clone it again with "
            "git (core.symlinks=true) or make the three links by hand."
        )

#: Long, and most of few tests: begun last, one would keep a worker while the others idle.  What
#: takes all processors does not begin beside Ray, which waits for processes to start.
LONGEST = (
    "test_ray", "test_memory", "test_memory_skewed", "test_cli_batch", "test_evaluate_operators",
    "test_kernels_offline", "test_triton_linear", "test_triton_rows", "test_report_browser",
    "test_acceptance", "test_checkpoint_full", "test_tiny_full",
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    order = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path.stem, len(order)))
