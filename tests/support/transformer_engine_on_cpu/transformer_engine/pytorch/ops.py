"""The operation fuser's names; Megatron derives classes from them when it is imported and uses none here."""

import torch


class Sequential(torch.nn.Sequential): ...


class FusibleOperation(torch.nn.Module): ...
