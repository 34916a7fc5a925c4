"""The operation fuser's names: Megatron subclasses them on import and uses none here."""

import torch


class Sequential(torch.nn.Sequential): ...


class FusibleOperation(torch.nn.Module): ...
