"""Who runs a call, and what is saved: the first backend that can, in the quickest way that fits."""

from functools import lru_cache

from fusedrnn.backends import BACKENDS, Choice, lengths_of, mixes, steps_of
from fusedrnn.backends.base import Backend, Call
from fusedrnn.backends.mix import Mode, best_mix, best_moving_mix
from fusedrnn.offloading import OffloadConfig

_CPU_GATES_BYTES = 32 << 20
"""On the CPU, larger activations are faster computed again than kept: a larger block is mapped and zeroed by the kernel
at every step (glibc's limit for keeping freed blocks is 32 MiB)."""
_GPU_GATES_FRACTION = 1 / 16


class NoBackendError(RuntimeError):
    """No backend can run a call; the message lists every backend with its reasons."""


@lru_cache(maxsize=1024)
def choose(
    call: Call,
    backend: str = "auto",
    save: str = "auto",
    chunk: int | str = "auto",
    budget: int | None = None,
    offload: OffloadConfig | None = None,
) -> Choice:
    """Choose backend, save mode and chunks for a call.

    A named backend or mode is taken or refused, never replaced; "auto" takes the first that fits, and of its modes, or
    of a mix of two, the quickest that fits the limit of memory, or whose excess may move to the host.

    Args:
        call: The call.
        backend: Name of a backend, or "auto".
        save: A save mode, or "auto".
        chunk: Timesteps per chunk, or "auto".
        budget: Most bytes that a step may take, or None; see `fusedrnn.LSTM`.
        offload: How what is saved moves off the device, None where it does not.

    Raises:
        NoBackendError: If nothing fits; the message lists every backend with its reasons.
        ValueError: If nothing keeps to the budget; the message names the smallest that would do.
    """
    known = BACKENDS[call.cell.name]
    if backend != "auto" and backend not in known:
        raise RuntimeError(f"backend={backend!r} has no {call.cell.name}: take one of {', '.join(map(repr, known))}")
    candidates = list(known.values()) if backend == "auto" else [known[backend]]
    reasons = {candidate.name: candidate.refusals(call) for candidate in candidates}
    usable = [c for c in candidates if not reasons[c.name] and (save == "auto" or save in c.saves)]
    if usable and budget is not None and call.grad:
        from fusedrnn.budget import within

        return within(call, tuple(usable), save, chunk, budget)
    if usable:
        return _saved(call, usable[0], save, steps_of(usable[0], call, chunk), offload)
    lines = [
        f"  {candidate.name}: "
        + "; ".join(reasons[candidate.name] or [f"it has save={' and '.join(map(repr, candidate.saves))} only"])
        for candidate in candidates
    ]
    raise NoBackendError(
        f"no backend can run this call ({call}) with backend={backend!r}, save={save!r}:\n"
        + "\n".join(lines)
        + '\nuse backend="auto" and save="auto", or change what is named above'
    )


def _saved(call: Call, backend: Backend, save: str, steps: int, offload: OffloadConfig | None) -> Choice:
    """Choose what is saved."""
    if save != "auto":
        return Choice(backend, save, steps, f"save={save!r} was asked for")
    if not call.grad:
        return Choice(backend, backend.saves[0], steps, "no backward pass follows, so nothing is saved")
    first, last = backend.saves[0], backend.saves[-1]
    kept = call.T * call.step_bytes(first)
    limit = int(call.gpu.memory * _GPU_GATES_FRACTION) if call.gpu else _CPU_GATES_BYTES
    sizes = f"gates and cells take {kept / 2**20:.1f} MiB, the limit is {limit / 2**20:.1f} MiB"
    if kept <= limit:
        return Choice(backend, first, steps, f"{sizes}: they are kept")
    if not mixes(backend):
        return Choice(backend, last, steps, f"{sizes}: they are computed again")
    from fusedrnn.costs import step_seconds
    from fusedrnn.machine import machine_with

    speeds = machine_with(call.gpu)
    modes = []
    for mode in backend.saves:
        seconds = step_seconds(speeds, call, backend.name, mode)
        nbytes = call.step_bytes(mode) / call.directions
        modes.append(Mode(mode, nbytes, seconds.forward + seconds.backward, seconds.forward))
    lengths = lengths_of(call, steps)
    if offload is not None:
        room = min(limit, offload.budget_bytes() or limit)
        direct = call.device == "cpu" and offload.spill_dir is not None
        link = speeds.disk_bytes_per_second if direct else speeds.link_bytes_per_second
        host = (0 if direct else offload.host_bytes()) + offload.disk_bytes()
        mix = best_moving_mix(modes, lengths, room, host, link)
        if mix is not None:
            moved = f"{max(0.0, mix.nbytes - room) / 2**20:.1f} MiB may move at {link / 1e9:.3g} GB/s"
            return Choice(backend, mix.save, steps, f"{sizes}: {moved}, which is the quickest", mix.older)
    mix = best_mix(modes, lengths, limit)
    if mix is None:
        return Choice(backend, last, steps, f"{sizes}: they are computed again")
    return Choice(backend, mix.save, steps, f"{sizes}: what fits is kept, in the newest chunks", mix.older)
