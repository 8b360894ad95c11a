"""The demo's stack, which each module builds and starts once."""

from __future__ import annotations

import contextlib
import time

import pytest

from tests.compose.stack import NoEngineError, Stack

BUILD_S = 1500.0


@pytest.fixture(scope="module")
def stack():
    it = Stack()
    try:
        it.check()
    except NoEngineError as error:
        pytest.fail(str(error), pytrace=False)
    try:
        it.compose("build", timeout=BUILD_S)
        yield it
    finally:
        it.compose("--profile", "*", "down", "--volumes", "--remove-orphans", "--timeout", "5", timeout=120)
        for image in it.docker("image", "ls", "--quiet", "--filter", f"reference=atoll-*:{it.tag}*").split():
            with contextlib.suppress(AssertionError):  # listed twice if it has two names
                it.docker("image", "rm", "--force", image)


@pytest.fixture(scope="module")
def up(stack):
    """Returns the seconds from `up` until all services were healthy."""
    began = time.monotonic()
    stack.compose("up", "--detach", "--pull", "never", "--wait", "--wait-timeout", "600", timeout=700)
    return time.monotonic() - began
