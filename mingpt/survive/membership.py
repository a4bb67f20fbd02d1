"""Who takes part: views of the membership, decided one after another in a key-value store.

A view is a number and a list of members in rank order. Keys in the store, N being the number of a view:

    processes   names of all processes of the run so far, in the order in which they started
    view/N      the members of view N, and the steps they had finished; written once, by compare_set
    ended/N     why view N is over, and the members that have not reached a collective in time; written once, by
                compare_set
    state/NAME  the number of the view that a process waits for, and the step that it has finished; -1: it has no state,
                and gets that of a member
    end         the run has ended, with this exit status
    left/RANK   the process that the launcher calls RANK has learnt that

View N + 1 is decided after view N is over, when each member of view N is either dead or waits for view N + 1. All
collectives belong to a view, and to a gloo group of its own, which is abandoned with the view.

Up to WATCHERS members of a view watch all processes. They end the view when a member is dead, and decide the next one.
Other members read `ended/N` at each heartbeat and watch nobody, so that the load of the store is no square of their
number. If no view is decided for a minute, as when all watchers are lost at once, WATCHERS more members take part.

The states of a process:

    waiting   it waits to join, and has no state that counts, until a view contains it
    entering  it forms the group of the view, tells the others its step, and copies the newest state into memory of
              its own and then over its own state
    training  it computes, exchanges gradients, commits and logs steps, until the view has ended
    leaving   it writes its step, and waits for the next view, which watchers propose; if that does not contain it, it
              is waiting again, under a new name

Why no finished step is lost, and none is written twice:

1. There is one history of views. view/N is written by compare_set, and only the first writer succeeds. View N + 1 is
   proposed only by members of view N that have left it.
2. A step is committed with everything that it needs. Its last collective gathers the summed gradients and the losses
   of all micro-batches. What follows is local and gives bitwise identical results on each rank. So a rank that has
   gathered may commit, whatever happens to the others, and one that has not repeats the step with the same result.
3. Members are at most one step apart. To finish the collectives of step S + 1, a rank needs data from all members,
   which each sends only after it has committed and logged step S.
4. A finished step is not forgotten. The members of a new view copy the newest state among them, and a process that
   joins counts as having none. If all members that are ready have fewer steps than the view had at its beginning, they
   wait for the others, for a minute instead of 2 seconds.
5. A state is copied completely or not at all. Tensors are received into new memory, and copied when the last has
   arrived. Collectives use tensors that nothing else uses, since one that is abandoned may complete later.
6. Each row is written once. Only rank 0 writes. A member that was rank 0 in the view before knows what it has written.
   Any other knows by 3 that its predecessor had logged all steps but the newest; it replaces metrics.jsonl by a copy
   without rows of that step and logs it again. A predecessor that wakes up writes into the file that was replaced, and
   deletes no snapshot, because it finds a view without itself.
7. Safety does not depend on clocks, nor on who watches. Heartbeats and timeouts decide only how long members wait for a
   process. A process that is wrongly taken for dead joins again like a new one. There is one exception: if all members
   of a view are silent for a minute, new processes load the newest snapshot.
"""

import json
import os
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import NamedTuple

from mingpt.distributed.heartbeat import HEARTBEAT_TIMEOUT, heartbeat_key, read_positions
from mingpt.distributed.position import Position, SlowRanks, explain_wait, find_late
from mingpt.errors import PeerError, RunEnded
from mingpt.survive.liveness import Liveness, Store
from mingpt.survive.supervisor import RESTART_STATUS
from mingpt.survive.view_group import ViewGroup

STATE_TIMEOUT = 60.0  # seconds without a heartbeat, after which a member counts as dead if no other has its state
RETURN_SECONDS = 60.0  # in which a process that is started again learns that the run has ended
MAX_VIEWS = 10  # in a row without a newer step, after which the run ends
WATCHERS = 17  # members that watch all others, and decide the next view
POLL_SECONDS = 0.005
POLLS_PER_SECOND = 3000  # of all processes that wait, together


