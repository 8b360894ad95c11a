"""Rules of style that a machine can check."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CODE = [
    path
    for folder in ("proto", "server", "learner", "forecast", "dashboard", "benchmarks")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if "_pb2" not in path.name
]
LONGEST_FILE, LONGEST_EXCEPTION, LONGEST_FUNCTION = 400, 550, 60
LONG_FILES = {  # path -> why the file has one purpose despite its length
    "learner/atoll/learner.py": "the public class, whose docstrings explain every argument to users",
}
MAY_PRINT = {"doctor.py", "commands.py", "cli.py", "__main__.py"}  # and all modules in cli/
FORBIDDEN_NAMES = re.compile(r"(^|_)(utils?|helpers?|common|manager|handler|processor|misc)(_|$)")


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("path", CODE, ids=relative)
def test_a_file_is_short_has_a_docstring_and_swallows_no_errors(path):
    text = path.read_text()
    tree = ast.parse(text)
    assert ast.get_docstring(tree), "add a module docstring"
    longest = LONGEST_EXCEPTION if relative(path) in LONG_FILES else LONGEST_FILE
    assert text.count("\n") <= longest, f"the file has more than {longest} lines: split it by purpose"
    for part in (*path.relative_to(ROOT).parent.parts, path.stem):
        assert not FORBIDDEN_NAMES.search(part), f"{part}: choose a name that states the purpose"
    assert not re.search(r"\b(TODO|FIXME|XXX)\b", text)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno - node.lineno < LONGEST_FUNCTION, f"{node.name} is too long: split it"
        if isinstance(node, ast.ExceptHandler):
            assert node.type is not None, "name the exception after `except`"
            assert not (_broad(node.type) and all(map(_does_nothing, node.body))), "do not swallow all exceptions"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
            on_the_line = path.name in MAY_PRINT or path.parent.name == "cli" or _is_a_command(tree)
            assert on_the_line, "only the command line may print"
        if isinstance(node, ast.Call) and _last_name(node.func) == "suppress":
            assert not any(map(_broad, node.args)), "do not swallow all exceptions"


def _is_a_command(tree: ast.Module) -> bool:
    """Returns whether the module ends with `if __name__ == "__main__"`, so that `python -m` runs it."""
    last = tree.body[-1]
    return isinstance(last, ast.If) and ast.unparse(last.test) == "__name__ == '__main__'"


def _broad(caught: ast.expr) -> bool:
    if isinstance(caught, ast.Tuple):
        return any(map(_broad, caught.elts))
    return _last_name(caught) in {"Exception", "BaseException"}


def _last_name(node: ast.expr) -> str | None:
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", None)


def _does_nothing(statement: ast.stmt) -> bool:
    constant = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)  # `...`, or a string
    return constant or isinstance(statement, ast.Pass | ast.Continue)


PRODUCT = [path for path in CODE if relative(path).split("/")[0] != "benchmarks"]
PRODUCT += sorted((ROOT / "dashboard").rglob("*.py"))
STREAMING = {
    "Initialise",
    "Follow",
    "Push",
    "Fetch",
    "Watch",
    "Read",
    "Report",
    "Probe",
    "ExportCheckpoint",
    "stream_stream",
}


@pytest.mark.parametrize("path", PRODUCT, ids=relative)
def test_a_streaming_call_is_opened_in_a_block_that_ends_it(path):
    """A call that is never cancelled stays open on both sides, and a connection allows only 64."""
    if relative(path) == "proto/atoll_wire/messages/frame_messages.py":
        return  # this module creates the stub
    tree = ast.parse(path.read_text())
    blocks = [item.context_expr for node in ast.walk(tree) if isinstance(node, ast.With) for item in node.items]
    fine = set[ast.AST]()
    for block in blocks:
        if isinstance(block, ast.Call) and _last_name(block.func) == "open_stream" and len(block.args) == 2:
            fine.update(ast.walk(block.args[1]))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in STREAMING and node not in fine:
            raise AssertionError(
                f"line {node.lineno}: `with open_stream(..., {node.attr}(...)) as call`, see connections/calls.py"
            )


READS_TIME = {"monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns", "time", "time_ns"}
# Programs that no simulation runs.
BESIDE_A_LEARNER = tuple(f"learner/atoll/{name}" for name in ("reference/", "demo/", "chaos/"))
TIMED = [
    path
    for path in PRODUCT
    if relative(path).startswith(("proto/", "server/", "learner/")) and not relative(path).startswith(BESIDE_A_LEARNER)
]


def test_only_one_module_reads_the_machines_clock():
    """Other code receives an `atoll_wire.process.clock.Clock`, so that the simulation can replace the clock."""
    readers = [path for path in TIMED if any(map(_reads_the_clock, ast.walk(ast.parse(path.read_text()))))]
    assert list(map(relative, readers)) == ["proto/atoll_wire/process/clock.py"]


def _reads_the_clock(node: ast.AST) -> bool:
    if isinstance(node, ast.ImportFrom):
        return node.module == "time" and bool(READS_TIME & {alias.name for alias in node.names})
    return isinstance(node, ast.Attribute) and _last_name(node.value) == "time" and node.attr in READS_TIME


OPENS = {
    "open", "mkdir", "make_directory", "create", "RotatingFileHandler", "socket", "create_connection",
    "insecure_channel", "secure_channel", "Thread", "ThreadPoolExecutor", "ProcessPoolExecutor", "Popen",
    "create_future", "create_task", "new_group", "all_reduce", "broadcast", "barrier",
}  # fmt: skip
CONSTRUCTED = [path for path in PRODUCT if relative(path).startswith(("proto/", "server/", "learner/"))]


@pytest.mark.parametrize("path", CONSTRUCTED, ids=relative)
def test_a_constructor_only_assigns(path):
    """Files, threads, sockets, tasks and collectives are opened by methods with a counterpart that closes them."""
    for constructor in ast.walk(ast.parse(path.read_text())):
        if isinstance(constructor, ast.FunctionDef) and constructor.name in {"__init__", "__post_init__"}:
            called = {_last_name(node.func) for node in ast.walk(constructor) if isinstance(node, ast.Call)}
            assert not called & OPENS, f"line {constructor.lineno}: only assign in a constructor"


def test_each_file_that_may_be_long_is_long():
    for name, reason in LONG_FILES.items():
        assert reason, f"{name}: state why the file may be long"
        assert (ROOT / name).read_text().count("\n") > LONGEST_FILE, f"{name} is short again: remove it from LONG_FILES"


def test_project_files_name_no_package_index():
    for name in ("pyproject.toml", "constraints.txt", "Makefile", ".ci/run"):
        found = re.search(r"https?:|file:|--?(extra-)?(index|find-links)|trusted-host", (ROOT / name).read_text())
        assert found is None, f"{name} names a source of packages: {found[0]!r}"


def test_no_committed_file_contains_a_path_of_one_machine():
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    suspicious = re.compile(r"/(?:root|home/\w+|Users/\w+)/")
    for name in listed:
        if name == "tests/test_tidy.py" or not (ROOT / name).is_file():
            continue
        found = suspicious.search((ROOT / name).read_text(errors="replace"))
        assert found is None, f"{name} contains a path of one machine: {found[0]!r}"


def test_each_module_that_a_string_names_exists():
    """Commands start modules by name, and neither ruff nor mypy notices when such a module moves."""
    named = re.compile(r'"((?:tests|benchmarks)(?:\.\w+)+)"')
    sources = [*CODE, *sorted((ROOT / "tests").rglob("*.py"))]
    found = {(name, relative(path)) for path in sources for name in named.findall(path.read_text())}
    assert len(found) > 20
    missing = [(name, path) for name, path in sorted(found) if not _exists(ROOT.joinpath(*name.split(".")))]
    assert not missing


def _exists(module: Path) -> bool:
    """Returns whether the path is a package's or module's, or that of a name in a module."""
    return module.is_dir() or any(each.with_suffix(".py").is_file() for each in (module, module.parent))
