"""One random program: a subject, a configuration, streams, delays and failures, all drawn from its seed."""

import gc
import random
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import cuda
import subjects
import tight
import torch
from subjects import Subject
from torch import Tensor

import fusedrnn
from fusedrnn.testing import full_device

torch.set_num_threads(1)
gc.collect()
gc.freeze()  # so that a collection after each step looks at that step alone


@dataclass
class Outcome:
    """What a program showed.

    Args:
        kind: Its kind.
        name: What it computed.
        faults: Everything that must not be.
        spills: How many buffers went to the host.
    """

    kind: str
    name: str
    faults: list[str] = field(default_factory=list)
    spills: int = 0


def run(seed: int, kinds: list[str] | None = None) -> Outcome:
    """Run the program of a seed.

    Args:
        seed: Draws everything.
        kinds: Kinds to draw from; None for all.
    """
    draw = random.Random(seed)
    torch.manual_seed(seed)
    cuda.reset()
    kind = draw.choice(kinds or [*subjects.KINDS, *tight.KINDS])
    # With several devices, mostly on one that is not current.
    device = torch.device("cuda", cuda.DEVICES - 1 if draw.random() < 0.7 else 0)
    with warnings.catch_warnings():
        # That a pool drawn too small is full is no news.
        warnings.simplefilter("ignore", RuntimeWarning)
        if kind in tight.KINDS:
            name, faults, off = tight.KINDS[kind](draw, device)
        else:
            off = fusedrnn.offload(full_device(**_options(draw)))
            subject = subjects.KINDS[kind](draw, device, off)
            name, faults = subject.kind, _Comparison(draw, device, off, subject).faults()
        cuda.reset()
        faults += _left_over(off, device)
    spills = off.stats().spills
    return Outcome(kind, name, [f"{fault} ({off!r})" for fault in faults], spills)


def _options(draw: random.Random) -> dict[str, Any]:
    options = {
        "min_bytes": draw.choice((256, 1024)),
        "chunk_bytes": draw.choice((1024, 8192, 1 << 20)),
        "ring_slots": draw.choice((2, 3, 4)),
        "prefetch": draw.choice((0, 1, 2, 4)),
        "host_limit": draw.choice(("50%", 0, 1 << 16, 1 << 20)),
        "trace": draw.random() < 0.3,
    }
    if draw.random() < 0.3:
        options |= {"spill_dir": tempfile.gettempdir(), "host_limit": draw.choice((1 << 14, 1 << 16, 1 << 20, "50%"))}
    if draw.random() < 0.2:
        options["memory_budget"] = draw.choice((1 << 18, 1 << 20))
    return options


def _left_over(off: Any, device: torch.device) -> list[str]:
    """Return what is still there though every graph is gone."""
    gc.collect()
    faults = []
    try:
        torch.cuda.synchronize(device)
    except RuntimeError as error:
        faults.append(str(error))
    scheduler = off.scheduler(device)
    # After an error, autograd's own thread lets go of the graph only when the caller has long been told.
    for _ in range(20):
        if not scheduler.entries():
            break
        time.sleep(0.05)
        gc.collect()
    if scheduler.entries():
        faults.append(f"{len(scheduler.entries())} entries are left")
    if scheduler.host.used:
        faults.append(f"{scheduler.host.used} bytes of the host are in use")
    try:
        scheduler.audit()
    except AssertionError as error:
        faults.append(f"the audit fails: {error!r}")
    if text := cuda.error():
        faults.append(f"asynchronous error: {text}")
    return faults


class _Comparison:
    """A subject's steps without offloading, and with it."""

    def __init__(self, draw: random.Random, device: torch.device, off: Any, subject: Subject):
        self._draw, self._device, self._off, self._subject = draw, device, off, subject
        self._twice = draw.random() < 0.3
        self._failing = draw.random() < 0.25
        self._delay = 0

    def faults(self) -> list[str]:
        """Run them, and return what differs."""
        draw = self._draw
        if self._subject.reads_freed:
            cuda.overwrite_freed(cuda.AT_HAND_OUT)
        expected = [tensor.cpu() for tensor in self._step(None)]
        found: list[str] = []
        for number in range(3):
            overwritten = draw.choice((cuda.AT_FREE, cuda.AT_HAND_OUT))
            cuda.overwrite_freed(cuda.AT_HAND_OUT if self._subject.reads_freed else overwritten)
            self._delay = draw.choice((0, 0, 20, 100))
            cuda.set_delays(self._delay, draw.choice((0, 20, 300, 1000)))
            if self._subject.fast is not None:
                cuda.set_delays(0, 5000)
                cuda.set_delay(self._subject.fast, 0)
            # The last step has no failure: whatever happened before, it must be exact.
            failing = self._failing and number < 2
            found += [f"step {number}: {fault}" for fault in self._compare(expected, failing, number > 0)]
            found += [f"after step {number}: {fault}" for fault in _left_over(self._off, self._device)]
        return found

    def _compare(self, expected: list[Tensor], failing: bool, may_switch: bool) -> list[str]:
        draw = self._draw
        if failing:
            self._provoke()
        side = torch.Stream(self._device) if self._subject.side and may_switch and draw.random() < 0.5 else None
        try:
            found = self._on(side, lambda: self._step(self._off))
        except Exception as error:
            text = f"{type(error).__name__}: {str(error)[:300]}"
            clear = isinstance(error, torch.OutOfMemoryError) or "pretended" in text
            return [] if failing and clear else [text]
        finally:
            cuda.fail_allocation(0)
            cuda.fail_copy(0)
            cuda.limit_pinned(0)
        wrong = [i for i, (a, b) in enumerate(zip(found, expected, strict=True)) if not torch.equal(a.cpu(), b)]
        return [f"results {wrong} differ (0 is the output)"] if wrong else []

    def _provoke(self) -> None:
        draw = self._draw
        failure = draw.choice(("allocation", "copy", "pinned"))
        if failure == "allocation":
            cuda.fail_allocation(draw.randint(1, 400))
        elif failure == "copy":
            cuda.fail_copy(draw.randint(1, 100))
        else:
            cuda.limit_pinned(draw.choice((1, 1 << 12, 1 << 16)))

    def _on(self, side: torch.Stream | None, step: Callable[[], list[Tensor]]) -> list[Tensor]:
        ours = torch.accelerator.current_stream(self._device)
        if side is None:
            return step()
        cuda.set_delay(side, self._delay)  # it computes, and does so in many small operations
        side.wait_stream(ours)
        with side:
            found = step()
        ours.wait_stream(side)
        return found

    def _step(self, off: Any) -> list[Tensor]:
        """Return the output and every gradient of one forward and backward pass."""
        subject = self._subject
        subject.restore()
        parameters = subject.parameters(off)
        for parameter in parameters:
            parameter.grad = None
        x = subject.x.clone() if subject.host_input else subject.x.to(self._device)
        x.requires_grad_(subject.differentiable)
        y = subject.forward(off, x)
        grad = torch.arange(y.numel(), dtype=y.dtype).reshape(y.shape).sin().to(y.device)
        if self._twice:
            y.backward(grad, retain_graph=True)
        y.backward(grad)
        given = [x.grad] if subject.differentiable else []
        return [y.detach(), *(tensor for tensor in (*given, *(p.grad for p in parameters)) if tensor is not None)]
