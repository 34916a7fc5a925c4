"""How bytes and control messages get from one process to another: shared memory, CUDA IPC, torch.distributed,
ZMQ. Knows no model.

A sender has a link and its receiver an inbox, in two kinds of one face. `slot_link`: both share a slot's
memory (shared memory on CPU, CUDA IPC on GPUs). `mesh_link`: they share none, and bytes travel as
torch.distributed messages (`mesh`: gloo on CPU, NCCL on GPUs) or are written by NIXL (`nixl_mesh`). Sessions,
digests and commits are the same over both; control messages go through `channel`.
"""
