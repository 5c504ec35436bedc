"""Several processes: the gradients of a divided batch are those of the whole one, whoever divides it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fusedrnn
from fusedrnn.testing import assert_close, full_device

RANKS = 2


class Net(nn.Module):
    """A layer of ours between two of torch's, and one that a forward pass may leave out."""

    def __init__(self, **options):
        super().__init__()
        torch.manual_seed(3)
        self.into = nn.Linear(4, 6)
        self.rnn = fusedrnn.LSTM(6, 8, num_layers=2, chunk=4, **options)
        self.gru = fusedrnn.GRU(8, 5, chunk=4)
        self.spare = fusedrnn.LSTM(8, 8)
        self.head = nn.Linear(5, 1)

    def forward(self, x, spare=False):
        y = self.rnn(self.into(x))[0]
        if spare:
            y = self.spare(y)[0]
        return self.head(self.gru(y)[0]).square().mean()


def data(step):
    return torch.randn(10, 2 * RANKS, 4, generator=torch.Generator().manual_seed(step))


def gradients(net):
    return {name: None if w.grad is None else w.grad.clone() for name, w in net.named_parameters()}


def alone(steps=(0,), spare=False):
    net = Net()
    for step in steps:
        net(data(step), spare).backward()
    return gradients(net)


def start(rank, folder):
    torch.set_num_threads(1)
    os.environ["LOCAL_WORLD_SIZE"] = str(RANKS)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)


def mine(step, rank):
    return data(step)[:, 2 * rank : 2 * rank + 2]


def _plain(rank):
    net = DistributedDataParallel(Net(), find_unused_parameters=True)
    net(mine(0, rank)).backward()
    return gradients(net.module)


def _static_graph(rank):
    net = DistributedDataParallel(Net(), static_graph=True)
    for step in (0, 1):
        net.zero_grad()
        net(mine(step, rank), True).backward()
    return gradients(net.module)


def _no_sync(rank):
    net = DistributedDataParallel(Net(), find_unused_parameters=True)
    with net.no_sync():
        net(mine(0, rank)).backward()
    net(mine(1, rank)).backward()
    return gradients(net.module)


def _offloading(rank):
    found = []
    for offload in (False, fusedrnn.offload(full_device())):
        options = {"save": "gates", "backend": "torch_step", "offload": offload}
        net = DistributedDataParallel(Net(**options), find_unused_parameters=True)
        net(mine(0, rank)).backward()
        found.append(gradients(net.module))
    assert offload.stats().spills > 0
    for name, expected in found[0].items():
        assert expected is None or torch.equal(found[1][name], expected), name
    return found[1]


def _fully_sharded(rank):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (RANKS,))
    net = Net()
    fully_shard(net.rnn, mesh=mesh)
    fully_shard(net, mesh=mesh)
    net(mine(0, rank)).backward()
    return {name: None if w.grad is None else w.grad.full_tensor() for name, w in net.named_parameters()}


def work(rank, folder, task):
    start(rank, folder)
    found = globals()[task](rank)
    torch.save(found, Path(folder) / f"{rank}.pt")
    dist.barrier()
    # Now and then gloo's own threads abort a process that ends in the usual way.
    os._exit(0)


def in_two_processes(task, folder):
    """Run a function of this module on every rank; return what each returned."""
    here = Path(__file__)
    code = f"import sys; sys.path.insert(0, {str(here.parent)!r}); import {here.stem} as m; "
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code + f"m.work({rank}, {str(folder)!r}, {task!r})"],
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(RANKS)
    ]
    try:
        errors = [process.communicate(timeout=90)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert not any(process.returncode for process in processes), "\n".join(errors)[-3000:]
    return [torch.load(folder / f"{rank}.pt") for rank in range(RANKS)]


@pytest.mark.parametrize(
    ("task", "steps", "spare"),
    [
        ("_plain", (0,), False),
        ("_static_graph", (1,), True),
        ("_no_sync", (0, 1), False),
        ("_offloading", (0,), False),
        ("_fully_sharded", (0,), False),
    ],
)
def test_gradients_are_those_of_the_whole_batch(task, steps, spare, tmp_path):
    expected = alone(steps, spare)
    for found in in_two_processes(task, tmp_path):
        for name, gradient in expected.items():
            if gradient is None:
                assert found[name] is None or not found[name].any(), name
            else:
                assert_close(found[name], gradient.double(), name)


def losses(file):
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    return next(row for row in rows if row["metric"] == "bits_per_character")


@pytest.mark.parametrize("batch", [4, 3])
def test_training_under_torchrun_is_that_of_one_process_with_the_whole_batch(batch, tmp_path):
    options = ["--quiet", "--length", "60", "--steps", "3", "--batch", str(batch), "--hidden", "8"]
    found = []
    for name, launcher in (
        ("one", ["-m"]),
        ("two", ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]),
    ):
        file = tmp_path / f"{name}.json"
        done = subprocess.run(
            [sys.executable, *launcher, "fusedrnn.bench", "train", "--json", str(file), *options],
            capture_output=True,
            text=True,
            timeout=120,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        assert done.returncode == 0, done.stderr[-3000:]
        found.append(losses(file))
    for key in ("p20", "p50", "p80"):
        assert found[1][key] == pytest.approx(found[0][key], rel=1e-5)


def test_a_batch_that_leaves_a_process_without_work_is_refused(monkeypatch):
    from fusedrnn.bench import train

    monkeypatch.setattr(train, "_distributed", lambda model: (0, 2, model))
    config = train.Config(train.OURS, length=20, steps=1, batch=1, hidden=4, layers=1, lr=1e-2, seed=0, device="cpu")
    with pytest.raises(SystemExit, match="--batch must be at least the number of processes, 2, got 1"):
        train.train(config)
