"""The package: what installs where, what imports what, and what an import costs."""

import ast
import functools
import importlib
import importlib.metadata
import os
import re
import statistics
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import fusedrnn

ROOT = Path(__file__).parents[1]
CONFIG = tomllib.loads((ROOT / "pyproject.toml").read_text())

ALLOWED = {
    "kernels": {"kernels"},
    "fusedrnn/offloading": {"_checks", "offloading"},
    "fusedrnn/_checks.py": set(),
    "fusedrnn/layout.py": set(),
    "fusedrnn/cells.py": set(),
    "fusedrnn/backends": {"backends", "cells", "layout", "kernels"},
    "fusedrnn/chunking.py": {"backends", "cells", "layout"},
    "fusedrnn/sequence.py": {"backends", "cells", "chunking", "layout"},
    "fusedrnn/stages.py": {"backends", "cells", "chunking", "layout", "offloading", "sequence"},
    "fusedrnn/machine.py": {"kernels"},
    "fusedrnn/costs.py": {"backends", "machine"},
    "fusedrnn/memory.py": {"backends", "cells", "layout", "stages"},
    "fusedrnn/budget.py": {"_checks", "backends", "costs", "machine", "memory"},
    "fusedrnn/choice.py": {"backends", "budget", "costs", "machine", "offloading"},
    "fusedrnn/compiled.py": {"backends", "cells", "choice", "chunking", "layout", "offloading", "sequence"},
    "fusedrnn/functional.py": {
        "_checks",
        "backends",
        "cells",
        "choice",
        "compiled",
        "layout",
        "offloading",
        "stages",
        "uncompiled",
    },
    "fusedrnn/planner.py": {
        "_checks",
        "backends",
        "budget",
        "cells",
        "choice",
        "machine",
        "memory",
        "offloading",
    },
    "fusedrnn/uncompiled.py": {"functional", "streaming"},
    "fusedrnn/replay.py": set(),
    "fusedrnn/streaming": {"_checks", "backends", "cells", "functional", "layout", "offloading", "replay", "streaming"},
    "fusedrnn/recurrent.py": {"_checks", "cells", "functional", "layout", "offloading", "streaming", "uncompiled"},
    "fusedrnn/modules.py": {"cells", "recurrent", "streaming"},
    "fusedrnn/stepping.py": {"_checks"},
    "fusedrnn/recompute.py": {"replay", "stepping"},
    "fusedrnn/dynamic.py": {"_checks", "offloading", "recompute", "stepping"},
    "fusedrnn/conversion.py": {"modules", "offloading"},
    "fusedrnn/weights.py": {"_checks", "cells"},
    "fusedrnn/testing.py": {"offloading"},
}


def imported(path: Path) -> set[str]:
    """Parts of fusedrnn that a file imports, at any depth."""
    package = "fusedrnn." + ".".join(path.relative_to(ROOT).parts[:-1]).removeprefix("fusedrnn").strip(".")
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join([*package.strip(".").split(".")[: None if node.level == 1 else 1 - node.level], base])
            names |= {base} if base != "fusedrnn" else {f"fusedrnn.{alias.name}" for alias in node.names}
    return {name.split(".")[1] for name in names if name.startswith("fusedrnn.") and len(name.split(".")) > 1}


def test_imports_go_one_way():
    for place, allowed in ALLOWED.items():
        path = ROOT / place
        for file in [path] if path.suffix else sorted(path.rglob("*.py")):
            if file.exists():
                assert imported(file) <= allowed, file
    for file in [*ROOT.glob("fusedrnn/**/*.py"), *ROOT.glob("kernels/*.py")]:
        assert not imported(file) & {"bench", "tests"}, file
    checked = {ROOT / place for place in ALLOWED} | {ROOT / "fusedrnn/__init__.py"}
    assert not set(ROOT.glob("fusedrnn/*.py")) - checked, "a module without a rule"


def test_every_package_on_disk_is_installed():
    packages = set(CONFIG["tool"]["setuptools"]["packages"])
    folders = {
        ".".join(file.parent.relative_to(ROOT).parts)
        for top in ("fusedrnn", "kernels", "bench")
        for file in (ROOT / top).rglob("__init__.py")
    }
    assert packages == {name if name.startswith("fusedrnn") else f"fusedrnn.{name}" for name in folders}


def test_version_is_in_one_place():
    assert fusedrnn.__version__ == importlib.metadata.version("fusedrnn") == CONFIG["project"]["version"]
    assert f"## [{fusedrnn.__version__}]" in (ROOT / "CHANGELOG.md").read_text()


def test_public_names_exist():
    assert all(hasattr(fusedrnn, name) for name in fusedrnn.__all__)
    assert sorted(fusedrnn.__all__) == fusedrnn.__all__
    assert all(callable(getattr(fusedrnn, name)) for name in fusedrnn.__all__ if name != "__version__")


def test_no_public_name_hides_a_module():
    for file in (ROOT / "fusedrnn").rglob("*.py"):
        name = ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        # As `import fusedrnn.offloading.config as config` finds it: attribute by attribute.
        module = importlib.import_module(name)
        assert functools.reduce(getattr, name.split(".")[1:], fusedrnn) is module, name


@pytest.mark.parametrize("name", ["kernels", "bench"])
def test_bare_names_are_refused(name):
    env = {key: value for key, value in os.environ.items() if key != "PYTHONSAFEPATH"}
    command = [sys.executable, "-c", f"import {name}"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 1
    assert re.search(rf"ImportError: this package is `fusedrnn\.{name}`, not `{name}`", done.stderr)


def test_import_loads_no_triton_and_costs_little():
    code = (
        "import time, sys, torch\n"
        "start = time.perf_counter()\n"
        "import fusedrnn\n"
        "cost = time.perf_counter() - start\n"
        "assert not any(m.split('.')[0] in ('triton', 'rich', 'numpy.testing') for m in sys.modules), 'too much'\n"
        "print(cost)\n"
    )
    costs = [
        float(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout)
        for _ in range(3)
    ]
    assert statistics.median(costs) < 0.25, costs


def test_no_file_is_too_long():
    for file in [*ROOT.glob("fusedrnn/**/*.py"), *ROOT.glob("kernels/*.py"), *ROOT.glob("bench/*.py")]:
        assert len(file.read_text().splitlines()) <= 420, file
