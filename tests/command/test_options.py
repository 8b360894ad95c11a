"""All commands name their options, variables, formats and exit statuses by the same rules."""

from __future__ import annotations

import json
import math
import os
import pty
import re
import subprocess
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import typer
from atoll_server.cli.receipts import COLUMNS as RECEIPTS
from atoll_server.cli.receipts import NARROW as FEW_OF_RECEIPTS
from atoll_server.cli.receipts import _cells
from atoll_server.cli.tables import shown
from atoll_wire import outer_pb2 as pb
from atoll_wire.cli.output import Format, as_data, columns, console, finite, plain_table, show
from atoll_wire.cli.sizes import COUNT_UNITS, UNITS, parse_count, parse_size, shortest
from atoll_wire.errors import ExitStatus, UserError
from atoll_wire.security.transport import AddressError, check_address
from rich.console import Console

from tests.command.test_command import ATOLL, run

ROOT = Path(__file__).parent.parent.parent
SHARED = {  # variables that mean the same to all commands with such an option
    "--server": "ATOLL_SERVER",
    "--tls": "ATOLL_TLS",
    "--token": "ATOLL_TOKEN",
    "--token-file": "ATOLL_TOKEN_FILE",
    "--context": "ATOLL_CONTEXT",
}
OTHERS = {  # command and option: why its variable does not follow the rule
    ("token", "--file"): "ATOLL_CORE_OPERATOR_TOKENS",  # the same file
    ("certs init", "--dir"): "ATOLL_CERTS_DIR",
    ("certs issue", "--dir"): "ATOLL_CERTS_DIR",
    ("certs list", "--dir"): "ATOLL_CERTS_DIR",
    ("chaos", "--server"): "ATOLL_CHAOS_SERVER",  # the core of its own deployment
}
SHOWING = {
    "status", "receipts", "checkpoint list", "context list", "context show", "certs show", "certs list", "doctor",
    "checkpoint verify", "checkpoint backup", "replay",
}  # fmt: skip
MEASURING = {  # commands whose --json takes a path
    "demo", "chaos", "plan", "simulate goodput", "simulate bandwidth", "simulate scavenging", "simulate hardware",
}  # fmt: skip


def all_commands() -> dict:
    app = typer.Typer()
    for entry in entry_points(group="atoll.commands"):
        entry.load()(app)
    found, waiting = {}, [("", typer.main.get_command(app))]
    while waiting:
        name, each = waiting.pop()
        inner = getattr(each, "commands", {})
        waiting += [(f"{name} {part}".strip(), command) for part, command in inner.items()]
        if not inner:
            found[name] = each
    return found


COMMANDS = all_commands()


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_variables_help_and_formats_follow_one_rule(name):
    options = [each for each in COMMANDS[name].params if each.param_type_name == "option"]
    for each in options:
        flag = each.opts[0]
        rule = f"ATOLL_{name}_{flag.removeprefix('--')}".replace(" ", "_").replace("-", "_").upper()
        wanted = OTHERS.get((name, flag)) or SHARED.get(flag, rule)
        assert (each.envvar or f"ATOLL_{name}_{each.name}".replace(" ", "_").upper()) == wanted, flag
        assert re.match(r"[A-Z0-9a-z].*[.)\]]$", each.help), f"{flag}: {each.help}"
    flags = {flag for each in options for flag in each.opts}
    assert ({"--output", "-o", "--json"} <= flags) == (name in SHOWING | MEASURING)
    takes_path = any("--json" in each.opts and not each.is_flag for each in options)
    assert takes_path == (name in MEASURING)


def test_tables_show_text_as_it_is(capsys):
    table = plain_table()
    table.add_row("7e:cd:ab:94")  # rich would show two pictures
    console().print(table)
    assert "7e:cd:ab:94" in capsys.readouterr().out


