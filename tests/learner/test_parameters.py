"""A user's model becomes tensors: tied ones once, frozen ones never, and without wrappers' prefixes."""

from __future__ import annotations

import json

import pytest
import torch
from atoll.errors import LearnerError
from atoll.model.parameters import Parameters
from atoll_wire.layout.layout import MergeKind
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from tests.learner.odd import Odd, parameters


def test_trainable_tensors_are_listed_once_in_the_models_order_with_tied_names():
    found = {t.name: t for t in parameters(Odd()).tensors}
    assert list(found) == ["turned", "table.weight", "middle.weight", "middle.bias", "plain.weight", "plain.bias"]
    assert found["table.weight"].tied_names == ("head.weight",)
    assert found["table.weight"].kind is MergeKind.AVERAGE
    assert found["middle.weight"].dtype == "bfloat16"
    assert found["middle.weight"].kind is MergeKind.DIRECTION


def test_an_untied_output_head_is_merged_like_its_embedding():
    model = nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 8), nn.Linear(8, 50))
    assert [t.kind.value for t in parameters(model).tensors] == [
        "average",
        "direction",
        "direction",
        "average",
        "direction",
    ]


def test_names_contain_no_prefixes_of_wrappers():
    plain = nn.Sequential(nn.Linear(3, 3))
    wrapped = nn.Module()
    wrapped.add_module("module", nn.Module())
    wrapped.module.add_module("_orig_mod", plain)
    assert [t.name for t in parameters(wrapped).tensors] == [t.name for t in parameters(plain).tensors]


def test_the_frozen_digest_depends_only_on_frozen_values():
    torch.manual_seed(0)
    model = Odd()
    before = parameters(model).frozen_digest()
    with torch.no_grad():
        model.table.weight += 1
    assert parameters(model).frozen_digest() == before
    with torch.no_grad():
        model.frozen.weight += 1
    assert parameters(model).frozen_digest() != before


@pytest.mark.parametrize("frozen", [True, False])
def test_initial_parameters_hold_tied_tensors_once_and_frozen_ones_on_request(tmp_path, frozen):
    model = Odd()
    parameters(model).save(tmp_path / "first.safetensors", frozen=frozen)
    stored = load_file(tmp_path / "first.safetensors")
    lacking = [] if frozen else ["frozen.bias", "frozen.weight"]
    assert set(stored) == set(model.state_dict()) - {"head.weight", *lacking}
    with safe_open(tmp_path / "first.safetensors", "pt") as file:
        lists = {key: json.loads(file.metadata()[f"atoll.{key}"]) for key in ("initial", "buffers", "frozen")}
    assert lists == {"initial": [], "buffers": ["seen"], "frozen": lacking}
    for name, tensor in stored.items():
        assert torch.equal(tensor, model.state_dict()[name])


def test_buffers_that_changed_are_named_when_the_learner_leaves(said):
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model.register_buffer("constant", torch.ones(3))
    model.register_buffer("passing", torch.ones(3), persistent=False)
    model.register_buffer("counted", torch.zeros(3))
    model.register_buffer("codes", torch.zeros(3))
    found = parameters(model)
    found.warn_of_buffers("a")
    assert not said
    model(torch.ones(2, 4))
    model.counted += 1
    model.codes = torch.ones(3)
    model.passing += 1
    found.warn_of_buffers("a")
    (line,) = said
    assert line["event"].startswith("buffers changed during training, but learners do not share them")
    assert (line["buffers"], line["first"]) == (2, "counted"), "the start already named BatchNorm's buffers"


def test_an_optimizer_of_another_model_is_refused():
    with pytest.raises(LearnerError, match="the model does not have"):
        Parameters(nn.Linear(2, 2), torch.optim.SGD(nn.Linear(2, 2).parameters(), 0.1))


@pytest.mark.parametrize(
    ("given", "kind"), [(lambda model: model.parameters(), "Parameter"), (lambda model: model, "Linear")]
)
def test_a_value_that_is_no_optimizer_is_refused(given, kind):
    model = nn.Linear(2, 2)
    with pytest.raises(LearnerError, match=rf"got a {kind}: pass the optimizer, such as torch\.optim\.AdamW"):
        Parameters(model, given(model))


def test_two_parameters_in_one_memory_are_refused_in_one_line():
    model = Odd()
    model.head.weight = nn.Parameter(model.table.weight.detach())
    with pytest.raises(LearnerError, match=r'"table.weight" and "head.weight" are two parameters that share memory'):
        parameters(model)


class Teaching(nn.Module):
    """A student, a head with another optimizer, and a teacher that follows the student."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.student, self.head, self.teacher = nn.Linear(4, 4), nn.Linear(4, 2), nn.Linear(4, 4).requires_grad_(False)


def sgd(*modules: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for module in modules for p in module.parameters()], 0.1)


def test_a_trainable_parameter_without_an_optimizer_is_an_error_with_remedies():
    model = Teaching()
    with pytest.raises(LearnerError, match=r'updates "head.weight" and 1 more: .*list.*requires_grad_.*unshared='):
        Parameters(model, sgd(model.student))


def test_all_optimizers_together_train_the_model():
    model = Teaching()
    shared = Parameters(model, [sgd(model.student), sgd(model.head)])
    assert [t.name for t in shared.tensors] == ["student.weight", "student.bias", "head.weight", "head.bias"]


def test_unshared_parameters_are_neither_trained_nor_compared_by_the_run():
    model = Teaching()
    shared = Parameters(model, sgd(model.student), ["head.*", "teacher.*"])
    assert [t.name for t in shared.tensors] == ["student.weight", "student.bias"]
    before = shared.frozen_digest()
    with torch.no_grad():
        model.teacher.weight.lerp_(model.student.weight, 0.5)
    assert Parameters(model, sgd(model.student), ["head.*", "teacher.*"]).frozen_digest() == before


def test_a_pattern_without_a_matching_parameter_is_an_error():
    model = Teaching()
    with pytest.raises(LearnerError, match=r'unshared="techer.\*" matches no parameter'):
        Parameters(model, sgd(model.student, model.head), ["techer.*"])


def test_a_group_that_is_added_later_is_an_error_that_names_it():
    model = Teaching()
    optimizer = sgd(model.student, model.head)
    shared = Parameters(model, optimizer)
    shared.check_unchanged()
    model.teacher.requires_grad_(True)
    optimizer.add_param_group({"params": list(model.teacher.parameters())})
    with pytest.raises(LearnerError, match=r'"teacher.weight" and 1 more became trainable after .*unshared='):
        shared.check_unchanged()


def test_a_later_unfrozen_parameter_is_an_error_that_names_it():
    model = Teaching()
    shared = Parameters(model, sgd(model))
    shared.check_unchanged()
    model.teacher.weight.requires_grad_(True)
    with pytest.raises(LearnerError, match=r'"teacher.weight" became trainable after'):
        shared.check_unchanged()


def test_a_layer_may_be_frozen_temporarily_and_unshared_parameters_may_be_added():
    model = Teaching()
    optimizer = sgd(model.student, model.head)
    shared = Parameters(model, optimizer, ["teacher.*"])
    model.head.requires_grad_(False)
    optimizer.add_param_group({"params": list(model.teacher.requires_grad_(True).parameters())})
    shared.check_unchanged()
