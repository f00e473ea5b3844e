"""Every Triton kernel compiled for every architecture, without a GPU: registers, memory, spills.

The sizes are those of K3.  What the assembler says about the machine code stands in a table, so
that a change which makes a kernel spill is seen where there is no GPU to see it on.  A row has a
digest of all that its compiler was given; as long as that is the same, so is the row.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import tempfile
from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from types import MappingProxyType
from typing import Any

from .errors import UsageError
from .kernels.triton_run import ARCHITECTURES, FUSION, Compiled, Sizes, installed, upcast
from .kernels.tuning import CANDIDATES, entry_of, trying
from .machine import default_threads
from .registry import implementation, names

OPERATORS = (
    "linear", "experts", "router", "combine", "rms_norm", "attnres", "short_conv", "kda_gate",
    "kda", "mixer", "mla_decode", "mla_prefill", "latents",
)  # fmt: skip
REGISTERS = 65536  #: of a multiprocessor
#: compute capability -> shared memory of a multiprocessor in bytes, and its warps at most
#: (CUDA C programming guide, technical specifications per compute capability)
PROCESSORS = {
    80: (164 << 10, 64), 86: (100 << 10, 48), 89: (100 << 10, 48), 90: (228 << 10, 64),
    120: (100 << 10, 48),
}  # fmt: skip
BLOCK_SHARED = 1 << 10  #: bytes that the system keeps of each block's shared memory


@dataclass(frozen=True)
class Row:
    """A kernel on an architecture.  ``spilled``: bytes of local memory of a thread; ``occupancy``:
    part of the warps of a multiprocessor that can be there at a time; ``source``: digest of what
    was compiled."""

    kernel: str
    arch: int
    registers: int
    shared: int
    spilled: int
    occupancy: float
    decode: bool
    source: str


def launches(sizes: Sizes) -> list[Compiled]:
    """What every ``OP_triton.py`` launches at ``sizes``."""
    if not installed():
        raise UsageError("Triton is not installed.", "pip install triton")
    if upcast():
        raise UsageError("Kernels are interpreted (TRITON_INTERPRET=1).", "Unset it.")
    modules = [
        implementation("kernels", op, "triton")
        for op in OPERATORS
        if "triton" in names("kernels", op)
    ]
    return [one for module in modules for one in module.compiled(sizes)]


def compile_all(
    sizes: Sizes | None = None, archs: Iterable[int] = ARCHITECTURES, known: Collection[Row] = ()
) -> list[Row]:
    """A row for each launch and architecture; one of ``known`` where its source is the same.  Each
    processor compiles for one at a time, in a process of its own: compilers do not share one
    well."""
    kinds = tuple(archs)
    workers = min(len(kinds), default_threads())
    columns_known = [[row for row in known if row.arch == kind] for kind in kinds]
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        columns = list(pool.map(_column, [sizes or Sizes()] * len(kinds), kinds, columns_known))
    return [row for rows in zip(*columns, strict=True) for row in rows]


def _column(sizes: Sizes, arch: int, known: Iterable[Row]) -> list[Row]:
    """A row for each launch."""
    found = {(row.kernel, row.source): row for row in known}
    return [compile_one(one, arch, found) for one in launches(sizes)]


def compile_candidates(archs: Iterable[int] = ARCHITECTURES) -> list[Row]:
    """A row for each launch that a candidate of the tuning table changes, and architecture."""
    default, sizes, rows = entry_of(""), Sizes(), []
    usual = {one.name: one for one in launches(sizes)}
    for name, values in CANDIDATES.items():
        for value in values:
            with trying(default._replace(**{name: value})):
                every = launches(sizes)
            for one in every:
                if one != usual[one.name]:
                    own = one._replace(name=f"{one.name} {name}={value}")
                    rows += [compile_one(own, arch) for arch in archs]
    return rows


def compile_one(
    one: Compiled, arch: int, known: Mapping[tuple[str, str], Row] = MappingProxyType({})
) -> Row:
    """Compile a launch for compute capability ``arch`` and read what the assembler says; or the
    row of ``known``, by kernel and source."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    arguments = one.kernel.arg_names
    constants = {(arguments.index(name),): value for name, value in one.constants.items()}
    # as at launch: without it loads are not vectorised, and the registers are not the real ones
    attrs = {(arguments.index(name),): [["tt.divisibility", 16]] for name in one.aligned}
    source = ASTSource(one.kernel, dict(one.signature), constants, attrs)
    options = {"num_warps": one.warps, "num_stages": one.stages, **FUSION}
    target = GPUTarget("cuda", arch, 32)
    digest = _digest(source, target, options)
    if (row := known.get((one.name, digest))) is not None:
        return row
    made = triton.compile(source, target=target, options=options)
    registers, shared, spilled = _resources(made.asm["cubin"])
    shared = max(shared, int(made.metadata.shared))
    warps = _warps(arch, registers, shared, one.warps)
    occupancy = round(warps / PROCESSORS[arch][1], 2)
    return Row(one.name, arch, registers, shared, spilled, occupancy, one.decode, digest)


