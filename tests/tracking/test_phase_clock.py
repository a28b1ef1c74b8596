"""Phases are exclusive, add up to the wall time, and survive a resume."""

from contextlib import suppress

import pytest

from miles_wan.tracking.phases import PhaseClock
from miles_wan.tracking.writing import TrackingError


class Time:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
def clock(time: Time) -> PhaseClock:
    return PhaseClock(now=time)


def spend(clock: PhaseClock, time: Time, name: str, seconds: float) -> None:
    with clock.phase(name):
        time.now += seconds


def test_seconds_accumulate_by_phase_and_the_rest_of_the_wall_time_is_in_none(clock: PhaseClock, time: Time) -> None:
    spend(clock, time, "rollout", 6)
    spend(clock, time, "train", 2)
    time.now += 1
    spend(clock, time, "rollout", 1)
    assert clock.seconds == {"rollout": 7, "train": 2}
    assert clock.wall == 10
    assert clock.coverage == pytest.approx(9 / 10)


def test_a_phase_inside_a_phase_is_an_error_that_names_both(clock: PhaseClock, time: Time) -> None:
    with clock.phase("rollout"):
        with pytest.raises(TrackingError, match=r"'score'.*'rollout'"), clock.phase("score"):
            pass
        assert clock.current == "rollout"
        time.now += 3
    assert clock.seconds == {"rollout": 3}


def test_a_phase_that_fails_is_counted_and_left(clock: PhaseClock, time: Time) -> None:
    with suppress(ZeroDivisionError), clock.phase("train"):
        time.now += 2
        _ = 1 / 0
    spend(clock, time, "sync", 1)
    assert clock.seconds == {"train": 2, "sync": 1}


def test_overlapping_work_is_reported_apart_and_not_summed(clock: PhaseClock, time: Time) -> None:
    with clock.phase("rollout"):
        time.now += 5
        clock.add_overlap("score", 4)
    assert clock.overlap == {"score": 4}
    assert clock.coverage == 1


def test_the_loop_starts_at_start_and_not_at_construction(clock: PhaseClock, time: Time) -> None:
    time.now += 50
    clock.start()
    time.now += 1
    spend(clock, time, "rollout", 3)
    clock.start()
    assert clock.wall == 4


def test_a_lap_gives_the_metrics_of_one_rollout(clock: PhaseClock, time: Time) -> None:
    spend(clock, time, "rollout", 6)
    clock.add_overlap("score", 1.5)
    assert clock.lap() == {"time/rollout": 6, "time/overlap/score": 1.5, "time/rollout_total": 6}
    time.now += 1
    spend(clock, time, "train", 2)
    assert clock.lap() == {"time/train": 2, "time/rollout_total": 3}
    assert clock.seconds == {"rollout": 6, "train": 2}


def test_a_resumed_clock_continues_sums_and_wall_time(clock: PhaseClock, time: Time) -> None:
    spend(clock, time, "rollout", 6)
    clock.add_overlap("score", 1)
    time.now += 2
    resumed = PhaseClock(now=time)
    resumed.restore(clock.state())
    time.now += 500  # the time between kill and resume belongs to nobody
    spend(resumed, time, "rollout", 4)
    resumed.add_overlap("score", 1)
    assert resumed.seconds == {"rollout": 10}
    assert resumed.overlap == {"score": 2}
    assert resumed.wall == 12


def test_restoring_a_running_clock_is_refused(clock: PhaseClock) -> None:
    clock.start()
    with pytest.raises(TrackingError, match="already running"):
        clock.restore({"wall": 1, "seconds": {}, "overlap": {}})


def test_the_name_of_the_total_is_no_phase(clock: PhaseClock) -> None:
    with pytest.raises(TrackingError, match="rollout_total"), clock.phase("rollout_total"):
        pass
