"""The state of the process's random generators, as an object to register with a learner's checkpoints."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import structlog
import torch
import torch.distributed as dist

log = structlog.get_logger()


class RandomState:
    """The random generators of Python, NumPy and torch, which a learner's checkpoints can store.

    After a restart with a different number of ranks, loading does not change the generators. With a different number
    of GPUs, loading does not change the GPUs' generators.

    Example:
        ```python
        extra_state = {"random": atoll.RandomState()}
        atoll.Learner(model, optimizer, server, name, checkpoint_dir="checkpoints", extra_state=extra_state)
        ```
    """

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of all generators, including those of the GPUs that this process uses.

        Returns:
            Tensors and plain values, which `torch.load` accepts with `weights_only=True`.
        """
        numpy = dict(np.random.get_state(legacy=False))
        inner = {
            name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in numpy["state"].items()
        }
        devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
        return {
            "ranks": _ranks(),
            "python": random.getstate(),
            "numpy": {**numpy, "state": inner},
            "torch": torch.get_rng_state(),
            "cuda": devices,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Sets all generators, unless the number of ranks has changed: all ranks would then get the same state.

        Args:
            state: The result of `state_dict`.
        """
        if state["ranks"] != _ranks():
            log.warning(
                "the random generators are not restored: the number of ranks has changed",
                saved_ranks=state["ranks"],
                ranks=_ranks(),
            )
            return
        random.setstate(state["python"])
        np.random.set_state(state["numpy"])
        torch.set_rng_state(state["torch"])
        if len(state["cuda"]) == torch.cuda.device_count():
            torch.cuda.set_rng_state_all(state["cuda"])
        elif state["cuda"]:
            log.warning(
                "the GPUs' random generators are not restored: the number of GPUs has changed",
                saved_gpus=len(state["cuda"]),
                gpus=torch.cuda.device_count(),
            )


def _ranks() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
