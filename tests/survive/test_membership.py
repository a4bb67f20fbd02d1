"""Views of the membership, with members in threads of one process and a real store."""

import os
import resource
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from helpers import wait_until

from mingpt.config import DistributedConfig
from mingpt.distributed.heartbeat import HEARTBEAT_TIMEOUT
from mingpt.distributed.launch_environment import RankInfo
from mingpt.distributed.position import Position
from mingpt.errors import PeerError, RunEnded, UserError
from mingpt.survive import context as survive_context
from mingpt.survive import membership
from mingpt.survive.context import SurvivingContext
from mingpt.survive.membership import MAX_VIEWS, WATCHERS, Membership, MembershipChanged, View
from mingpt.survive.supervisor import RESTART_STATUS
from mingpt.survive.view_group import CONNECT_SECONDS, ViewGroup

NOWHERE = Position({}, "", "", 0.0)


@pytest.fixture
def store() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


class Run:
    """Members of a run, each with a thread that may wait for a view."""

    def __init__(self, store: dist.TCPStore, founders: int) -> None:
        self.store, self.founders = store, founders
        self.pool, self.all = ThreadPoolExecutor(64), []

    def member(self, rank: int, arrival_seconds: float = 60.0, position: Position = NOWHERE) -> Membership:
        args = (self.store.clone(), self.founders, f"{rank}@host:1", "127.0.0.1", arrival_seconds)
        member = Membership(*args, lambda: position)
        self.all.append(member)
        return member

    def regroup(self, member: Membership, step: int) -> "Future[View]":
        return self.pool.submit(member.regroup, step)

    def first_view(self, *steps: int) -> list[Membership]:
        members = [self.member(rank) for rank in range(self.founders)]
        for view in [self.regroup(member, step) for member, step in zip(members, steps, strict=True)]:
            view.result(20)
        return members


