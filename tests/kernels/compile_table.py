"""Compile the kernels named on standard input (JSON) and print their reports; run by test_compiled.py."""

import json
import sys
from importlib import import_module

from fusedrnn.kernels._compile import compile_report

reports = []
for module, kernel, *rest in json.load(sys.stdin):
    report = compile_report(getattr(import_module(module), kernel), *rest)
    reports.append(
        {
            "registers": report.registers,
            "stack": report.stack_bytes,
            "spills": report.spills,
            "shared": report.shared_bytes,
            "matrix": report.matrix_instructions,
            "wide": {bits: report.sass.count(f"LDG.E.{bits}") for bits in ("64", "128")},
        }
    )
json.dump(reports, sys.stdout)
