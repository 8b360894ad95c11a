"""Devices for tests of coding on a device: CPU tensors, and the machine's first GPU if there is one."""

from __future__ import annotations

import torch

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
DEVICES = [CPU, *([GPU] if torch.cuda.is_available() else [])]
