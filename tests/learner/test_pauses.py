"""In a core's view, a throttled learner is live, and one with a long evaluation is paused."""

from __future__ import annotations

import pytest
from atoll.agent.shard_session import LOOK_S
from atoll.stats import Counters
from atoll_server.rounds.liveness import LearnerLiveness, learner_state


def trained(
    counters: Counters, member: LearnerLiveness, busy_s: float, pause_s: float, until: float
) -> list[tuple[float, str]]:
    """Simulates steps with a pause after each, and four reports per second. Returns the times of state changes."""
    seen, turn_s, now = [], busy_s + pause_s, 0.0
    while now < until:
        turns, within = divmod(now, turn_s)
        while counters.steps < int(turns + (within >= busy_s)):
            counters.stepped(turn_s if counters.steps else busy_s, pause_s if counters.steps else 0.0, None)
            counters.trained(10, 1)
        counters.paused = counters.steps > 0 and not turns + (within >= busy_s) > counters.steps and within >= busy_s
        counters.resting_since = turns * turn_s + busy_s if counters.paused else None
        member.hear(counters.steps, counters.pausing(now), now)
        seen.append((now, learner_state(member, now, evicted=False)))
        now += LOOK_S
    return seen


@pytest.mark.parametrize("busy_s", [0.01, 0.1, 0.33, 2.0])
def test_a_throttled_learner_is_live_and_its_step_time_includes_pauses(busy_s):
    member = LearnerLiveness(1, 0.0, 0.0)
    seen = trained(Counters(), member, busy_s, 4 * busy_s, 200 * busy_s + 20)
    assert {state for now, state in seen if now > 30 * busy_s + 2} == {"live"}
    assert member.step_time_s == pytest.approx(5 * busy_s, rel=0.3)


def test_a_long_pause_is_reported_before_the_learner_would_be_silent():
    counters, member = Counters(), LearnerLiveness(1, 0.0, 0.0)
    seen = trained(counters, member, 0.2, 0.0, 20.0)
    assert seen[-1][1] == "live"
    counters.paused, counters.resting_since = True, 20.0
    states = []
    for quarter in range(400):
        now = 20.0 + LOOK_S * quarter
        member.hear(counters.steps, counters.pausing(now), now)
        states.append(learner_state(member, now, evicted=False))
    assert set(states) == {"live", "paused"}
    assert set(states[4:]) == {"paused"}
    counters.resting_since = None  # an operator paused the run, which is reported immediately
    assert counters.pausing(0.0)
