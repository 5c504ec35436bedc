"""Kernels run interpreted where there is no GPU. Triton reads the switch when a kernel is defined."""

import inspect
import itertools
import multiprocessing
import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    from triton.runtime import interpreter

    import fusedrnn.kernels.gru_step
    import fusedrnn.kernels.lstm_layer_norm_step
    import fusedrnn.kernels.lstm_recompute
    import fusedrnn.kernels.lstm_sequence_backward
    import fusedrnn.kernels.lstm_sequence_forward
    import fusedrnn.kernels.lstm_step  # noqa: F401

    del os.environ["TRITON_INTERPRET"]


@pytest.fixture
def device(monkeypatch):
    """Where kernels run, with the switch set for what asks for it at run time."""
    if torch.cuda.is_available():
        return torch.device("cuda")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    return torch.device("cpu")


@pytest.fixture
def at_once(monkeypatch):
    """Launch the sequence kernels with all their programs at once, and return the launcher."""
    from fusedrnn.kernels import lstm_sequence_backward, lstm_sequence_forward

    if not torch.cuda.is_available():
        for module in (lstm_sequence_forward, lstm_sequence_backward):
            monkeypatch.setattr(module, "launch", _launch_at_once)
    return _launch_at_once


def _launch_at_once(kernel, grid, anchor, *args, timeout=60.0, **options):
    """Run all programs of an interpreted kernel at the same time, so that they may wait for one another.

    Triton's interpreter runs the programs of a grid one after the other, and a barrier among them would never open.
    Here each program is a forked process over shared memory; the interpreter's atomics are real ones at real addresses.
    Stands in for `fusedrnn.kernels._launch.launch`; raises RuntimeError if a program fails or hangs.
    """
    shared = {}

    def share(value):
        if not isinstance(value, torch.Tensor):
            return value
        storage = value.untyped_storage()
        if storage.data_ptr() not in shared:
            copy = storage.clone()
            copy.share_memory_()
            shared[storage.data_ptr()] = storage, copy
        copy = shared[storage.data_ptr()][1]
        return torch.empty(0, dtype=value.dtype).set_(copy, value.storage_offset(), value.shape, value.stride())

    names = [name for name in kernel.arg_names if name not in options]
    arguments = dict(zip(names, map(share, args), strict=True))
    arguments |= {name: value for name, value in options.items() if name in kernel.arg_names}
    grid = tuple(grid) + (1,) * (3 - len(grid))
    context = multiprocessing.get_context("fork")
    programs = {
        index: context.Process(target=_run_program, args=(kernel, grid, index, arguments))
        for index in itertools.product(*map(range, grid))
    }
    for process in programs.values():
        process.start()
    for process in programs.values():
        process.join(timeout)
    hung = [index for index, process in programs.items() if process.is_alive()]
    for index in hung:
        programs[index].kill()
        programs[index].join()
    failed = [index for index, process in programs.items() if index not in hung and process.exitcode]
    if hung or failed:
        raise RuntimeError(f"programs hung: {hung}, failed: {failed}")
    for storage, copy in shared.values():
        storage.copy_(copy)


def _run_program(kernel, grid, index, arguments):
    """Run one program in this process."""
    executor = interpreter.GridExecutor(kernel.fn, kernel.arg_names, grid)
    patched = interpreter._patch_lang(executor.fn)
    try:
        bound = inspect.getcallargs(executor.fn, **arguments)
        bound = {
            name: value if name in executor.constexprs else interpreter._implicit_cvt(value)
            for name, value in bound.items()
        }
        interpreter.interpreter_builder.set_grid_dim(*grid)
        interpreter.interpreter_builder.set_grid_idx(*index)
        executor.fn(**bound)
    finally:
        patched.restore()
