"""The shape of the project: arrows between files, sizes, links, words that must not stand in it.

The rules are data at the top; the checks are functions over (name, source), so that planted wrong
sources can show that each check is able to fail.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MAX_LINES, MAX_FUNCTION = 400, 60
MAX_FILE, MAX_REPO = 5_000_000, 60_000_000

FOLDERS = ("kernels", "tiers", "scheduler")

#: Every file of the package belongs to one group.  A folder's files go by the folder's name.
GROUPS = {
    "leaf": "bench_frame config contention durable energy errors machine paths registry",
    "spec": "spec inventory config_fields config_read precision",
    "data": "checkpoint headers json_stream shards findings find survey check_values "
    "constrain constrain_schema tokenizer tokenizer_json textstream sampling layout forecast_sizes "
    "documents documents_chat documents_jsonl documents_row documents_table documents_text "
    "batch_file batch_index batch_lines batch_openai batch_records batch_states "
    "chat chat_arguments chat_bodies chat_calls chat_format chat_guide chat_messages chat_parse",
    "tiny": "tiny_config tiny_full tiny_recipes tiny_size tiny_write",
    "state": "arena device_latents latents device_trunk fetch ring state weights",
    "model": "adaptive hooks model layer_kda layer_mla layer_moe router_codes stream",
    "session": "prefix_folder prefixes session session_identity session_load session_manifest "
    "session_save",
    "engine": "accelerator batch batch_chat batch_prompt batch_request batch_results choose_label "
    "conversation "
    "device_warmup devices open_device engine engine_plan loading budget budget_kernels generate "
    "options plan_text spilling turns warmup",
    "edge": "bench_compare bench_read check inspect kernels_offline make_tiny plot_svg progress "
    "report report_page routing_figures",
    "trace": "trace trace_import trace_like trace_made trace_record trace_rows",
    "packing": "pack pack_journal pack_layout pack_quantise pack_source pack_stream pack_write",
    "planning": "cost_table device_report doctor doctor_system forecast forecast_device measure "
    "plan_report rates",
    "command": "batch_meter bench_batch bench_decode bench_engine bench_kernels bench_policies "
    "bench_predictors bench_prefill bench_replay bench_routing damage evaluate_append "
    "evaluate_cost evaluate_operators evaluate_operators_cases evaluate_recall evaluate_routing "
    "live report_results report_routing report_tiers report_trace run_batch run_chat run_generate "
    "run_logits run_ray run_ray_worker run_serve serve_app serve_ask serve_chat serve_completions "
    "serve_engine serve_errors serve_guard serve_inbox serve_job serve_live "
    "serve_metrics serve_schema serve_settings serve_shapes serve_stream",
    "cli": "cli cli_batch cli_batch_run cli_bench cli_bench_engine cli_bench_frame "
    "cli_bench_replay cli_chat cli_compare cli_cost cli_damage "
    "cli_evaluate cli_kernels cli_model cli_open cli_operators cli_options cli_pack cli_plan "
    "cli_replay cli_report cli_routing cli_run cli_serve cli_trace",
    "root": "__init__ __main__",
}
#: What a group may import of the package, besides itself.  Leaves are open to all.
ALLOWED = {
    "leaf": "",
    "tiers": "",
    "kernels": "",
    "spec": "",
    "data": "spec tiers",
    "tiny": "spec data tiers",
    "scheduler": "tiers spec",
    "state": "spec data tiers scheduler kernels",
    "model": "state spec data tiers scheduler kernels",
    "session": "model state spec data tiers scheduler kernels",
    "engine": "session model state spec data tiers scheduler kernels",
    "edge": "engine session state spec data tiers scheduler kernels tiny",
    "trace": "engine session model state spec data tiers scheduler kernels",
    "packing": "edge spec data tiers kernels state",
    "planning": "edge engine session model state spec data tiers scheduler kernels",
    "command": "planning edge trace engine session model state spec data tiers scheduler kernels",
    "cli": "command packing planning edge trace engine session state spec data tiers scheduler "
    "kernels tiny root",
    "root": "cli edge engine session state spec data tiers scheduler kernels",
}
LONELY = ("edge",)  # files of these groups never import one another
#: The only call upwards: a session offers the loop that drives it, and loads it when called.
UPWARDS = {("session", "k3offload.generate")}
TORCH_FREE = ("leaf", "spec", "data", "tiny", "scheduler")
TORCH_FREE_EDGES = [
    "bench_compare",
    "bench_policies",
    "bench_predictors",
    "bench_read",
    "budget",
    "check",
    "cost_table",
    "device_report",
    "devices",
    "forecast",
    "forecast_device",
    "forecast_sizes",
    "inspect",
    "make_tiny",
    "options",
    "pack",
    "pack_journal",
    "pack_layout",
    "pack_source",
    "pack_stream",
    "pack_write",
    "plan_report",
    "plan_text",
    "rates",
    "report_page",
    "report_results",
    "report_routing",
    "report_tiers",
    "report_trace",
    "routing_figures",
    "trace",
    "trace_import",
    "trace_like",
    "trace_made",
]
KERNELS_MAY = {"torch", "triton", "numpy", "k3offload"}

_GROUP_OF = {name: group for group, names in GROUPS.items() for name in names.split()}


def group_of(module: str) -> str:
    """``kernels.mxfp4`` -> ``kernels``, ``layer_kda`` -> ``model``; '' when it is not listed."""
    head = module.partition(".")[0]
    return head if head in FOLDERS else _GROUP_OF.get(head, "")


def imports(module: str, source: str) -> Iterator[str]:
    """Absolute names of everything ``module`` (``k3offload.`` left out) imports, at any depth.

    What stands under ``if TYPE_CHECKING`` only names types and never runs; it is left out.
    """
    package = ["k3offload", *module.split(".")[:-1]]
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            stem = ".".join([*base, *(node.module or "").split(".")]).strip(".")
            deeper = stem in ("k3offload", *(f"k3offload.{folder}" for folder in FOLDERS))
            yield from (f"{stem}.{a.name}" if deeper else stem for a in node.names)


def arrow_faults(module: str, source: str) -> list[str]:
    """Imports that point the wrong way."""
    group, faults = group_of(module), []
    if not group:
        return [f"{module}: say in tests/test_house.py GROUPS where this file belongs"]
    for name in sorted(set(imports(module, source))):
        top, _, rest = name.partition(".")
        torch_free = group in TORCH_FREE or module in TORCH_FREE_EDGES
        if top in ("torch", "triton") and torch_free:
            faults.append(f"{module} ({group}) must not import {top}")
        if group == "kernels" and top not in KERNELS_MAY | sys.stdlib_module_names:
            faults.append(f"{module} (kernels) must not import {top}")
        if top != "k3offload":
            continue
        # A name that is no file is something defined in the package itself, like __version__.
        target = group_of(rest) or "root"
        if (module, name) in UPWARDS:
            continue
        same = target == group and group not in LONELY
        if not (same or target == "leaf" or target in ALLOWED[group].split()):
            faults.append(f"{module} ({group}) must not import {name} ({target})")
    return faults


def size_faults(name: str, source: str) -> list[str]:
    """Files and functions that are too long to be read in one sitting."""
    lines = source.count("\n")
    faults = [f"{name} has {lines} lines"] if lines > MAX_LINES else []
    if not name.endswith(".py"):
        return faults
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > MAX_FUNCTION:
                faults.append(f"{name}: {node.name} has {length} lines")
    return faults


# Written in pieces, so that this file does not hold what it forbids.
_WORDS = re.compile(
    "|".join(
        [
            re.escape("../" + "shared"),
            re.escape("." + "library"),
            re.escape("/" + "work" + "/"),
            re.escape("/" + "root" + "/"),
            r"\b(?:" + "|".join(["TO" + "DO", "FIX" + "ME", "X" + "XX", "HA" + "CK"]) + r")\b",
            "Not" + "ImplementedError",
        ]
    )
)


def word_faults(name: str, data: bytes) -> list[str]:
    """Unfinished places and paths of one machine; binary files are passed over."""
    if b"\0" in data[:8192]:
        return []
    text = data.decode(errors="replace")
    return [f"{name}: {m[0]!r}" for m in _WORDS.finditer(text)]


def project_files() -> list[Path]:
    """What git tracks or would track; without git, everything that is not a cache."""
    if (ROOT / ".git").exists():
        command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
        paths = [ROOT / os.fsdecode(p) for p in done.stdout.split(b"\0") if p]
    else:
        skip = re.compile(r"^\.(?!ci$|gitignore$)|^(__pycache__|build|dist|.*\.egg-info)$")
        paths = [p for p in ROOT.rglob("*") if not any(map(skip.search, p.relative_to(ROOT).parts))]
    return sorted(p for p in paths if p.is_file() and not p.is_symlink())


def package_modules() -> dict[str, Path]:
    """Module name without ``k3offload.`` -> file, the three root folders by their own name."""
    found = {p.stem: p for p in sorted((ROOT / "k3offload").glob("*.py"))}
    for folder in FOLDERS:
        found |= {f"{folder}.{p.stem}": p for p in sorted((ROOT / folder).glob("*.py"))}
    return found


FILES = project_files()
MODULES = package_modules()


def test_arrows_point_one_way() -> None:
    faults = [f for m, p in MODULES.items() for f in arrow_faults(m, p.read_text("utf-8"))]
    assert not faults, "\n".join(faults)


def test_sizes() -> None:
    code = [p for p in FILES if p.suffix in (".py", ".cpp", ".h", ".sh")]
    assert len(code) > 20
    names = {p: str(p.relative_to(ROOT)) for p in code}
    faults = [f for p in code for f in size_faults(names[p], p.read_text("utf-8"))]
    assert not faults, "\n".join(faults)
    sizes = {p: p.stat().st_size for p in FILES}
    assert [p for p, n in sizes.items() if n > MAX_FILE] == []
    assert sum(sizes.values()) < MAX_REPO


def test_words() -> None:
    faults = [f for p in FILES for f in word_faults(str(p.relative_to(ROOT)), p.read_bytes())]
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize("folder", FOLDERS)
def test_root_folders_are_linked_and_claim_no_name(folder: str) -> None:
    """An ``__init__.py`` there would shadow other packages of that name on ``sys.path``."""
    assert os.readlink(ROOT / "k3offload" / folder) == f"../{folder}"
    assert not (ROOT / folder / "__init__.py").exists()


def test_torch_free_files_do_not_load_torch() -> None:
    """Not even through what they import, or through the package's ``__init__``."""
    free = [m for m in MODULES if group_of(m) in TORCH_FREE or m in TORCH_FREE_EDGES]
    lines = [f"import k3offload.{m}" for m in free]
    code = "\n".join([*lines, "import sys", "assert 'torch' not in sys.modules"])
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


