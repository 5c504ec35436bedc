"""Transfers of a stream are read ahead and ordered by the edges S1 to S6, none of which can be left out."""

import threading
import time
from contextlib import closing

import pytest
import torch

import fusedrnn
from fusedrnn.offloading.device import ThreadDevice
from fusedrnn.offloading.simulated import SimulatedDevice
from fusedrnn.streaming import transfer

N = 8


class Without:
    """A device that leaves out one of the waits, counted by the stream that would wait."""

    def __init__(self, device, edge):
        self._device, self._edge = device, edge

    def __getattr__(self, name):
        return getattr(self._device, name)

    def wait(self, stream, event):
        side = stream is not self._device.current_stream()
        if self._edge != ("side" if side else "compute"):
            self._device.wait(stream, event)


@pytest.fixture
def simulated(monkeypatch):
    monkeypatch.setattr(transfer, "_flat", lambda buffer: getattr(buffer, "allocation", buffer))
    monkeypatch.setattr(transfer, "_shaped", lambda buffer, like: buffer[:256])
    return SimulatedDevice(seed=0)


def arrive(device, copier, stop_after=None):
    """Compute on pieces that arrive, and let go of each."""
    pieces = (device.allocate_host(256) for _ in range(N))
    with closing(transfer.to_device(pieces, copier)) as arrived:
        for count, piece in enumerate(arrived):
            device._run(device.current, "compute", 0.0, [(piece.allocation.memory, 0, 256)], (), lambda: None)
            del piece
            if count == stop_after:
                break
    for _ in range(4):
        # Whoever gets the memory next writes it.
        device.write(device.allocate(256)[:256], None)
    device.drain()


@pytest.mark.parametrize("stop_after", [None, 2])
def test_arrivals_are_ordered(simulated, stop_after):
    arrive(simulated, simulated, stop_after)
    # torch's allocator of pinned memory hands nothing out again before the copies of it are over.
    assert [race for race in simulated.races if "host" not in race] == []


@pytest.mark.parametrize("edge", ["side", "compute"], ids=["S1", "S2 and S3"])
def test_arrivals_need_their_edges(simulated, edge):
    arrive(simulated, Without(simulated, edge))
    assert [race for race in simulated.races if "host" not in race]


def test_what_nobody_asks_for_is_freed_after_its_copy(simulated):
    """S3: the wait when the loop is left early."""

    class Left(Without):
        leaving = False

        def wait(self, stream, event):
            if not self.leaving:
                self._device.wait(stream, event)

    copier = Left(simulated, None)
    arrived = transfer.to_device((simulated.allocate_host(256) for _ in range(N)), copier)
    next(arrived)
    copier.leaving = True
    arrived.close()
    del arrived
    simulated.write(simulated.allocate(256)[:256], None)
    assert [race for race in simulated.races if "host" not in race]


class Rows:
    """Rows in an allocation of the simulated device, as much of a tensor as is asked for."""

    device, nbytes = "device", 256

    def __init__(self, allocation):
        self.allocation = allocation

    def contiguous(self):
        return self


class Target:
    """Rows on the host."""

    device = torch.device("cpu")

    def copy_(self, rows):
        pass


def depart(device, copier, monkeypatch):
    """Compute rows, send each to the host, and let go of it."""
    monkeypatch.setattr(transfer, "device_of", lambda _: copier)
    with closing(transfer.Departures(torch.device("cpu"))) as departures:
        for _ in range(N):
            rows = Rows(device.allocate(256))
            device.write(rows.allocation[:256], None)
            departures.put(Target(), rows)
            del rows
    for _ in range(4):
        device.write(device.allocate(256)[:256], None)
    device.drain()


def test_departures_are_ordered(simulated, monkeypatch):
    # What runs on another thread is the host's part, of which the simulated device knows nothing.
    monkeypatch.setattr(simulated, "synchronize", lambda event: None)
    depart(simulated, simulated, monkeypatch)
    assert [race for race in simulated.races if "host" not in race] == []


@pytest.mark.parametrize("edge", ["side", "compute"], ids=["S4", "S5"])
def test_departures_need_their_edges(simulated, monkeypatch, edge):
    monkeypatch.setattr(simulated, "synchronize", lambda event: None)
    depart(simulated, Without(simulated, edge), monkeypatch)
    assert [race for race in simulated.races if "host" not in race]


class Elsewhere(torch.Tensor):
    """A tensor that says it is on the device."""

    device, is_cpu = torch.device("meta"), False

    def to(self, device):
        return self

    def record_stream(self, stream):
        self.streams = [*getattr(self, "streams", ()), stream]


class Asleep(ThreadDevice):
    """A device of threads whose copies come late, and whose host perhaps does not wait for them."""

    def __init__(self, waits=True):
        super().__init__(delay=lambda: 0.01)
        self._waits = waits

    def allocate_host(self, nbytes):
        return super().allocate_host(nbytes).fill_(255)

    def synchronize(self, event):
        if self._waits:
            super().synchronize(event)


@pytest.mark.parametrize("waits", [True, False], ids=["", "without S6"])
def test_the_host_reads_after_the_copy(monkeypatch, waits):
    monkeypatch.setattr(transfer, "device_of", lambda _: Asleep(waits))
    rows = torch.arange(12.0).view(4, 3)
    target = torch.zeros(4, 3)
    with closing(transfer.Departures(torch.device("cpu"))) as departures:
        departures.put(target, rows.as_subclass(Elsewhere))
    assert torch.equal(target, rows) == waits


