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
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fusedrnn.kernels._launch import Config as ElementwiseConfig
from fusedrnn.kernels._sequence import Config as SequenceConfig

_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9]+)(\S*)\s*(.*?);")
_LABEL = re.compile(r"^(\.L_x_\d+):")
_TARGET = re.compile(r"\.L_x_\d+")
_WIDTH = re.compile(r"\.[US]?(8|16|64|128)\b")

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

    @property
    def loop_loads(self) -> Mapping[int, int]:
        """Number of loads from global memory inside loops, by width in bits: what a thread may load again and again.

        A loop is what lies between a label and a branch back to it. Waiting for a counter is a load in a loop too.
        """
        return self._loads[0]

    @property
    def other_loads(self) -> Mapping[int, int]:
        """Number of loads from global memory outside loops, by width in bits."""
        return self._loads[1]

    @cached_property
    def _loads(self) -> tuple[Mapping[int, int], Mapping[int, int]]:
        lines = self.sass.splitlines()
        labels: dict[str, int] = {}
        loads: dict[int, int] = {}
        loops: list[tuple[int, int]] = []
        for at, line in enumerate(lines):
            if label := _LABEL.match(line):
                labels[label[1]] = at
            elif found := _INSTRUCTION.match(line):
                if found[1] in ("LDG", "LDGSTS"):
                    width = _WIDTH.search(found[2])
                    loads[at] = int(width[1]) if width else 32
                elif found[1] == "BRA" and (target := _TARGET.search(found[3])) and target[0] in labels:
                    loops.append((labels[target[0]], at))
        inside = {at for at in loads if any(first < at < last for first, last in loops)}
        return Counter(loads[at] for at in inside), Counter(loads[at] for at in loads if at not in inside)


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
        # Versions of Triton differ in whether products and sums are fused where nothing is said.
        options={"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": True},
    )
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        usage = _run("cuobjdump", "--dump-resource-usage", cubin.name)
        sass = _run("nvdisasm", cubin.name)
    needs = dict(re.findall(r"(REG|STACK):(\d+)", usage))
    opcodes = Counter(found[1] for found in map(_INSTRUCTION.match, sass.splitlines()) if found)
    return Report(int(needs["REG"]), int(needs["STACK"]), compiled.metadata.shared, dict(opcodes), sass)


@dataclass(frozen=True)
class Kernel:
    """A kernel and its run-time arguments.

    Args:
        module: Name of its module below `fusedrnn.kernels`.
        function: Its name there.
        element: Pointers to what has the dtype of the layer.
        float32: Pointers to float32.
        integers: Types of pointers to integers.
        sizes: Numbers that are multiples of 16 only by chance.
        multiples: Numbers that are multiples of 16 where H is.
        constants: Those constexpr arguments that no config holds.
    """

    module: str
    function: str
    element: tuple[str, ...]
    float32: tuple[str, ...]
    sizes: tuple[str, ...]
    multiples: tuple[str, ...]
    constants: Mapping[str, Any]
    integers: Mapping[str, str] = field(default_factory=dict)

    def report(
        self,
        dtype: str,
        capability: int,
        H: int,
        config: ElementwiseConfig | SequenceConfig,
        precision: str = "ieee",
        **constants: Any,
    ) -> Report:
        """Compile for a problem.

        Args:
            dtype: Triton's name of the layer's dtype: "bf16", "fp16" or "fp32".
            capability: Compute capability without the dot.
            H: Hidden units.
            config: Blocks.
            precision: How float32 products are computed; for sequence kernels.
            constants: In place of some of the kernel's `constants`.

        Returns:
            The report.
        """
        signature = dict.fromkeys(self.element, f"*{dtype}") | dict.fromkeys(self.float32, "*fp32")
        signature |= dict(self.integers) | dict.fromkeys(self.sizes + self.multiples, "i32")
        promised = set(signature) - set(self.sizes)
        if H % 16:
            promised -= set(self.multiples)
        values = {**self.constants, "BLOCK_B": config.block_b, "BLOCK_H": config.block_h, **constants}
        if isinstance(config, SequenceConfig):
            values |= {"H": H, "SWAP": config.swap, "PRECISION": precision}
            if self.function == "_sequence_forward_kernel":
                values |= {"BLOCK_K": config.block_k, "BLOCKS_K": config.blocks_k(H), "AHEAD": config.ahead}
            else:
                values |= {"BLOCK_N": config.block_n, "BLOCKS_N": config.blocks_n(H)}
                values |= {"HIDDEN_BLOCKS": config.grid(1, H)[1]}
        kernel = getattr(import_module(f"fusedrnn.kernels.{self.module}"), self.function)
        return compile_report(kernel, signature, values, capability, config.num_warps, divisible=frozenset(promised))


