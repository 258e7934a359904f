"""Trains CharGpt data-parallel; each step draws its data from the step's own number, so resuming changes nothing."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from model import CharGpt, Shape
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from stoker import training

DEFAULTS = {
    "max_steps": 240, "max_seconds": None, "batch_size": 12, "block_size": 64, "layers": 3, "heads": 4, "width": 96,
    "learning_rate": 1e-3, "checkpoint_seconds": 3, "seed": 1,
}  # fmt: skip


def batch(text: Tensor, step: int, rank: int, size: int, block: int, seed: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets of one rank at one step, always the same ones."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step * 1_009 + rank)
    starts = torch.randint(len(text) - block - 1, (size,), generator=generator)
    rows = torch.stack([text[s : s + block + 1] for s in starts])
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def main() -> None:
    options = DEFAULTS | training.parameters()
    cuda = torch.cuda.is_available()
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local if torch.cuda.device_count() > 1 else 0) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo", timeout=timedelta(seconds=60))

    raw = Path(__file__).with_name("input.txt").read_text()
    letters = sorted(set(raw))
    index = {letter: i for i, letter in enumerate(letters)}
    text = torch.tensor([index[letter] for letter in raw])
    shape = Shape(len(letters), options["block_size"], options["layers"], options["heads"], options["width"])
    torch.manual_seed(options["seed"])
    model = DistributedDataParallel(CharGpt(shape).to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=options["learning_rate"])

    start = 0
    found = training.resume()
    if found is not None:
        start, folder = found
        state = torch.load(folder / "state.pt", map_location=device)
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    print(f"rank {rank} of {world} starts at step {start} on {device}", flush=True)

    began_at = saved_at = time.monotonic()
    for step in range(start, options["max_steps"]):
        began = time.perf_counter()
        inputs, targets = batch(text, step, rank, options["batch_size"], options["block_size"], options["seed"])
        loss = model(inputs.to(device), targets.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        # Rank 0 decides for all, so that every rank saves and stops at the same step.
        now, asked = time.monotonic(), training.should_stop()
        over = now - began_at > (options["max_seconds"] or float("inf"))
        last = step + 1 == options["max_steps"] or over or asked
        due = torch.tensor([now - saved_at > options["checkpoint_seconds"] or last, last], device=device).int()
        dist.broadcast(due, 0)
        saving, stopping = due.tolist()
        if rank == 0:
            seconds = time.perf_counter() - began
            tokens = options["batch_size"] * options["block_size"] * world
            rate = optimizer.param_groups[0]["lr"]
            training.log(step, loss=mean.item() / world, tokens_per_second=tokens / seconds, lr=rate)
        if saving:
            saved_at = time.monotonic()
            if rank == 0:
                save(step + 1, model, optimizer)
            dist.barrier()
        if stopping:
            break
    print(f"rank {rank} is done", flush=True)
    dist.destroy_process_group()
    # DDP keeps the group's threads alive, and now and then they abort an interpreter that takes its time to end.
    os._exit(0)


def save(done: int, model: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> None:
    def write(folder: Path) -> None:
        state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state, folder / "state.pt")

    training.save(done, write)
    print(f"saved a checkpoint after {done} steps", flush=True)


main()
