"""Train a layer of torch in two processes: torchrun --nproc-per-node 2 torch_ddp.py"""

import sys

import numpy as np
import torch
import torch.distributed as dist
from problem import network, samples
from torch.nn.parallel import DistributedDataParallel

from refgrad.torch import Module

dist.init_process_group("gloo")
rank, count = dist.get_rank(), dist.get_world_size()
layer = DistributedDataParallel(Module(network(), options={"threads": 1}))
optimizer = torch.optim.SGD(layer.parameters(), 0.1)
x, label = map(torch.from_numpy, samples().values())
for first in range(0, 224, 32):
    part = slice(
        first + 32 * rank // count, first + 32 * (rank + 1) // count
    )  # parts of the same size: they are averaged
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(layer(x[part]), label[part]).backward()
    optimizer.step()
if rank == 0:
    np.savez(sys.argv[1], **{name: weight.detach().numpy() for name, weight in layer.module.named_parameters()})
dist.destroy_process_group()
