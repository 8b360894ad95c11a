"""Contexts, and the precedence of an option, its environment variable and the context."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest
from atoll_dashboard.settings import DashboardSettings
from atoll_wire.cli import context_commands as commands
from atoll_wire.cli import contexts
from atoll_wire.cli.application import application
from atoll_wire.cli.contexts import ContextError
from atoll_wire.cli.option_groups import Reach, core, cores, takes
from atoll_wire.errors import UsageError, UserError
from typer.testing import CliRunner


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    for name in [name for name in os.environ if name.startswith("ATOLL_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    return tmp_path


@takes(reach=core)
def shown(reach: Reach) -> None:
    """Prints how the command would reach the core."""
    print(json.dumps([*reach.servers, str(reach.tls), reach.token, reach.plaintext]))


@takes(reach=cores)
def all_shown(reach: Reach) -> None:
    """Prints how a command with several addresses would reach a core."""
    print(json.dumps([*reach.servers, str(reach.tls), reach.token, reach.plaintext]))


APP = application()
APP.command("all")(all_shown)
APP.command("shown")(shown)
commands.register(APP)


def atoll(*arguments: str, **environment: str) -> str:
    done = CliRunner().invoke(APP, arguments, env=environment, auto_envvar_prefix="ATOLL")
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == 0, done.output
    return done.stdout


def reach(*arguments: str, **environment: str) -> list:
    return json.loads(atoll("shown", *arguments, **environment))


def test_an_option_takes_precedence_over_its_variable_and_the_variable_over_the_context(home):
    (home / "token").write_text(" secret \n")
    assert reach() == ["127.0.0.1:7070", "None", "", False]
    more = ["--tls", "/certs", "--token-file", str(home / "token"), "--insecure-plaintext"]
    atoll("context", "add", "home", "--server", "a:1", *more)
    atoll("context", "add", "away", "--server", "b:2")
    assert reach() == ["a:1", "/certs", "secret", True], "the first context is the current one"
    assert reach(ATOLL_CONTEXT="away") == ["b:2", "None", "", False]
    assert reach("--context", "away", ATOLL_CONTEXT="home")[0] == "b:2"
    assert reach(ATOLL_TLS="/mine")[:2] == ["a:1", "/mine"]
    assert reach("--tls", "/given", ATOLL_TLS="/mine")[1] == "/given"
    assert reach("--server", "c:3", ATOLL_SERVER="d:4")[0] == "c:3"
    atoll("context", "use", "away")
    assert reach()[0] == "b:2"


def test_a_context_s_token_goes_only_to_the_context_s_server(home):
    (home / "token").write_text("secret")
    atoll("context", "add", "home", "--server", "a:1", "--token-file", str(home / "token"), "--insecure-plaintext")
    assert reach()[2:] == ["secret", True]
    assert reach("--server", "b:2")[2:] == reach(ATOLL_SERVER="b:2")[2:] == ["", False]
    assert reach("--server", "b:2", "--token", "mine")[2:] == ["mine", False]
    assert reach("--server", "b:2", "--insecure-plaintext")[3]


def test_one_variable_serves_commands_that_take_one_address_and_several():
    assert reach(ATOLL_SERVER="a:1 b:2")[:-3] == ["a:1"]
    assert json.loads(atoll("all", ATOLL_SERVER="a:1 b:2"))[:-3] == ["a:1", "b:2"]


def test_of_two_tokens_the_one_that_was_given_later_counts(home):
    (home / "token").write_text("filed")
    assert reach("--token-file", str(home / "token"), ATOLL_TOKEN="set")[2] == "filed"
    assert reach("--token", "given", ATOLL_TOKEN_FILE=str(home / "token"))[2] == "given"
    with pytest.raises(UsageError, match="--token and --token-file cannot be combined"):
        reach("--token", "x", "--token-file", str(home / "token"))


def test_a_named_context_and_another_server_in_the_environment_are_not_guessed_between():
    atoll("context", "add", "home", "--server", "a:1")
    with pytest.raises(UsageError, match="--context and ATOLL_SERVER both name a core"):
        reach("--context", "home", ATOLL_SERVER="b:2")


@pytest.mark.parametrize("text", ["", "\n", None])
def test_a_token_file_that_holds_no_token_is_named(home, text):
    if text is not None:
        (home / "token").write_text(text)
    with pytest.raises(UserError, match=f"--token-file {home / 'token'} (is empty|cannot be read)"):
        reach("--token-file", str(home / "token"))


def test_only_the_owner_can_read_the_file(home):
    before = os.umask(0)
    try:
        atoll("context", "add", "home", "--server", "a:1")
        atoll("context", "add", "away", "--server", "b:2")
    finally:
        os.umask(before)
    assert contexts.path() == home / "atoll" / "contexts.json"
    assert stat.S_IMODE(contexts.path().stat().st_mode) == 0o600
    assert stat.S_IMODE(contexts.path().parent.stat().st_mode) == 0o700
    assert list(contexts.path().parent.iterdir()) == [contexts.path()]


def test_a_failed_change_keeps_the_old_file(monkeypatch):
    atoll("context", "add", "home", "--server", "a:1")
    before = contexts.path().read_bytes()

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ContextError, match="cannot be written"):
        atoll("context", "add", "away", "--server", "b:2")
    assert contexts.path().read_bytes() == before
    assert list(contexts.path().parent.iterdir()) == [contexts.path()]


def test_a_context_with_a_missing_directory_of_certificates_warns(capsys, tmp_path):
    commands.add_command("home", "a:1", tmp_path, tmp_path / "token", insecure_plaintext=True)
    missing = f"{tmp_path / 'token'} does not exist"
    assert capsys.readouterr().err == f"warning: {missing}, so commands with this context fail until it does\n"


def test_contexts_are_listed_shown_and_removed():
    atoll("context", "add", "home", "--server", "a:1", "--tls", "certs")
    atoll("context", "add", "away", "--server", "b:2")
    listed = json.loads(atoll("context", "list", "--json"))
    assert [(each["name"], each["current"], each["server"]) for each in listed] == [
        ("away", False, "b:2"), ("home", True, "a:1"),
    ]  # fmt: skip
    assert listed[1]["tls"] == str(Path("certs").absolute()), "it does not depend on the working directory"
    assert listed[0]["tls"] is None
    assert list(map(json.loads, atoll("context", "list", "-o", "jsonl").splitlines())) == listed
    assert json.loads(atoll("context", "show", "away", "--json")) == listed[0]
    assert json.loads(atoll("context", "show", "--json")) == listed[1]
    atoll("context", "remove", "home")
    with pytest.raises(ContextError, match="there is no current context"):
        atoll("context", "show")
    with pytest.raises(ContextError, match='context "home" does not exist: use one of away'):
        atoll("context", "use", "home")
    assert reach()[0] == "127.0.0.1:7070"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"current": "", "contexts": {"a": {"host": "x"}}}',
        '{"current": ["a"], "contexts": {"a": {"server": "x:1"}}}',
        '{"current": "a", "contexts": {"a": {"server": 5}}}',
        '{"current": "a", "contexts": {"a": {"server": "x:1", "token_file": 7}}}',
    ],
)
def test_a_damaged_file_is_named(text):
    contexts.path().parent.mkdir()
    contexts.path().write_text(text)
    with pytest.raises(ContextError, match=r"contexts\.json cannot be read"):
        reach()


def test_a_file_that_other_users_can_change_is_refused():
    atoll("context", "add", "home", "--server", "core.example.com:7070")
    contexts.path().chmod(0o620)
    with pytest.raises(ContextError, match=r"can be changed by other users: .* chmod 600"):
        reach()


@pytest.mark.parametrize("name", ["", "../x", "ev\x1b[31mil", "a b", "-x", "x" * 65], ids=repr)
def test_a_name_that_a_terminal_or_shell_would_not_show_as_it_is_is_refused(name):
    with pytest.raises(UsageError, match="is not a name of a context"):
        atoll("context", "add", "--server", "core.example.com:7070", "--", name)
    assert contexts.load().contexts == {}


def test_a_server_without_a_port_is_refused_before_it_is_stored():
    with pytest.raises(UserError, match=r'"core.example.com" has no port: .* core.example.com:7070'):
        atoll("context", "add", "home", "--server", "core.example.com")
    assert contexts.load().contexts == {}


def test_names_of_contexts_are_completed():
    atoll("context", "add", "home", "--server", "a:1")
    words = {"_ATOLL_COMPLETE": "complete_bash", "COMP_WORDS": "atoll context use h", "COMP_CWORD": "3"}
    done = CliRunner().invoke(APP, [], env=words, prog_name="atoll")
    assert done.stdout.split() == ["home"]


def test_a_dashboard_reads_its_token_from_a_file_too(home):
    (home / "token").write_text("secret\n")
    settings = DashboardSettings.of(token_file=str(home / "token"))
    settings.check()
    assert settings.own_token() == "secret"
    with pytest.raises(UsageError, match="--token and --token-file cannot be combined"):
        DashboardSettings.of(token="x", token_file=str(home / "token")).check()
