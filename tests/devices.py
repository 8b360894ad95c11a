"""The devices that tests of coding on a device use: CPU tensors, and this machine's first GPU if it has one."""

from __future__ import annotations

import torch

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
DEVICES = [CPU, *([GPU] if torch.cuda.is_available() else [])]
