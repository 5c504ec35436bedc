"""Builds the pretended device's library, once for each state of its sources and each torch."""

import hashlib
import os
import shutil
import subprocess
import tempfile
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

_HERE = Path(__file__).resolve().parent


def compiler() -> str | None:
    """Return the C++ compiler, None where there is none."""
    names = [os.environ.get("CXX"), "c++", "g++"]
    return next((found for name in names if name and (found := shutil.which(name))), None)


def torch_folder() -> Path:
    """Return where torch is installed, without importing it."""
    spec = find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        raise RuntimeError("torch is not installed")
    return Path(spec.submodule_search_locations[0])


def library() -> Path:
    """Return the library's path; build it if there is none yet for these sources and this torch.

    Raises:
        RuntimeError: If there is no compiler, or it fails.
    """
    sources = sorted(path for path in _HERE.iterdir() if path.suffix in (".cpp", ".h"))
    digest = hashlib.sha256(version("torch").encode())
    for source in sources:
        digest.update(source.read_bytes())
    folder = Path(os.environ.get("PRETENDED_CACHE") or Path(tempfile.gettempdir()) / f"fusedrnn-{os.getuid()}")
    path = folder / f"pretended-{digest.hexdigest()[:16]}.so"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        _compile(path)
    return path


def _compile(path: Path) -> None:
    command = compiler()
    if command is None:
        raise RuntimeError("the pretended device needs a C++ compiler: c++ or g++ on PATH, or $CXX")
    torch = torch_folder()
    # Built aside and renamed: of two processes that build at once, each finds a whole library.
    handle, aside = tempfile.mkstemp(suffix=".so", dir=path.parent)
    os.close(handle)
    arguments = ["-std=c++20", "-O1", "-fPIC", "-shared", "-w", "-pthread"]
    arguments += [f"-I{torch / 'include'}", f"-I{torch / 'include/torch/csrc/api/include'}", str(_HERE / "device.cpp")]
    arguments += ["-o", aside, f"-L{torch / 'lib'}", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{torch / 'lib'}"]
    try:
        done = subprocess.run([command, *arguments], capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{command} cannot build the pretended device:\n{done.stderr[-4000:]}")
        os.replace(aside, path)
    finally:
        Path(aside).unlink(missing_ok=True)


if __name__ == "__main__":
    print(library())