def test_the_documented_exit_statuses_are_those_in_the_code():
    page = (ROOT / "docs/reference/cli.md").read_text()
    assert [int(number) for number in re.findall(r"^\| (\d+) \|", page, re.MULTILINE)] == list(ExitStatus)
    assert UserError.exit_status is ExitStatus.FAILED


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        (["status", "-h"], ExitStatus.SUCCESS),
        (["context", "use", "absent"], ExitStatus.FAILED),
        (["status", "--watch", "--json"], ExitStatus.USAGE),
        (["status", "--nothing"], ExitStatus.USAGE),
        (["status", "--output", "yaml"], ExitStatus.USAGE),
        (["status", "--server", "localhost"], ExitStatus.USAGE),
        (["receipts", "--fate", "bogus"], ExitStatus.USAGE),
        (["core", "--dir", "DIR", "--quorum", "150%"], ExitStatus.USAGE),
        (["core", "--dir", "DIR", "--listen", "127.0.0.1:70999"], ExitStatus.USAGE),
        (["core", "--dir", "DIR", "--log-level", "loud"], ExitStatus.USAGE),
        (["core", "--dir", "DIR", "--shard", "4/4"], ExitStatus.USAGE),
        (["core", "--dir", "DIR", "--registrar", "127.0.0.1:1"], ExitStatus.USAGE),
        (["core", "--dir", "DIR", "--listen", "0.0.0.0:0"], ExitStatus.FAILED),
        (["learner", "--name", "a", "--server", "localhost"], ExitStatus.USAGE),
        (["pull", "--server", "localhost", "out"], ExitStatus.USAGE),
        (["certs", "issue", "learner", "a b", "--dir", "DIR"], ExitStatus.USAGE),
        (["token", "a b", "--file", "DIR"], ExitStatus.USAGE),
        (["context", "add", "a", "--server", "localhost"], ExitStatus.USAGE),
        (["evict", "a"], ExitStatus.USAGE),
        (["pause"], ExitStatus.USAGE),
        (["evict", "a", "--undo", "--server", "127.0.0.1:1"], ExitStatus.UNREACHABLE),
        (["pause", "--yes", "--server", "127.0.0.1:1"], ExitStatus.UNREACHABLE),
    ],
)
def test_exit_statuses_differ(arguments, status, tmp_path):
    command = [*ATOLL, *(str(tmp_path / "run") if each == "DIR" else each for each in arguments)]
    environment = os.environ | {"XDG_CONFIG_HOME": str(tmp_path)}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, env=environment, stdin=subprocess.DEVNULL
    )
    assert done.returncode == status, done.stderr
    if status is ExitStatus.USAGE and arguments in (["evict", "a"], ["pause"]):
        said = f"error: atoll {arguments[0]} asks for a confirmation, but stdin is no terminal: add --yes\n"
        assert done.stderr == said


@pytest.mark.parametrize(("answer", "status"), [(b"n\n", ExitStatus.FAILED), (b"y\n", ExitStatus.UNREACHABLE)])
def test_an_eviction_is_confirmed_on_a_terminal(answer, status):
    ours, theirs = pty.openpty()
    try:
        os.write(ours, answer)
        command = [*ATOLL, "evict", "eu-1", "--server", "127.0.0.1:1"]
        done = subprocess.run(command, stdin=theirs, capture_output=True, text=True, timeout=60)
    finally:
        os.close(ours)
        os.close(theirs)
    assert "Evict learner eu-1 from the run at 127.0.0.1:1? [y/N]" in done.stdout
    assert done.returncode == status, done.stderr


def test_shell_completion_knows_the_commands_and_their_options():
    for words, wanted in (("atoll sta", "status"), ("atoll status --tok", "--token-file"), ("atoll core --she", "")):
        count = str(len(words.split()) - 1)
        done = run(_ATOLL_COMPLETE="complete_bash", COMP_WORDS=words, COMP_CWORD=count)
        assert wanted in done.stdout.split() or not wanted, done.stderr


# ------------------------------------------------------------------------------------------------- JSON


