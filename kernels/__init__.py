"""Triton kernels and their launchers. Installed, and imported, as `fusedrnn.kernels`."""

if __name__ != "fusedrnn.kernels":
    raise ImportError(
        f"this package is `fusedrnn.kernels`, not `{__name__}`: install the project (`pip install -e .`) and import "
        "it by that name"
    )
