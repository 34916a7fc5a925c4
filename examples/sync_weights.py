"""The weight sync's plan in a trainer of your own: two ranks hold rows and need columns; what a rank has stays there."""

import tempfile

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

import mrl


def train(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    rows, columns = torch.zeros(4, 8), torch.zeros(8, 4, dtype=torch.bfloat16)
    sync = mrl.TensorSync({"weight": (rows, (4 * rank, 0))}, {"weight": (columns, (0, 4 * rank))})
    for step in range(3):
        rows.copy_(torch.arange(32).view(4, 8) + 32 * rank + step)  # an update
        sync.run()
    moved = sync.plan.summary()
    print(f"rank {rank}: first row {columns[0].tolist()}, {moved['bytes_intra_node']} bytes crossed in all")
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        spawn(train, (folder,), nprocs=2)