def test_json_keeps_large_numbers_and_defaults_and_has_no_nan():
    reply = pb.StatusReply(run="x", tokens_trained=2**63, settings=pb.RunSettings(codec=pb.CODEC_INT4))
    reply.learners.add(learner="a", loss=math.nan)
    reply.goodput.lost_s["down"] = 1.5
    found = finite(as_data(reply))
    assert found["tokens_trained"] == 2**63
    assert (found["paused"], found["merges"], found["shards"], found["restored"]) == ("", 0, [], None)
    assert found["learners"][0]["loss"] is None
    assert found["goodput"]["lost_s"] == {"down": 1.5}
    assert found["settings"]["codec"] == "int4"
    assert found.keys() == {field.name for field in pb.StatusReply.DESCRIPTOR.fields}


def test_a_list_is_an_array_in_json_and_lines_in_jsonl(capsys):
    values = [{"a": 1}, {"a": math.inf}]
    show(values, Format.JSON, lambda: "")
    assert json.loads(capsys.readouterr().out) == [{"a": 1}, {"a": None}]
    show(values, Format.JSONL, lambda: "")
    assert capsys.readouterr().out == '{"a": 1}\n{"a": null}\n'


# ------------------------------------------------------------------------------------------------- tables


def status() -> pb.StatusReply:
    reply = pb.StatusReply(run="07f04e85d22340e9", generation=1, epoch=1, parameters=12 * 10**9, merges=123_456)
    for number in range(3):
        reply.learners.add(
            learner=f"eu-west.gpu-{number}", region="eu-west", state="evicted", steps=7_654_321, tokens=10**12,
            loss=2.5, last_seen_age_s=123.4, waiting_for="its answer for fragment 3", since=1e9,
        )  # fmt: skip
        reply.fragments.add(fragment=number, parameters=500_000_000, version=12_345, cycle=12_346, state="a quorum")
        reply.shards.add(shard=number, address="core-1.example.com:7070", attached=True, fragments=range(8), heard_s=1)
    reply.datasets.add(name="pile", units=1_000_000, epochs=2, consumed=1_234_567, leased=100)
    return reply


def printed(table: object, width: int) -> str:
    screen = Console(width=width, record=True, file=open(os.devnull, "w"))  # noqa: PTH123 - printed nowhere
    screen.print(table)
    return screen.export_text()


def test_counts_of_units_that_need_attention_are_shown_if_there_are_any():
    reply = status()
    assert "returned" not in printed(shown(reply, Format.TABLE), 80)
    reply.datasets[0].returned, reply.datasets[0].lost = 4, 0.7
    narrow = printed(shown(reply, Format.TABLE), 80)
    assert re.search(r"leased +returned +lost *\n", narrow)
    assert re.search(r"100 +4 +0\.7 *\n", narrow)


def test_tables_fit_80_columns_and_wide_ones_have_everything():
    narrow = printed(shown(status(), Format.TABLE), 80)
    assert max(map(len, narrow.splitlines())) <= 80
    for word in ("eu-west.gpu-0", "evicted", "2.500", "123.4 s ago", "core-1.example.com:7070", "500,000,000"):
        assert word in narrow, "no cell is cut or broken in two"
    assert "7,654,321" not in narrow
    wide = printed(shown(status(), Format.WIDE), 250)
    for word in ("7,654,321", "1,000,000,000,000", "since (UTC)", "recovery", "repeated"):
        assert word in wide


def test_a_status_names_its_silent_learners_above_the_tables():
    reply = status()
    assert "silent:" not in printed(shown(reply, Format.TABLE), 80)
    reply.at = reply.learners[0].since + 90.0
    reply.learners[1].since += 52.0
    for learner in reply.learners[:2]:
        learner.state = "silent"
    text = printed(shown(reply, Format.TABLE), 100)
    assert "silent: eu-west.gpu-0 for 1.5 min, eu-west.gpu-1 for 38 s. Read their logs" in text


