"""Benchmarks: `fusedrnn-bench` or `python -m fusedrnn.bench`. Installed, and imported, as `fusedrnn.bench`."""

if __name__ != "fusedrnn.bench":
    raise ImportError(
        f"this package is `fusedrnn.bench`, not `{__name__}`: install the project (`pip install -e .`) and import it "
        "by that name"
    )