class MembershipChanged(Exception):  # noqa: N818 - an event
    """A process is dead or another one waits to join: the processes form a new view."""


class View(NamedTuple):
    """A view of the membership."""

    number: int = 0
    members: Sequence[str] = ()  # in rank order
    steps: Sequence[int] = ()  # that each had finished at its beginning; -1: none
    left: Sequence[str] = ()  # members of the view before that are not in this one
    reason: str = ""  # why the view before is over

    @property
    def joined(self) -> list[str]:
        """Members that get the state from another."""
        return [name for name, step in zip(self.members, self.steps, strict=True) if step < 0]


def launch_rank(name: str) -> int:
    """The rank by which the launcher knows a process."""
    return int(name.split("@", maxsplit=1)[0])


class Membership:
    """This process's part in the views.

    Attributes:
        view: the newest view that this process has entered
        newest: the newest view that it knows
        watchers: members of the newest view that watch all processes
        turn: 0: this process is one of the first to watch the others; each turn has WATCHERS processes

    Args:
        store: shared by all processes of the run
        founders: the number of processes that form the first view
        label: names this process in messages
        address: at which other processes reach this one, None if that is not known
        arrival_seconds: how long a member whose heart beats may take to leave a view that is over
        read_position: returns where the main thread is
    """

    def __init__(
        self,
        store: Store,
        founders: int,
        label: str,
        address: str | None,
        arrival_seconds: float,
        read_position: Callable[[], Position],
    ) -> None:
        self.store = store
        self.group = ViewGroup(store)
        self.founders = founders
        self.label = label
        self.address = address
        self.arrival_seconds = arrival_seconds
        self.read_position = read_position
        self.slow_ranks = SlowRanks()
        self.poll_seconds = max(POLL_SECONDS, founders / POLLS_PER_SECOND)
        self.view = View()
        self.ended_view = 0  # the newest view that this process knows to be over
        self.read_view = lru_cache(MAX_VIEWS + 1)(self._read_view)
        self._start_liveness(View())

    def _start_liveness(self, newest: View) -> None:
        self.name = f"{self.label}/{uuid.uuid4().hex[:8]}"
        self._follow(newest)
        self.liveness = Liveness(
            self.store, self.name, self.address, self.read_position, self._find_watched, self._on_look
        )

    # Who watches whom

    def _follow(self, newest: View) -> None:
        """Finds this process's place among those that watch the others, for the newest view.

        Rank 0 is the first. The order of the others has nothing to do with hosts, of which several may be lost at once.
        """
        members = sorted(newest.members, key=lambda name: (name != newest.members[0], name.rpartition("/")[2]))
        self.newest = newest
        self.watchers = members[:WATCHERS]
        place = members.index(self.name) if self.name in members else launch_rank(self.name)
        self.turn = place // WATCHERS
        self.turns = 1  # one more for each minute without the next view

    @property
    def is_watcher(self) -> bool:
        """Whether this process watches all others, and may decide the next view."""
        return self.turn < self.turns

    def _find_watched(self) -> Sequence[str]:
        """The processes that this one watches: all, or, while it waits to join, the watchers."""
        newest = self.newest
        if not self.is_watcher:
            return [] if self.name in newest.members else self.watchers
        names = self.store.get("processes").decode().split()
        last = {launch_rank(name): name for name in names}  # earlier ones of the same rank have ended
        return list(dict.fromkeys([*newest.members, *last.values()]))

    def _on_look(self, seconds: float) -> None:
        """Ends the view when a member is dead, and notices when another member has ended it.

        On rank 0, it warns of members for which the others wait. Called by the heartbeats' thread.
        """
        view = self.view  # the main thread may replace it meanwhile
        if self.ended_view >= view.number:
            self._exit_with_run()
            return
        if any(map(self.liveness.is_dead, view.members)):
            self._end(view, "a member is dead")
        if self.store.check([f"ended/{view.number}"]):
            self.ended_view = view.number
        elif view.members[0] == self.name:
            self.slow_ranks.look(self.liveness.heartbeats.positions(view.members), seconds)

    def end_run(self, status: int) -> None:
        """Tells all processes of the run that it has ended."""
        with suppress(RuntimeError, OSError):  # without a store, nobody can be told
            self.store.set("end", str(status))

    def _raise_if_ended(self) -> None:
        if self.store.check(["end"]):
            raise RunEnded(int(self.store.get("end")))

    def _exit_with_run(self) -> None:
        """Ends this process if the run has ended without it. Its main thread may hang, or load a snapshot."""
        try:
            self._raise_if_ended()
        except RunEnded as ended:
            if self.is_left_out():
                self.leave_run(ended.status)
                os._exit(ended.status)

    def leave_run(self, status: int) -> None:
        """Tells that this process has learnt of the end of the run. Rank 0, which may host the store, waits for all.

        A process that is just starting, in the place of one that was killed, would find no store. After a signal, which
        all processes get, hardly any starts.
        """
        rank = launch_rank(self.label)
        everybody = [f"left/{other}" for other in range(self.founders)]
        deadline = time.monotonic() + (RETURN_SECONDS if status == 0 else HEARTBEAT_TIMEOUT)
        with suppress(RuntimeError, OSError):  # without a store, nobody needs it
            self.store.set(everybody[rank], "")
            while rank == 0 and not self.store.check(everybody) and time.monotonic() < deadline:
                time.sleep(self.poll_seconds)

    @property
    def is_over(self) -> bool:
        """Whether the view is over, as far as this process knows."""
        return self.ended_view >= self.view.number

    @property
    def has_joiners(self) -> bool:
        """Whether a process waits to join, as far as this process knows."""
        return bool(self._joiners(self.view))

    def _joiners(self, view: View) -> list[str]:
        """The processes that wait to join, as far as this process watches them."""
        members = set(view.members)
        names = [name for name in self.liveness.names if name not in members]
        return [name for name in names if name == self.name or self.liveness.is_waiting(name)]

    def check(self) -> None:
        """Raises MembershipChanged if the view is over."""
        if self.is_over:
            raise MembershipChanged

    def end_view(self, reason: str) -> None:
        self._end(self.view, reason)

    def _end(self, view: View, reason: str, late: Sequence[str] = ()) -> None:
        self.store.compare_set(f"ended/{view.number}", "", json.dumps([reason, late]))

    def end_late_view(self) -> None:
        """Ends the view because a collective takes too long: the members that have not reached it are left out."""
        members = self.view.members
        positions = read_positions(self.store.multi_get([heartbeat_key(name) for name in members]))
        names = {rank: f"rank {rank} ({name.split('/')[0]})" for rank, name in enumerate(members)}
        reason = explain_wait(positions, names) or "a member has not reached a collective in time"
        self._end(self.view, reason, late=[members[rank] for rank in find_late(positions)])

    def has_live_members(self) -> bool:
        """Whether a watcher of the newest view is alive, so that the state need not be loaded from a snapshot."""
        while True:
            self._follow(self._newest_view(self.newest))
            if any(map(self.liveness.is_alive, self.watchers)):
                return True
            if self._are_lost(self.watchers):
                return False
            time.sleep(self.poll_seconds)

    def is_left_out(self) -> bool:
        """Whether a later view is decided without this process."""
        return self.name not in self._newest_view(self.view).members

    def regroup(self, step: int) -> View:
        """Leaves the view, and returns the next one that this process is in and that has a group.

        Args:
            step: the step of this process's state; -1: it has none

        Raises:
            RunEnded: the run has ended meanwhile, or this process must start again: `step` is -1, and no process is
                left that has the state.
            PeerError: no step was finished in many views.
        """
        view = self.view
        self.end_view("a member has left it")
        self.ended_view = view.number
        self.group.abandon()
        while True:
            view = self._next_view(view, step)
            self._check_progress(view)
            is_formed = self._form_group(view)
            self.view = view
            if is_formed:
                return view
            self.end_view("its group could not be formed")

    def _next_view(self, view: View, step: int) -> View:
        """Waits for a view after this one, with this process; watchers decide it."""
        while True:
            is_member = self.name in view.members
            self._follow(view)
            self.store.set(f"state/{self.name}", json.dumps([view.number + 1, step]))
            since = time.monotonic()
            while not self.store.check([f"view/{view.number + 1}"]):
                self._raise_if_ended()
                waited = time.monotonic() - since
                self.turns = 1 + int(waited / STATE_TIMEOUT)
                if not is_member:
                    self.liveness.set_waiting()
                if self.is_watcher and is_member:
                    self._propose(view, waited)
                elif self.is_watcher:
                    self._found(view, step)
                time.sleep(self.poll_seconds)
            view = self._newest_view(view)
            if self.name in view.members:
                self._follow(view)
                return view
            if is_member:  # the others have continued without this process
                self.liveness.stop()
                self._start_liveness(view)
                step = -1

    def _read_view(self, number: int) -> View:
        return View(*json.loads(self.store.get(f"view/{number}")))

    def _newest_view(self, view: View) -> View:
        while self.store.check([f"view/{view.number + 1}"]):
            view = self.read_view(view.number + 1)
        return view

    def _are_lost(self, names: Sequence[str]) -> bool:
        """Whether no process is left that has the state."""
        return all(self.liveness.is_dead(name, STATE_TIMEOUT) for name in names)

    def _propose(self, last: View, waited: float) -> None:
        """Decides the view after `last`, if each of its members is ready or need not be waited for."""
        keys = [f"ended/{last.number}", *(f"state/{name}" for name in last.members)]
        (reason, late), *states = map(json.loads, self.store.multi_get(keys))
        ready = {name: step for name, (number, step) in zip(last.members, states, strict=True) if number > last.number}
        missing = [name for name in last.members if name not in ready]
        newest = max(ready.values())
        if newest < max(last.steps):  # members that have the newest state are waited for much longer
            missing = [name for name in missing if not self.liveness.is_dead(name, STATE_TIMEOUT)]
        elif waited > self.arrival_seconds:
            missing = []
        else:
            missing = [name for name in missing if name not in late and not self.liveness.is_dead(name)]
        if missing:
            return
        if newest < 0:
            raise RunEnded(RESTART_STATUS)
        joiners = dict.fromkeys(self._joiners(last), -1)
        self._decide(last, ready | joiners, reason)

    def _found(self, last: View, step: int) -> None:
        """Decides a view of processes that have loaded their state, if `last` has no members or all are lost."""
        if not self._are_lost(last.members):
            return
        if step < 0:
            raise RunEnded(RESTART_STATUS)
        joiners = sorted(self._joiners(last), key=launch_rank)
        if last.number == 0 and len(joiners) < self.founders:
            return
        states = map(json.loads, self.store.multi_get([f"state/{name}" for name in joiners]))
        members = {name: state for name, (_, state) in zip(joiners, states, strict=True) if state >= 0}
        reason = "all its members are dead" if last.members else ""
        self._end(last, reason)
        self._decide(last, members, reason)

    def _decide(self, last: View, members: dict[str, int], reason: str) -> None:
        left = sorted(set(last.members) - set(members))
        view = View(last.number + 1, list(members), list(members.values()), left, reason)
        self.store.compare_set(f"view/{view.number}", "", json.dumps(view))

    def _check_progress(self, view: View) -> None:
        """Raises a PeerError if no step was finished in many views: the same error or loss would follow each time."""
        numbers = range(view.number - MAX_VIEWS, view.number + 1)
        if numbers.start > 0:
            steps = [max(self.read_view(number).steps) for number in numbers]
            if max(steps) == steps[0]:
                raise PeerError(f"no step was finished in {MAX_VIEWS} views; {view.reason}")

    def _form_group(self, view: View) -> bool:
        """Forms the group of a view, unless a member is dead or the view was ended."""

        def should_abort() -> bool:
            is_ended = self.store.check([f"ended/{view.number}"])
            return is_ended or any(map(self.liveness.is_dead, view.members))

        rank = view.members.index(self.name)
        return self.group.form(view.number, rank, len(view.members), should_abort, self.poll_seconds)