@pytest.fixture
def run(store: dist.TCPStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    monkeypatch.setattr(Membership, "_exit_with_run", lambda member: None)  # it would end the tests
    run = Run(store, 2)
    yield run
    store.set("end", "0")  # so that nobody waits any longer
    list(run.pool.map(lambda member: member.liveness.stop(), run.all))
    run.pool.shutdown()


def fall_silent(member: Membership) -> None:
    """Does what SIGSTOP does: no heartbeats, and no connection is closed."""
    member.liveness.stopped = True
    member.liveness.thread.join()


def test_the_first_view_has_all_founders_by_rank(run: Run) -> None:
    late, early = run.member(1), run.member(0)
    first = run.regroup(late, 7)
    time.sleep(0.2)
    assert not first.done()
    views = [view.result(20) for view in (run.regroup(early, 7), first)]
    assert views[0] == views[1] == View(1, [early.name, late.name], [7, 7], [])


def test_the_end_of_a_member_is_seen_at_once_and_leaves_it_out(run: Run) -> None:
    one, other = run.first_view(3, 3)
    began = time.monotonic()
    other.liveness.stop()
    wait_until(lambda: one.is_over, "the end of the view")
    view = run.regroup(one, 5).result(20)
    assert time.monotonic() - began < HEARTBEAT_TIMEOUT
    assert view == View(2, [one.name], [5], [other.name], "a member is dead")


def test_connections_are_watched_whatever_the_number_of_open_files(run: Run) -> None:
    """select.select refuses descriptors above 1,023."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
    taken = [os.open(os.devnull, os.O_RDONLY) for _ in range(1024)]
    try:
        one, other = run.first_view(0, 0)
        other.liveness.stop()
        wait_until(lambda: one.is_over, "the end of the view")
    finally:
        for descriptor in taken:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_view_is_decided_when_all_that_watch_are_lost(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "WATCHERS", 1)
    monkeypatch.setattr(membership, "STATE_TIMEOUT", 1.0)
    run.founders = 3
    first, *others = run.first_view(0, 0, 0)
    assert [member.is_watcher for member in run.all] == [True, False, False]
    first.liveness.stop()
    for view in [run.regroup(member, 1) for member in others]:
        assert view.result(20).members == [member.name for member in others]


def test_a_group_is_not_waited_for_when_somebody_in_it_has_ended(run: Run) -> None:
    one, other = run.member(0), run.member(1)

    def end(*args: object) -> bool:
        other.liveness.stop()
        raise SystemExit

    other.group.form = end  # type: ignore[method-assign]
    began = time.monotonic()
    views = run.regroup(one, 0), run.regroup(other, 0)
    assert views[0].result(20) == View(2, [one.name], [0], [other.name], "its group could not be formed")
    assert time.monotonic() - began < CONNECT_SECONDS
    assert isinstance(views[1].exception(), SystemExit)


def test_a_collective_that_does_not_start_ends_the_view(store: dist.TCPStore, run: Run) -> None:
    """As when the group sees a closed connection before the heartbeats are missed."""
    context = SurvivingContext(RankInfo(0, 2, 0, 2), DistributedConfig(), store.clone(), "127.0.0.1")
    run.all.append(context.membership)
    other = run.member(1)
    for view in [run.pool.submit(context.regroup, 0), run.regroup(other, 0)]:
        view.result(20)

    def fail(group: object) -> dist.Work:
        raise RuntimeError("Connection closed by peer")

    with pytest.raises(MembershipChanged):
        context.run(fail)
    wait_until(lambda: other.is_over, "the end of the view")


@pytest.mark.parametrize("is_alive", [True, False])
def test_a_rank_that_prepares_the_text_is_waited_for_as_long_as_it_is_alive(
    is_alive: bool, store: dist.TCPStore, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = SurvivingContext(RankInfo(1, 2, 1, 2), DistributedConfig(timeout_seconds=10), store, "127.0.0.1")
    run.all.append(context.membership)
    store.set("name/0", "trainer")
    waits: list[float] = []

    def check(keys: list[str]) -> bool:
        store.set("heartbeat/trainer", str(len(waits) * is_alive))
        return sum(waits) > 100

    monkeypatch.setattr(context, "store", SimpleNamespace(check=check, get=store.get))
    monkeypatch.setattr(survive_context, "time", SimpleNamespace(monotonic=lambda: sum(waits), sleep=waits.append))
    if is_alive:
        with context.local_rank0_first():
            assert 200 < len(waits) < 300
    else:
        with pytest.raises(UserError, match="rank 0 has been silent for 10 seconds"), context.local_rank0_first():
            pytest.fail("it is not waited for")


def test_a_process_joins_behind_the_members_and_without_a_state(run: Run) -> None:
    one, other = run.first_view(0, 0)
    third = run.member(0)
    assert third.has_live_members()
    joined = run.regroup(third, 9)  # whatever it has loaded
    wait_until(lambda: one.has_joiners and other.has_joiners, "the third process")
    views = [view.result(20) for view in (run.regroup(one, 4), run.regroup(other, 4), joined)]
    members = [one.name, other.name, third.name]
    assert views[0] == views[1] == views[2] == View(2, members, [4, 4, -1], [], views[0].reason)
    assert views[0].joined == [third.name]


def test_a_member_that_was_left_out_comes_back_under_a_new_name_without_a_state(run: Run) -> None:
    one, other = run.first_view(0, 0)
    fall_silent(other)
    view = run.regroup(one, 6).result(20)
    assert (view.members, view.left) == ([one.name], [other.name])
    assert other.is_left_out()
    assert not one.is_left_out()
    old = other.name
    back = run.regroup(other, 8)
    wait_until(lambda: one.has_joiners, "a process that joins")
    view = run.regroup(one, 7).result(20)
    assert back.result(20) == view
    assert (view.members, view.steps) == ([one.name, other.name], [7, -1])
    assert other.name != old


def test_members_wait_for_those_that_have_the_newest_state(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has just joined must not continue without the one that it is to get the state from."""
    monkeypatch.setattr(membership, "STATE_TIMEOUT", 1.0)
    one, other = run.first_view(0, 0)
    other.liveness.stop()
    run.regroup(one, 5).result(20)
    third = run.member(1)
    joined = run.regroup(third, -1)
    wait_until(lambda: one.has_joiners, "a process that joins")
    assert run.regroup(one, 5).result(20).steps == joined.result(20).steps == [5, -1]
    began = time.monotonic()
    fall_silent(one)
    with pytest.raises(RunEnded) as raised:
        run.regroup(third, -1).result(20)
    assert raised.value.status == RESTART_STATUS
    assert time.monotonic() - began > 0.8


def test_a_member_that_lives_but_is_never_ready_is_left_out_in_the_end(store: dist.TCPStore, run: Run) -> None:
    one, other = run.member(0, arrival_seconds=1.0), run.member(1)
    for view in [run.regroup(one, 0), run.regroup(other, 0)]:
        view.result(20)
    began = time.monotonic()
    view = run.regroup(one, 1).result(20)
    assert (view.members, view.left) == ([one.name], [other.name])
    assert time.monotonic() - began > 0.8


def test_a_member_for_which_a_collective_has_waited_is_not_waited_for_again(store: dist.TCPStore, run: Run) -> None:
    waiting, hanging = Position({"view 1": 2}, "all_reduce", "a.py:1", 9.0), Position({"view 1": 1}, "", "b.py:2", 9.0)
    one, other = run.member(0, position=waiting), run.member(1, position=hanging)
    for view in [run.regroup(one, 0), run.regroup(other, 0)]:
        view.result(20)
    while len(one.liveness.heartbeats.positions(one.view.members)) < 2:
        time.sleep(0.01)
    one.end_late_view()
    view = run.regroup(one, 1).result(20)
    assert (view.members, view.left) == ([one.name], [other.name])
    assert view.reason.startswith("rank 1 (1@host:1) has not reached collective 2 (all_reduce); ")


def test_all_that_wait_learn_how_the_run_has_ended(run: Run) -> None:
    one, _ = run.first_view(0, 0)
    waiting = run.regroup(run.member(0), -1)
    one.end_run(143)
    with pytest.raises(RunEnded) as raised:
        waiting.result(20)
    assert raised.value.status == 143


def test_processes_that_have_loaded_a_snapshot_continue_when_all_members_are_dead(run: Run) -> None:
    for member in run.first_view(0, 0):
        member.liveness.stop()
    new = run.member(1)
    assert not new.has_live_members()
    assert run.regroup(new, 40).result(20).steps == [40]
    late = run.member(0)
    assert late.has_live_members()


def test_a_run_ends_if_no_step_is_finished_in_many_views(run: Run) -> None:
    one, other = run.first_view(5, 5)
    other.liveness.stop()
    for step in [6] * MAX_VIEWS:
        run.regroup(one, step).result(20)
    with pytest.raises(PeerError, match=f"^no step was finished in {MAX_VIEWS} views; a member has left it"):
        run.regroup(one, 6).result(20)


class Recorder:
    """A store that records the keys of each request."""

    def __init__(self, store: dist.TCPStore) -> None:
        self.store, self.requests = store, []

    def clone(self) -> "Recorder":
        return Recorder(self.store)

    def __getattr__(self, name: str) -> Any:
        def request(keys: Any, *values: Any) -> Any:
            self.requests.append([keys] if isinstance(keys, str) else keys)
            return getattr(self.store, name)(keys, *values)

        return request


def test_of_many_members_few_watch_all_and_decide(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """So neither requests nor connections are a square of their number."""
    monkeypatch.setattr(ViewGroup, "form", lambda *args: True)
    monkeypatch.setattr(ViewGroup, "abandon", lambda group: None)
    run.store, run.founders = Recorder(run.store), 40
    *members, lost = run.first_view(*[0] * run.founders)
    sent = [member.liveness.heartbeats.number for member in members]
    for member, number in zip(members, sent, strict=True):  # what it has read before it knew the view does not count
        wait_until(lambda member=member, number=number: member.liveness.heartbeats.number > number, "a heartbeat")
        member.store.requests.clear()
    first = {member for member in members if member.is_watcher}
    lost.liveness.stop()
    wait_until(lambda: all(member.is_over for member in members), "the end of the view")
    names = [member.name for member in members]
    views = [view.result(20) for view in [run.regroup(member, 1) for member in members]]
    assert [(view.members, view.left) for view in views] == [(names, [lost.name])] * 39
    new = run.member(39)
    assert new.has_live_members()
    assert len(new.liveness.connections) == WATCHERS
    joined = run.regroup(new, -1)
    watchers = {member for member in members if member.is_watcher}
    wait_until(lambda: all(watcher.has_joiners for watcher in watchers), "the process that joins")
    views = [view.result(20) for view in [run.regroup(member, 2) for member in members]]
    assert [view.joined for view in views] == [joined.result(20).joined] * 39 == [[new.name]] * 39
    assert members[0] in watchers
    assert len(watchers) == WATCHERS
    for member in set(members) - first - watchers - {member for member in members if member.is_watcher}:
        assert max(len(keys) for keys in member.store.requests) == 1
    for member in members:
        states = [len(keys) for keys in member.store.requests if any(key.startswith("state/") for key in keys)]
        assert set(states) <= {1, 40, 41}  # its own; those of all members, with the reason of the end
        assert states.count(1) == 2