def _digest(source: Any, target: Any, options: Mapping[str, Any]) -> str:
    """Of what Triton's passes and the assembler are given: the first form of the program, without
    the lines that it stood on, and all options.  That costs a twentieth of compiling it."""
    from triton._C.libtriton import ir
    from triton.compiler import make_backend

    backend, context = make_backend(target), ir.context()
    whole = backend.parse_options(dict(options))
    ir.load_dialects(context)
    backend.load_dialects(context)
    functions, modules = backend.get_codegen_implementation(whole), backend.get_module_map()
    program = source.make_ir(target, whole, functions, modules, context).str_nodebug()
    # but for where Triton's own library of functions lies, which is the installation's
    said = sorted(f"{name} {value}" for name, value in vars(whole).items() if name != "extern_libs")
    given = f"{target}\n{said}\n{program}"
    return hashlib.sha256(given.encode()).hexdigest()[:16]


def _resources(cubin: bytes) -> tuple[int, int, int]:
    """Registers, static shared memory and local memory of a thread, by the bundled tool."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        told = subprocess.run(
            [tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    found = {key: int(n) for key, n in re.findall(r"(REG|STACK|SHARED|LOCAL):(\d+)", told)}
    return found["REG"], found["SHARED"], found["STACK"] + found["LOCAL"]


def _warps(arch: int, registers: int, shared: int, block: int) -> int:
    """Warps that a multiprocessor holds at a time, in blocks of ``block`` warps."""
    memory, most = PROCESSORS[arch]
    of_registers = REGISTERS // (max(registers, 1) * 32 * block)
    of_memory = memory // (shared + BLOCK_SHARED)
    return min(most // block, of_registers, of_memory) * block


def render(rows: Iterable[Row]) -> str:
    """The table as a person reads it."""
    rows = list(rows)
    width = max((len(row.kernel) for row in rows), default=6)
    lines = [f"{'kernel':{width}}  arch  registers  shared  spilled  occupancy"]
    lines += [
        f"{row.kernel:{width}}  sm_{row.arch:<3} {row.registers:6} {row.shared:9,} {row.spilled:8} "
        f"{row.occupancy:9.0%}"
        for row in rows
    ]
    return "\n".join(lines)


def as_json(rows: Iterable[Row]) -> str:
    """The table as it is stored, one row a line, with the compiler's version."""
    import triton

    facts: dict[str, Any] = {"triton": triton.__version__, "rows": []}
    lines = ",\n  ".join(json.dumps(asdict(row)) for row in rows)
    return json.dumps(facts)[:-3] + f"[\n  {lines}\n]}}\n"


def read_json(text: str) -> list[Row]:
    """The rows of a stored table; none if another compiler made it, or it has no sources.  Raises
    ``UsageError`` for what is no such table."""
    import triton

    try:
        facts = json.loads(text)
        rows = [Row(**{"source": "", **row}) for row in facts["rows"]]
        return rows if facts["triton"] == triton.__version__ else []
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"This is no table of kernels: {error!r}.", "Make one by --json."
        ) from None