_ROWS = {"offsets_ptr": "*i64", "batches_ptr": "*i32"}
_CHUNK = ("K", "B", "row_start", "row_step")
KERNELS = {
    "step forward": Kernel(
        "lstm_step",
        "_forward_kernel",
        element=("pre_ptr", "h_ptr"),
        float32=("c_prev_ptr", "c_ptr"),
        sizes=("n",),
        multiples=("H", "stride_pre_n", "stride_c_prev_n", "stride_h_n", "stride_c_n"),
        constants={"STORE_GATES": True},
    ),
    "step backward": Kernel(
        "lstm_step",
        "_backward_kernel",
        element=("gates_ptr", "dy_ptr", "dh_ptr", "dgates_ptr"),
        float32=("c_prev_ptr", "c_ptr", "dc_ptr"),
        sizes=("n",),
        multiples=("H", *(f"stride_{name}_n" for name in ("gates", "c_prev", "c", "dy", "dh", "dc", "dgates"))),
        constants={"HAS_DY": True, "HAS_DH": True},
    ),
    "recompute": Kernel(
        "lstm_recompute",
        "_recompute_kernel",
        element=("pre_ptr",),
        float32=("c0_ptr", "c_ptr"),
        integers={**_ROWS, "resets_ptr": "*u8"},
        sizes=_CHUNK,
        multiples=("H", "stride_pre_n", "stride_c0_n", "stride_c_n"),
        constants={"SCAN": True, "PACKED": False, "RESETS": False},
    ),
    "GRU step forward": Kernel(
        "gru_step",
        "_forward_kernel",
        element=("pre_ptr", "hproj_ptr", "h_prev_ptr", "h_ptr", "hn_ptr"),
        float32=(),
        sizes=("n_rows",),
        multiples=("H", *(f"stride_{name}_n" for name in ("pre", "hproj", "h_prev", "h", "hn"))),
        constants={"STORE_GATES": True, "WRITE_H": True},
    ),
    "GRU step backward": Kernel(
        "gru_step",
        "_backward_kernel",
        element=("h_prev_ptr", "dy_ptr", "gates_ptr", "hn_ptr", "dh_ptr"),
        float32=(),
        sizes=("n_rows",),
        multiples=("H", *(f"stride_{name}_n" for name in ("h_prev", "dy", "gates", "hn", "dh"))),
        constants={"HAS_DY": True},
    ),
    "layer norm step forward": Kernel(
        "lstm_layer_norm_step",
        "_forward_kernel",
        element=("hproj_ptr", "h_ptr"),
        float32=("pre_ptr", "c_prev_ptr", "gain_hh_ptr", "gain_c_ptr", "bias_c_ptr", "c_ptr"),
        sizes=("n_rows",),
        multiples=("H", *(f"stride_{name}_n" for name in ("pre", "hproj", "c_prev", "h", "c"))),
        constants={"EPS": 1e-5},
    ),
    "layer norm step backward": Kernel(
        "lstm_layer_norm_step",
        "_backward_kernel",
        element=("dy_ptr", "dh_ptr", "dhproj_ptr"),
        float32=(
            *("hproj_ptr", "mean_h_ptr", "rstd_h_ptr", "c_ptr", "mean_c_ptr", "rstd_c_ptr", "c_prev_ptr"),
            *("gain_hh_ptr", "gain_c_ptr", "bias_c_ptr", "gates_ptr", "dc_ptr", "da_ptr"),
        ),
        sizes=("n_rows",),
        multiples=(
            "H",
            *(f"stride_{name}_n" for name in ("hproj", "c", "c_prev", "dy", "dh", "gates", "dc", "da", "dhproj")),
        ),
        constants={"HAS_DY": True},
    ),
    "sequence forward": Kernel(
        "lstm_sequence_forward",
        "_sequence_forward_kernel",
        element=("xproj_ptr", "whh_ptr", "h_ptr", "y_ptr"),
        float32=("c0_ptr", "c_ptr", "cT_ptr"),
        integers={**_ROWS, "resets_ptr": "*u8", "barrier_ptr": "*i32"},
        sizes=_CHUNK,
        multiples=("stride_x_n", "stride_y_n", "stride_c_n", "stride_c0_n"),
        constants={"STORE_GATES": True, "STORE_CELLS": True, "PACKED": False, "RESETS": False},
    ),
    "sequence backward": Kernel(
        "lstm_sequence_backward",
        "_sequence_backward_kernel",
        element=("whh_ptr", "dy_ptr", "gates_ptr", "dh_ptr", "share_ptr"),
        float32=("c0_ptr", "c_ptr", "dcells_ptr", "dc_ptr"),
        integers={**_ROWS, "resets_ptr": "*u8", "barrier_ptr": "*i32"},
        sizes=_CHUNK,
        multiples=tuple(f"stride_{name}_n" for name in ("gates", "c", "c0", "dy", "dcells", "dh", "dc")),
        constants={"HAS_DY": True, "HAS_DCELLS": False, "CLIP": None, "PACKED": False, "RESETS": False},
    ),
}


def _run(tool: str, *args: str) -> str:
    return subprocess.run([_TOOLS / tool, *args], capture_output=True, text=True, check=True).stdout