def test_what_was_made_in_inference_mode_is_written(monkeypatch):
    monkeypatch.setattr(transfer, "device_of", lambda _: Asleep())
    with torch.inference_mode():
        rows, target = torch.arange(12.0).view(4, 3), torch.zeros(4, 3)
        with closing(transfer.Departures(torch.device("cpu"))) as departures:
            departures.put(target, rows.as_subclass(Elsewhere))
        assert torch.equal(target, rows)


class Switching(ThreadDevice):
    """A device whose user goes over to another stream with each piece."""

    def __init__(self):
        super().__init__()
        self.now, self.waits = 0, []

    def current_stream(self):
        return self.now

    def record(self, stream, timed=False):
        return stream if isinstance(stream, int) else super().record(stream)

    def wait(self, stream, event):
        self.waits.append((stream, event))

    def allocate_host(self, nbytes):
        raise AssertionError("a copy on the host")


def test_what_is_on_the_device_is_taken_as_it_is_in_the_order_of_streams():
    copier, given = Switching(), [torch.ones(2).as_subclass(Elsewhere) for _ in range(3)]
    found = []
    with closing(transfer.ahead((lambda p=p: p for p in given), torch.device("meta"), copier)) as pieces:
        for piece in transfer.to_device(pieces, copier):
            found.append(piece)
            copier.now += 1
    assert all(map(lambda a, b: a is b, found, given)) and len(found) == 3
    # The first was used on the stream on which all were made.
    assert copier.waits == [(1, 0), (2, 0)]
    assert [getattr(piece, "streams", []) for piece in given] == [[], [1], [2]]


def test_the_reader_works_on_the_device_and_streams_of_the_caller(monkeypatch):
    mine = threading.local()

    class Streams:
        """The streams of two devices as a thread sees them."""

        @staticmethod
        def of_thread():
            if not hasattr(mine, "streams"):
                mine.streams, mine.index = ["default", "default"], 0
            return mine

    class Stream:
        def __init__(self, index, name):
            self.device_index, self.name = index, name

        def __eq__(self, other):
            return (self.device_index, self.name) == (other.device_index, other.name)

    def set_stream(stream):
        here = Streams.of_thread()
        here.streams[stream.device_index], here.index = stream.name, stream.device_index

    for name, value in {
        "current_accelerator": lambda: torch.device("cuda"),
        "current_device_index": lambda: Streams.of_thread().index,
        "set_device_index": lambda index: setattr(Streams.of_thread(), "index", index),
        "device_count": lambda: 2,
        "current_stream": lambda index: Stream(index, Streams.of_thread().streams[index]),
        "set_stream": set_stream,
    }.items():
        monkeypatch.setattr(torch.accelerator, name, value)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    set_stream(Stream(1, "one"))
    set_stream(Stream(0, "mine"))
    torch.accelerator.set_device_index(1)
    seen = []

    def reads():
        seen.append((threading.current_thread().name, list(Streams.of_thread().streams), mine.index))
        yield lambda: torch.ones(1)

    assert len(list(transfer.ahead(reads(), torch.device("cpu")))) == 1
    ((thread, streams, index),) = seen
    assert thread.startswith("fusedrnn-input") and streams == ["mine", "one"] and index == 1


def test_an_interrupt_while_a_copy_starts_frees_nothing_before_its_end(simulated):
    """S3: nobody knows yet of the copy."""

    class Interrupted(Without):
        def record(self, stream):
            if stream is not self._device.current_stream() and not self.over:
                self.over = True
                raise KeyboardInterrupt
            return self._device.record(stream)

        over = False

    with pytest.raises(KeyboardInterrupt):
        list(transfer.to_device((simulated.allocate_host(256) for _ in range(N)), Interrupted(simulated, None)))
    simulated.write(simulated.allocate(256)[:256], None)
    assert [race for race in simulated.races if "host" not in race] == []


@pytest.mark.parametrize("pinned", [True, False])
def test_a_layer_on_a_device_with_copies_gives_the_same_bits(monkeypatch, pinned):
    layer = fusedrnn.LSTM(3, 4, chunk=5, save="hidden")
    x = torch.randn(23, 2, 3)
    found = []
    for copier in (None, Asleep()):
        if copier is not None and not pinned:
            monkeypatch.setattr(copier, "allocate_host", lambda nbytes: None)
        monkeypatch.setattr(transfer, "device_of", lambda _, copier=copier: copier)
        layer.zero_grad()
        loss, _ = layer(x.numpy(), chunk_loss=lambda y, at: y.sin().sum())
        loss.backward()
        found.append([loss.detach(), *(p.grad.clone() for p in layer.parameters())])
    assert all(map(torch.equal, *found))


def test_pieces_are_read_ahead_and_no_further():
    calls, used = [], threading.Event()

    def reads():
        for number in range(6):
            yield lambda number=number: calls.append(number) or torch.tensor(number)

    with closing(transfer.ahead(reads(), torch.device("cpu"))) as pieces:
        assert int(next(pieces)) == 0
        for _ in range(200):
            if len(calls) == 3:
                break
            time.sleep(0.01)
        used.wait(0.05)
        assert calls == [0, 1, 2]
    assert calls == [0, 1, 2]
