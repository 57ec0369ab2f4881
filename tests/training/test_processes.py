"""Two gloo processes equal one, in float64: the views are keyed by image, gradients are averaged."""

from dataclasses import replace
from pathlib import Path

import pytest
import tiny
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from byov.config import Config, Posterior
from byov.training.step import Processes, training_step


def settings(method: str, shared_noise: bool = False) -> Config:
    model = replace(tiny.MODEL, head_norm="layer")  # batch statistics are a process's own
    return tiny.config(method, model=model, precision="64-true", posterior=Posterior(shared_noise=shared_noise))


def train(folder: Path, config: Config, processes: Processes) -> dict[str, torch.Tensor]:
    trainer = tiny.trainer(folder, config, processes=processes)
    for k in range(3):
        training_step(trainer.learner, trainer.optimizer, trainer.batches(k), trainer.config, k + 1, 6, processes)
    return {k: v.clone() for k, v in trainer.tensors().items()}


def worker(rank: int, folder: str, method: str, shared_noise: bool) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    torch.save(train(Path(folder), settings(method, shared_noise), Processes(rank, 2)), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.parametrize(("method", "shared_noise"), [("byol", False), ("byov", True)])
def test_two_processes_equal_one(tmp_path: Path, method: str, shared_noise: bool) -> None:
    mp.spawn(worker, (str(tmp_path), method, shared_noise), nprocs=2)
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    one = train(tmp_path, settings(method, shared_noise), Processes())
    for name, value in one.items():
        torch.testing.assert_close(first[name], value, rtol=1e-6, atol=1e-9)
        assert torch.equal(first[name], second[name])
