"""The dataset of a callback refuses, in one line with the fix, what would lose samples."""

from __future__ import annotations

import atoll
import pytest
import torch
from atoll.data import Rows
from atoll.errors import LearnerError
from atoll.integrations.loop_session import LoopSession
from torch.utils.data import DataLoader

from tests.end_to_end.world import core, small_model
from tests.integrations.unit_learner import Numbered
from tests.integrations.world import gpt

ROWS, UNIT = 64, 4


def nothing():
    pass


def leased(session, join=nothing):
    return session.units(Rows(list(range(ROWS)), UNIT), "rows", 0, 1, join)


def test_units_that_are_read_outside_training_are_refused():
    data = leased(LoopSession({}, None, schedule=False))
    with pytest.raises(
        LearnerError, match="outside training: pass the dataset only to a trainer that has the callback"
    ):
        next(iter(data))


def test_a_second_dataset_of_one_callback_is_refused():
    session = LoopSession({}, None, schedule=False)
    leased(session)
    with pytest.raises(LearnerError, match=r"reuse the result of units\(\)"):
        leased(session)


def test_units_in_a_loaders_worker_are_refused():
    data = leased(LoopSession({}, None, schedule=False))
    with pytest.raises(LearnerError, match="dataloader_num_workers=0"):
        next(iter(DataLoader(data, batch_size=UNIT, num_workers=1)))


def test_a_new_pass_before_the_end_of_the_last_pass_is_refused(tmp_path):
    session = LoopSession({}, None, schedule=False)
    data = leased(session)
    model = small_model()
    with (
        core(tmp_path, "--fragments", "2", "--inner-steps", "4") as running,
        atoll.Learner(model, torch.optim.AdamW(model.parameters()), running.address, "a") as learner,
    ):
        data.begin(learner)
        assert next(iter(data)) in range(ROWS)
        with pytest.raises(LearnerError, match="it dropped samples: do not limit the batches of an epoch"):
            next(iter(data))


@pytest.mark.frameworks
def test_units_with_the_trainers_accumulation_are_refused(tmp_path):
    from atoll.integrations.transformers import AtollCallback
    from transformers import Trainer, TrainingArguments

    callback = AtollCallback(server="127.0.0.1:1", name="a")
    data = callback.units(Rows(Numbered(), UNIT), "rows")
    args = TrainingArguments(
        output_dir=str(tmp_path), max_steps=4, gradient_accumulation_steps=2, use_cpu=True, report_to=[]
    )
    with pytest.raises(LearnerError, match="use gradient_accumulation_steps=1"):
        Trainer(model=gpt(), args=args, train_dataset=data, callbacks=[callback]).train()