PLANTED_ARROWS = [
    ("tiers.tier_x", "from ..scheduler.store import ExpertStore"),
    ("tiers.tier_x", "from k3offload import spec"),
    ("tiers.tier_x", "import k3offload.spec"),
    ("kernels.op_x", "from ..spec import ModelSpec"),
    ("kernels.op_x", "import psutil"),
    ("scheduler.plan", "def f():\n    import torch"),
    ("scheduler.plan", "from ..kernels import mxfp4"),
    ("scheduler.plan", "from .. import kernels"),
    ("layer_kda", "from .session import Session"),
    ("session", "from .engine import Engine"),
    ("state", "from .generate import generate"),
    ("session", "if TYPE_CHECKING:\n    pass\nelse:\n    from .engine import Engine"),
    ("generate", "from .cli import main"),
    ("inspect", "from .check import check"),
    ("check", "import torch.nn"),
    ("errors", "from .spec import ModelSpec"),
    ("spec", "from .checkpoint import Checkpoint"),
    ("sampling", "from torch import Tensor"),
    ("model", "from . import __version__"),
    ("unheard_of", ""),
]


@pytest.mark.parametrize(("module", "source"), PLANTED_ARROWS)
def test_planted_wrong_arrows_are_found(module: str, source: str) -> None:
    assert len(arrow_faults(module, source)) == 1


