"""Compile a kernel for a GPU that is not there, and read what its machine code needs.

Triton's wheel carries the assembler and the disassemblers, so neither a driver nor a device is needed. The kernel must
not be interpreted (TRITON_INTERPRET unset).
"""

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
_OPCODE = re.compile(r"^\s+/\*([0-9a-f]+)\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9]+)(\S*)\s*(.*?);", re.M)

SHARED_BYTES = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}
"""Shared memory that one program may use, by compute capability (CUDA C++ Programming Guide, table of technical
specifications)."""


@dataclass(frozen=True)
class Report:
    """What a compiled kernel needs.

    Args:
        registers: Registers per thread.
        stack_bytes: Local memory per thread; above 0 means that registers spill.
        shared_bytes: Shared memory per program.
        instructions: How often each opcode stands in the machine code.
        loop_loads: Loads from global memory inside loops, by width in bits.
        sass: The machine code.
    """

    registers: int
    stack_bytes: int
    shared_bytes: int
    instructions: Mapping[str, int]
    sass: str = field(repr=False)

    @property
    def spills(self) -> int:
        """Number of loads and stores of spilled registers."""
        return self.instructions.get("LDL", 0) + self.instructions.get("STL", 0)

    @property
    def matrix_instructions(self) -> str:
        """Name of the matrix instructions used: "HGMMA" (wgmma), "HMMA" (mma.sync), "UTCHMMA" (tcgen05), or ""."""
        for name in ("UTCHMMA", "UTCQMMA", "HGMMA", "HMMA"):
            if self.instructions.get(name):
                return name
        return ""


def compile_report(
    kernel: Any,
    signature: Mapping[str, str],
    constants: Mapping[str, Any],
    capability: int,
    num_warps: int = 4,
    num_stages: int = 1,
    divisible: frozenset[str] | None = None,
) -> Report:
    """Compile a kernel and report what it needs.

    Args:
        kernel: A function decorated with `triton.jit`.
        signature: Triton types of the run-time arguments, such as {"x_ptr": "*bf16", "T": "i32"}.
        constants: Values of the constexpr arguments.
        capability: Compute capability without the dot: 80, 90 or 100.
        num_warps: Warps per program.
        num_stages: Depth of software pipelining.
        divisible: Arguments that are multiples of 16, as Triton would find at run time; all of them by default.

    Returns:
        The report.
    """
    names = list(kernel.arg_names)
    promised = [name for name in signature if divisible is None or name in divisible]
    source = ASTSource(
        kernel,
        {name: signature.get(name, "constexpr") for name in names},
        constexprs=dict(constants),
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in promised},
    )
    compiled = triton.compile(
        source,
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": num_warps, "num_stages": num_stages},
    )
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        usage = _run("cuobjdump", "--dump-resource-usage", cubin.name)
        sass = _run("nvdisasm", cubin.name)
    needs = dict(re.findall(r"(REG|STACK):(\d+)", usage))
    opcodes = Counter(match.group(2) for match in _OPCODE.finditer(sass))
    return Report(int(needs["REG"]), int(needs["STACK"]), compiled.metadata.shared, dict(opcodes), sass)


def _run(tool: str, *args: str) -> str:
    return subprocess.run([_TOOLS / tool, *args], capture_output=True, text=True, check=True).stdout
