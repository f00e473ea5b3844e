"""Everything about a model folder that can be verified, as a list of findings.

This file knows which checks there are and in what order.  It never imports torch and never writes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from .check_values import check_values
from .checkpoint import look
from .config_fields import read_json
from .errors import K3Error
from .findings import Finding, Report
from .paths import show_path
from .shards import INDEX_NAME, look_at, total_size
from .spec import ModelSpec

__all__ = ["Finding", "check", "has_errors"]

VOCABULARIES = ("tiktoken.model", "tokenizer.json")
Progress = Callable[[int, int], None]


def check(
    path: str | os.PathLike[str],
    full: bool = False,
    progress: Progress | None = None,
    *,
    extra_folders: Sequence[str | os.PathLike[str]] = (),
) -> list[Finding]:
    """Verify config, index, links, sizes, headers, inventory and small files of folder ``path``.

    With ``full`` every byte of every text tensor is read once and its values checked; ``progress``
    is called with (bytes done, bytes in all).  Errors come first; an empty list or one without
    errors means that the model can be run.
    """
    folder = Path(os.path.abspath(path))
    report = Report(strict=False)
    try:
        survey, paths = look(folder, extra_folders, report)
    except K3Error as error:
        report.error(error.problem, error.remedy)
        survey, paths = None, []
    if folder.is_dir():
        _check_vocabulary(folder, report)
        _check_generation(folder, survey.spec if survey else None, report)
        if survey is not None and not has_errors(report.findings):  # what is missing has been said
            _check_total(folder, sum(survey.bytes.values()), report)
    if full:
        heads = survey.spec.kda.heads if survey else None
        check_values([p for p in paths if p is not None], heads, report, progress)
    rank = {"error": 0, "warning": 1, "note": 2}
    return sorted(report.findings, key=lambda finding: rank[finding.level])


def has_errors(findings: Sequence[Finding]) -> bool:
    """Whether any finding keeps the model from being run."""
    return any(finding.level == "error" for finding in findings)


def _check_vocabulary(folder: Path, report: Report) -> None:
    remedy = "Copy tiktoken.model from the release into the model folder; it is all that is needed."
    there = 0
    for name in VOCABULARIES:
        real, wrong = look_at(folder / name)
        there += real is not None
        if wrong:
            report.error(f"{wrong}.", remedy)
        elif real is not None and not os.access(real, os.R_OK):
            report.error(f"{show_path(real)} may not be read.", "Change its permissions.")
    if not there:
        report.error(
            f"Neither tiktoken.model nor tokenizer.json is in {show_path(folder)}.", remedy
        )


def _check_generation(folder: Path, spec: ModelSpec | None, report: Report) -> None:
    """``generation_config.json`` may add end ids; it is optional."""
    path = folder / "generation_config.json"
    if not os.path.lexists(path):
        report.note("There is no generation_config.json; end ids come from config.json alone.")
        return
    try:
        value = read_json(path).get("eos_token_id")
    except K3Error as error:
        report.error(error.problem, error.remedy)
        return
    ids = value if isinstance(value, list) else [] if value is None else [value]
    vocab = spec.vocab if spec else 1 << 31
    if not all(type(token) is int and 0 <= token < vocab for token in ids):
        report.error(
            f"{show_path(path)}: eos_token_id = {str(value)[:60]} holds no valid token ids.",
            "Copy the file from the release again, or remove it.",
        )


def _check_total(folder: Path, stored: int, report: Report) -> None:
    path = folder / INDEX_NAME
    if not path.exists():
        return
    try:
        declared = total_size(path)
    except K3Error:
        return  # already reported by the reading of the index
    if declared is not None and declared != stored:
        report.warn(
            f"The index says the tensors have {declared} bytes in all; the headers add up to "
            f"{stored}.",
            "The headers count; the index may be out of date.",
        )
