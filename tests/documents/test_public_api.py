"""Each public object has a docstring that names its arguments and errors, with an example."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

import atoll
import pytest

from tests.documents.fences import ROOT

LEARNER = ROOT / "learner/atoll"
PUBLIC = {  # module -> its public classes and functions
    "learner.py": ["Learner"],
    "stats.py": ["Stats"],
    "errors.py": ["LearnerError", "FollowerError"],
    "follower/follower.py": ["Follower"],
    "checkpoints/random_state.py": ["RandomState"],
    "data/sources.py": ["Rows", "TokenFile", "Source"],
    "data/units.py": ["Units", "UnitLoader"],
    "doctor.py": ["of_model"],
    "../../proto/atoll_wire/doctor.py": ["Finding", "LearnerToCheck", "check_connection", "print_findings"],
    "integrations/transformers.py": ["AtollCallback"],
    "integrations/lightning.py": ["AtollCallback"],
    "integrations/accelerate.py": ["AcceleratedLearner"],
    "integrations/batch_tokens.py": ["count_tokens"],
}
# The class of these has the example. Users do not call the constructors of MADE_BY_ATOLL.
WITHOUT_EXAMPLE = {"Finding", "state_dict", "load_state_dict", "start", "close", "more", "samples", "sample"}
MADE_BY_ATOLL = {"Units", "UnitLoader"}
SOURCES = {"Rows", "TokenFile"}  # the protocol Source documents their members
PAGE = (ROOT / "docs/reference/python.md").read_text()


@dataclass(frozen=True)
class Public:
    """A public class, function or method."""

    module: str
    name: str
    node: ast.ClassDef | ast.FunctionDef

    @property
    def text(self) -> str:
        return ast.get_docstring(self.node) or ""

    @property
    def arguments(self) -> list[str]:
        """The names of the object's arguments. For a class, these are its constructor's."""
        function = self.node
        if self.name in MADE_BY_ATOLL:
            return []
        if isinstance(function, ast.ClassDef):
            found = [each for each in function.body if isinstance(each, ast.FunctionDef) and each.name == "__init__"]
            if not found:
                return []
            function = found[0]
        given = [*function.args.args, *function.args.kwonlyargs, *filter(None, [function.args.kwarg])]
        return [each.arg for each in given if each.arg != "self"]

    def raises(self) -> bool:
        """Whether the object's own code raises an error."""
        return isinstance(self.node, ast.FunctionDef) and any(
            isinstance(each, ast.Raise) and each.exc is not None for each in ast.walk(self.node)
        )

    def __str__(self) -> str:
        return f"{self.module}:{self.name}"


def public() -> Iterator[Public]:
    """Yields all public objects. A trainer calls a callback's events (`on_...`), and users do not."""
    for module, names in PUBLIC.items():
        nodes = {each.name: each for each in ast.parse((LEARNER / module).read_text()).body if hasattr(each, "name")}
        for name in names:
            yield Public(module, name, nodes[name])
            if isinstance(nodes[name], ast.ClassDef) and name not in SOURCES:
                for each in nodes[name].body:
                    if isinstance(each, ast.FunctionDef) and not each.name.startswith(("_", "on_")):
                        yield Public(module, each.name, each)


def members(page: str) -> dict[str, list[str]]:
    """Returns the members that the reference shows, by the path of the class that lists them."""
    found = re.findall(r"^::: (\S+)\n    options:\n(?:      .*\n)*?      members: \[(.*)\]", page, re.MULTILINE)
    return {path: listed.split(", ") for path, listed in found}


ALL = list(public())


@pytest.mark.parametrize("thing", ALL, ids=str)
def test_a_docstring_names_all_arguments_and_errors_and_has_an_example(thing: Public):
    assert thing.text, "the docstring is missing"
    listed = thing.text.partition("Args:\n")[2].partition("\n\n")[0]
    missing = [name for name in thing.arguments if f"    {name}: " not in listed]
    assert not missing, f"the section Args lacks {missing}"
    assert not thing.raises() or "Raises:\n" in thing.text
    is_property = any(getattr(each, "id", "") == "property" for each in thing.node.decorator_list)
    assert is_property or thing.name in WITHOUT_EXAMPLE | MADE_BY_ATOLL or "Example:\n" in thing.text
    example = thing.text.partition("Example:\n")[2].replace("```python", "").replace("```", "")
    ast.parse("\n".join(line[4:] for line in example.splitlines()))


def test_every_field_of_the_stats_is_explained():
    (stats,) = (each for each in ALL if each.name == "Stats")
    fields = [each.target.id for each in stats.node.body if isinstance(each, ast.AnnAssign)]
    assert [name for name in fields if f"    {name}: " not in stats.text] == []
    assert len(fields) > 20


def test_the_package_and_the_reference_have_all_public_names():
    modules = ("learner.py", "stats.py", "errors.py", "checkpoints/random_state.py", "follower/follower.py")
    names = {name for module in modules for name in PUBLIC[module]}
    assert set(atoll.__all__) == names | {"__version__", "data"}
    assert set(atoll.data.__all__) == {*PUBLIC["data/sources.py"], *PUBLIC["data/units.py"]}
    assert all(getattr(atoll, name) is not None for name in atoll.__all__)
    for module, found in PUBLIC.items():
        place = module.removesuffix(".py").replace("/", ".")
        place = f"atoll.{place}".rpartition("proto.")[2]  # the doctor's checks are in atoll_wire
        assert not [name for name in found if f"::: {place}.{name}" not in PAGE and name != "Finding"], place


def test_the_reference_shows_every_public_member_of_the_classes_that_users_call():
    shown = members(PAGE)
    for module, names in PUBLIC.items():
        nodes = {each.name: each for each in ast.parse((LEARNER / module).read_text()).body if hasattr(each, "name")}
        for name in names:
            path = f"atoll.{module.removesuffix('.py').replace('/', '.')}.{name}".rpartition("proto.")[2]
            if path in shown:
                public = {each.name for each in nodes[name].body if isinstance(each, ast.FunctionDef)}
                assert {each for each in public if not each.startswith(("_", "on_"))} <= set(shown[path]), path
