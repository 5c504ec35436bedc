"""Compile the kernels named on standard input (JSON) and print their reports; run by test_compiled.py."""

import json
import re
import sys

from fusedrnn.kernels import _launch, _sequence
from fusedrnn.kernels._compile import KERNELS

CONFIGS = {"elementwise": _launch.Config, "sequence": _sequence.Config}
PAST_L1 = re.compile(r"LDG\.E(?:\.(\d+))?\.STRONG\.GPU")
reports = []
for name, dtype, capability, H, kind, config, options in json.load(sys.stdin):
    report = KERNELS[name].report(dtype, capability, H, CONFIGS[kind](**config), **options)
    reports.append(
        {
            "registers": report.registers,
            "stack": report.stack_bytes,
            "spills": report.spills,
            "shared": report.shared_bytes,
            "matrix": report.matrix_instructions,
            "wide": {bits: report.sass.count(f"LDG.E.{bits}") for bits in ("64", "128")},
            # Bytes that a thread loads inside and outside loops.
            "loop": sum(bits * count for bits, count in report.loop_loads.items()) // 8,
            "other": sum(bits * count for bits, count in report.other_loads.items()) // 8,
            # Bytes that it loads past the L1 cache, and fences that other programs see.
            "past L1": sum(int(bits or 32) for bits in re.findall(r"LDG\.E(?:\.(\d+))?\.STRONG\.GPU", report.sass))
            // 8,
            "fences": len(re.findall(r"MEMBAR\.\w+\.GPU", report.sass)),
        }
    )
json.dump(reports, sys.stdout)
