"""Moves bytes and control messages between processes (shared memory, CUDA IPC, torch.distributed, ZMQ).

A sender has a link, its receiver an inbox; there are two kinds. `slot_link`: both share a slot's memory
(shared memory on CPU, CUDA IPC on GPUs). `mesh_link`: they share none; bytes travel as torch.distributed
messages (`mesh`: gloo on CPU, NCCL on GPUs) or NIXL writes them (`nixl_mesh`). Sessions, digests, commits and
control messages (`channel`) are the same over both. Knows no model.
"""
