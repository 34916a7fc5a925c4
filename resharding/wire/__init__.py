"""How bytes and control messages get from one process to another: shared memory, CUDA IPC, torch.distributed,
ZMQ. Knows no model."""