FINE_ARROWS = [
    ("tiers.tier_x", "from ..errors import ReadError\nfrom .base import PageId\nimport numpy"),
    ("kernels.op_x", "import torch, os\nfrom .mxfp4 import decode\nfrom ..config import ROW_TILE"),
    ("scheduler.store", "from ..tiers.base import PageId\nfrom .. import errors"),
    ("model", "from .layer_kda import x\nfrom .kernels.linear_reference import linear"),
    ("cli", "from . import inspect, __version__\nfrom .generate import generate"),
    ("inspect", "from .checkpoint import Checkpoint"),
    ("session", "if TYPE_CHECKING:\n    from .engine import Engine"),
    ("session", "def f():\n    from .generate import generate"),
]


@pytest.mark.parametrize(("module", "source"), FINE_ARROWS)
def test_right_arrows_pass(module: str, source: str) -> None:
    assert arrow_faults(module, source) == []


def test_planted_long_files_and_functions_are_found() -> None:
    long_function = "def f():\n" + "    x = 1\n" * MAX_FUNCTION
    assert size_faults("a.py", long_function) == ["a.py: f has 61 lines"]
    assert size_faults("a.py", long_function.replace("    x = 1\n", "", 1)) == []
    inside = "class A:\n  async def g(self):\n" + "    x = 1\n" * 70
    assert size_faults("a.py", inside) == ["a.py: g has 71 lines"]
    assert size_faults("a.cpp", "\n" * 401) == ["a.cpp has 401 lines"]
    assert size_faults("a.py", "\n" * 400) == []


@pytest.mark.parametrize("word", ["# TO" + "DO: later", "see ../" + "shared/x", "/" + "root/x"])
def test_planted_words_are_found(word: str) -> None:
    assert len(word_faults("a.md", word.encode())) == 1
    assert word_faults("a.bin", b"\0" + word.encode()) == []
    assert word_faults("a.md", b"method, shared, library, work/root") == []