def test_the_wide_status_names_the_learners_behind_a_front():
    reply = status()
    reply.links.add(name="eu", front=True, state="connected", learners=[f"eu.gpu-{number}" for number in range(2000)])
    reply.links.add(name="us", front=True, state="connected", learners=["us.gpu-0", "us.gpu-1"])
    reply.links.add(name="ap", front=True, state="connected")
    wide = printed(shown(reply, Format.WIDE), 250)
    first = ", ".join(f"eu.gpu-{number}" for number in range(8))
    assert f" 2000 ({first} and 1992 more)  no limit" in wide
    assert " 2 (us.gpu-0, us.gpu-1) " in wide
    assert re.search(r"front ap .* 0 +no limit", wide)
    narrow = printed(shown(reply, Format.TABLE), 80)
    assert "gpu-0, eu" not in narrow
    assert re.search(r"front eu .* 2000 +no limit", narrow)


def test_a_receipt_fits_80_columns_in_one_row():
    receipt = pb.Receipt(learner="eu-west.gpu-1", incarnation=2, fragment=12, seq=345, fate=pb.FATE_MERGED, version=123)
    cells = _cells(pb.LoggedReceipt(receipt=receipt, accepted_at=1.7e9, clipped=1.0, tokens=8192))
    text = printed(columns(RECEIPTS, FEW_OF_RECEIPTS, Format.TABLE, [cells]), 90)
    assert len(text.splitlines()) == 2, text
    assert "2023-11-14 22:13:20" in text


# ------------------------------------------------------------------------------------------------- values


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [
        (parse_size, "671GiB", 671 << 30), (parse_size, "1.5GiB", 3 << 29), (parse_size, "500MB", 500 * 10**6),
        (parse_size, "12B", 12), (parse_size, "65536", 65536), (parse_size, " 1 TiB ", 1 << 40),
        (parse_count, "12B", 12 * 10**9), (parse_count, "1.5T", 15 * 10**11), (parse_count, "12e9", 12 * 10**9),
        (parse_count, "25M", 25 * 10**6), (parse_count, "7", 7),
    ],
)  # fmt: skip
def test_sizes_and_counts_take_units(parse, text, value):
    assert parse(text) == value


@pytest.mark.parametrize(
    ("parse", "text"), [(parse_size, "12X"), (parse_size, "-1"), (parse_count, "12GiB"), (parse_count, "")]
)
def test_what_is_no_size_or_count_is_refused(parse, text):
    with pytest.raises(ValueError, match=r"not a (size|count): give"):
        parse(text)


def test_a_default_is_shown_with_its_largest_unit():
    assert [shortest(each, UNITS) for each in (0, 1000, 48 << 20, 1 << 40)] == ["0", "1000", "48MiB", "1TiB"]
    assert [shortest(each, COUNT_UNITS) for each in (7, 20_000_000, 1_500_000)] == ["7", "20M", "1500K"]


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("core.example.com", "has no port: give HOST:PORT, such as core.example.com:7070"),
        ("7070", r'"7070" has no port: give HOST:PORT, such as localhost:7070'),
        ("[::1]", r"has no port: give HOST:PORT, such as \[::1\]:7070"),
        ("::1", "is an IPv6 address without brackets"),
        ("http://core:7070", "is a URL: give HOST:PORT, such as core:7070"),
        ("a:b", "is not HOST:PORT: give an address such as a:7070"),
        ("a:65536", "is not HOST:PORT"),
    ],
)
def test_an_address_that_cannot_be_says_what_is_missing(address, said):
    with pytest.raises(AddressError, match=said):
        check_address(address)
    for fine in ("a:0", "[::1]:7070", "unix:/run/atoll", "localhost:65535"):
        check_address(fine)


@pytest.mark.parametrize(
    "arguments",
    [["status", "--server"], ["pull", "out", "--server"], ["learner", "--name", "a", "--server"], ["front", "--core"]],
)
def test_each_command_names_a_server_without_a_port(arguments):
    done = run(*arguments, "core.example.com")
    assert done.returncode == 2
    assert '"core.example.com" has no port' in done.stderr
