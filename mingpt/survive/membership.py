"""Who takes part: views of the membership, decided one after another in a key-value store.

A view is a number and a list of members in rank order. Keys in the store, N being the number of a view:

    joiners        names of all processes that have asked to take part, in order
    state/NAME     the step that a process had loaded when it asked; -1: none, it gets the state from a member
    view/N         the members of view N, and the steps they had finished; written once, by compare_set
    ended/N        why view N is over, and the members that have not come to a collective in time; written once, by
                   compare_set
    ready/N/NAME   a member of view N - 1 has left that view, and the step that it has finished
    failed/N/NAME  a member of view N has failed with an error; a digest of its traceback
    failures       for each view in which a member has failed, the newest step that members had at its beginning
    end            the run has ended; why its last snapshot is not saved, or nothing, and the exit status otherwise

View N + 1 is decided after view N is over, when each member of view N is either ready or gone. All collectives belong
to a view, and to a gloo group of its own, which is abandoned with the view.

The states of a process:

    waiting   it asks to join, and has no state that counts, until a view contains it
    entering  it forms the group of the view, tells the others its step, and copies the newest state into memory of
              its own and then over its own state
    training  it computes, exchanges gradients, commits and logs steps, until the view has ended
    leaving   it says `ready` with its step, and proposes the next view; if that does not contain it, it is waiting
              again, under a new name

Why no finished step is lost, and none is written twice:

1. There is one history of views. view/N is written by compare_set, and only the first writer succeeds. View N + 1 is
   proposed only by members of view N that have left it.
2. A step is committed with everything that it needs. Its last collective gathers the summed gradients and the losses
   of all micro-batches. What follows is local and gives the same bits on each rank. So a rank that has gathered may
   commit, whatever happens to the others, and one that has not repeats the step with the same result.
3. Members are at most one step apart. To finish the collectives of step S + 1, a rank needs data from all members,
   which each sends only after it has committed and logged step S.
4. A finished step is not forgotten. Members prefer those with most steps when they enter a view, and a process that
   joins counts as having none. If all that are ready have fewer steps than the view had at its beginning, they wait
   for the others, for a minute instead of 2 seconds.
5. A state is copied completely or not at all. Tensors are received into new memory, and copied when the last has
   arrived. Collectives use tensors that nothing else uses, since one that is abandoned may complete later.
6. Each row is written once. Only rank 0 writes. One that was rank 0 in the view before knows what it has written.
   Another one knows by 3 that its predecessor had logged all steps but the newest; it replaces metrics.jsonl by a
   copy without rows of that step and logs it again. A predecessor that wakes up writes into the file that was
   replaced, and deletes no snapshot, because it finds a view without itself.
7. Safety does not depend on clocks. Heartbeats and timeouts decide only who is waited for; a process that is taken
   for dead and is not joins like a new one. Only the last resort does: if all members of a view are silent for a
   minute, new processes load the newest snapshot.
"""

import json
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from mingpt.distributed.heartbeat import HEARTBEAT_TIMEOUT
from mingpt.distributed.position import Position, SlowRanks, explain_wait, find_late
from mingpt.errors import RunEnded
from mingpt.survive.liveness import Liveness
from mingpt.survive.view_group import ViewGroup

STATE_TIMEOUT = 60.0  # seconds without a heartbeat, after which a member counts as gone if nobody else has its state
DECISION_SECONDS = 0.5  # for the first member that is ready to decide the next view, before others do
FAILURE_SECONDS = 1.0  # for all members to fail with the same traceback
MAX_FAILURES = 5  # views in a row in which a member has failed, without a newer step
POLL_SECONDS = 0.005

Store = Any  # a dist.Store, whose type lacks clone and append (torch 2.13)


class MembershipChanged(Exception):  # noqa: N818 - an event
    """A process is gone or another one waits to join: the processes form a new view."""


class StateLostError(Exception):
    """No process is left that has the state of the run."""


def end_run(store: Store, save_error: str, status: int) -> None:
    """Tells all processes of the run that it has ended."""
    store.set("end", json.dumps([save_error, status]))


def read_end(store: Store) -> tuple[str, int] | None:
    """The arguments of `end_run`, None while the run goes on."""
    if not store.check(["end"]):
        return None
    save_error, status = json.loads(store.get("end"))
    return save_error, status


def raise_if_ended(store: Store) -> None:
    """Raises RunEnded if the run has ended."""
    end = read_end(store)
    if end is not None:
        save_error, status = end
        raise RunEnded(2 if save_error else status)


@dataclass(frozen=True)
class View:
    """A view of the membership."""

    number: int = 0
    members: list[str] = field(default_factory=list)  # in rank order
    steps: list[int] = field(default_factory=list)  # that each had finished at its beginning; -1: none
    left: list[str] = field(default_factory=list)  # members of the view before that are not in this one
    reason: str = ""  # the view before is over

    @property
    def joined(self) -> list[str]:
        """Members that get the state from another."""
        return [name for name, step in zip(self.members, self.steps, strict=True) if step < 0]


class Membership:
    """This process's part in the views.

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
        # A request waits for the one before it on the same connection, so threads have their own. They are opened here,
        # because the store looks up the name of whoever connects, which may take seconds (torch 2.13).
        self.store = store
        self.group = ViewGroup(store)
        self.founders = founders
        self.label = label
        self.address = address
        self.arrival_seconds = arrival_seconds
        self.read_position = read_position
        self.slow_ranks = SlowRanks()
        self.view = View()
        self.lock = threading.Lock()
        self.is_over = threading.Event()  # the view is
        self.is_over.set()
        self.has_joiners = False  # as rank 0 of the view sees it
        self.store.append("joiners", "")
        self._start_liveness()

    def _start_liveness(self) -> None:
        self.name = f"{self.label}/{uuid.uuid4().hex[:8]}"
        self.liveness = Liveness(self.store.clone(), self.name, self.address, self.read_position, self._on_look)
        self.liveness.start()

    # The heartbeats' thread

    def _on_look(self, store: Store, seconds: float) -> None:
        """Ends the view when a member is gone, and notices when another has ended it, or somebody wants to join.

        On rank 0, it warns of members for which the others wait.
        """
        view = self.view
        if self.is_over.is_set() or not view.members:
            return
        gone = [name for name in view.members if self.liveness.is_gone(name)]
        if gone:
            self.end_view("a member is gone", store)
        is_over = bool(gone) or store.check([f"ended/{view.number}"])
        self.liveness.watched = view.members
        is_rank0 = not is_over and view.members[0] == self.name
        has_joiners = is_rank0 and bool(self._joiners(store, view))
        if is_rank0:
            self.slow_ranks.look(self.liveness.heartbeats.positions(view.members), seconds)
        with self.lock:
            if view is self.view:
                self.has_joiners = has_joiners
                if is_over:
                    self.is_over.set()

    def _joiners(self, store: Store, view: View) -> list[str]:
        """The processes that wait to take part, in the order in which they asked."""
        names = store.get("joiners").decode().split()[-1000:]
        names = [name for name in names if name not in view.members and not self.liveness.is_gone(name)]
        self.liveness.watched = (*view.members, *names)
        return [name for name in names if name == self.name or self.liveness.is_waiting(name)]

    # The main thread

    @property
    def rank(self) -> int:
        return self.view.members.index(self.name)

    def check(self) -> None:
        """Raises MembershipChanged if the view is over."""
        if self.is_over.is_set():
            raise MembershipChanged

    def end_view(self, reason: str, store: Store | None = None, late: Sequence[str] = ()) -> None:
        (store or self.store).compare_set(f"ended/{self.view.number}", "", json.dumps([reason, late]))

    def end_late_view(self) -> None:
        """Ends the view because a collective takes too long: the members that have not come to it are left out."""
        members = self.view.members
        positions = self.liveness.heartbeats.positions(members)
        names = {rank: f"rank {rank} ({name.split('/')[0]})" for rank, name in enumerate(members)}
        reason = explain_wait(positions, names) or "a member has not come to a collective in time"
        self.end_view(reason, late=[members[rank] for rank in find_late(positions)])

    def has_live_members(self) -> bool:
        """Whether a member of the newest view is alive, so that the state need not be loaded from a snapshot."""
        view = self._newest_view(self.view)
        self.liveness.watched = view.members
        self.liveness.look_now()
        while not self._is_lost(view):
            if any(map(self.liveness.is_alive, view.members)):
                return True
            time.sleep(POLL_SECONDS)
        return False

    def is_left_out(self) -> bool:
        """Whether the next view is decided, without this process."""
        number = self.view.number + 1
        return self.store.check([f"view/{number}"]) and self.name not in self._read_view(number).members

    def regroup(self, step: int) -> View:
        """Leaves the view, and returns the next one that this process is in and that has a group.

        Args:
            step: the step of this process's state; -1: it has none

        Raises:
            RunEnded: the run has ended meanwhile.
            StateLostError: `step` is -1, and no process is left that has the state.
        """
        if self.view.members:
            self.end_view("a member has left it")
        else:
            self._ask_to_join(step)
        self.is_over.set()
        self.group.abandon()
        view = self.view
        while True:
            view = self._next_view(view, step)
            self.liveness.watched = view.members
            self.liveness.look_now()
            if self._form_group(view):
                with self.lock:
                    self.view = view
                    self.has_joiners = False
                    self.is_over.clear()
                return view
            self.view = view
            self.end_view("its group could not be formed")

    def _ask_to_join(self, step: int) -> None:
        self.store.set(f"state/{self.name}", str(step))
        self.store.append("joiners", f"{self.name} ")

    def _next_view(self, view: View, step: int) -> View:
        """Waits for a view after this one, with this process; members propose it."""
        while True:
            is_member = self.name in view.members
            if is_member:
                self.store.set(f"ready/{view.number + 1}/{self.name}", str(step))
            since = time.monotonic()
            while not self.store.check([f"view/{view.number + 1}"]):
                raise_if_ended(self.store)
                if is_member:
                    self._propose(view, since)
                else:
                    self.liveness.set_waiting()
                    self._found(view, step)
                time.sleep(POLL_SECONDS)
            view = self._read_view(view.number + 1) if is_member else self._newest_view(view)
            if self.name in view.members:
                return view
            if is_member:  # the others went on without this process
                self.liveness.stop()
                self._start_liveness()
                step = -1
                self._ask_to_join(step)
            self.liveness.watched = view.members

    def _read_view(self, number: int) -> View:
        return View(**json.loads(self.store.get(f"view/{number}")))

    def _ending(self, view: View) -> tuple[str, list[str]]:
        """Why a view is over, and the members that have not come to a collective in time."""
        if not view.number:
            return "", []
        reason, late = json.loads(self.store.get(f"ended/{view.number}"))
        return reason, late

    def _newest_view(self, view: View) -> View:
        while self.store.check([f"view/{view.number + 1}"]):
            view = self._read_view(view.number + 1)
        return view

    def _is_lost(self, view: View) -> bool:
        """Whether nobody is left who has the state."""
        return all(self.liveness.is_gone(name, STATE_TIMEOUT) for name in view.members)

    def _propose(self, last: View, since: float) -> None:
        """Decides the view after `last`, if each of its members is ready or gone."""
        ready: list[str] = []
        steps: list[int] = []
        missing: list[str] = []
        for name in last.members:
            key = f"ready/{last.number + 1}/{name}"
            if self.store.check([key]):
                ready.append(name)
                steps.append(int(self.store.get(key)))
            else:
                missing.append(name)
        # The first one knows best who waits to join. Others decide if it does not.
        if (
            ready[0] != self.name
            and not self.liveness.is_gone(ready[0])
            and time.monotonic() < since + DECISION_SECONDS
        ):
            return
        # If all that are ready have less than the newest state, those that have it are waited for much longer.
        has_state = max(steps) >= max(last.steps)
        timeout = HEARTBEAT_TIMEOUT if has_state else STATE_TIMEOUT
        is_late = has_state and time.monotonic() > since + self.arrival_seconds
        _, late = self._ending(last)
        if is_late or all(self.liveness.is_gone(name, timeout) or (has_state and name in late) for name in missing):
            if max(steps) < 0:
                raise StateLostError
            joiners = self._joiners(self.store, last)
            self._decide(last, ready + joiners, steps + [-1] * len(joiners))

    def _found(self, last: View, step: int) -> None:
        """Decides a view of processes that have loaded their state, if `last` has no members or all are lost."""
        if not self._is_lost(last):
            return
        if step < 0:
            raise StateLostError
        joiners = self._joiners(self.store, last)
        states = {name: int(self.store.get(f"state/{name}")) for name in joiners}
        names = sorted((name for name in joiners if states[name] >= 0), key=lambda name: int(name.split("@")[0]))
        if len(names) >= (1 if last.number else self.founders):
            if last.number:
                self.store.compare_set(f"ended/{last.number}", "", json.dumps(["all its members are gone", []]))
            self._decide(last, names, [states[name] for name in names])

    def _decide(self, last: View, members: list[str], steps: list[int]) -> None:
        reason, _ = self._ending(last)
        view = View(last.number + 1, members, steps, sorted(set(last.members) - set(members)), reason)
        self.store.compare_set(f"view/{view.number}", "", json.dumps(asdict(view)))

    def _form_group(self, view: View) -> bool:
        """Forms the group of a view, unless somebody in it is gone or the view was ended."""

        def should_abort() -> bool:
            is_ended = self.store.check([f"ended/{view.number}"])
            return is_ended or any(map(self.liveness.is_gone, view.members))

        return self.group.form(view.number, view.members.index(self.name), len(view.members), should_abort)

    def has_failed_for_all(self, rank: int, traceback: str) -> bool:
        """Whether the run must end since this process has failed with an error, else only this process.

        Args:
            rank: by which the launcher knows this process
            traceback: a digest, the same in processes that fail alike
        """
        view = self.view
        if not view.members:
            return self._has_failed_alike_before(rank, traceback)
        self.store.set(f"failed/{view.number}/{self.name}", traceback)
        if self.store.compare_set(f"failed/{view.number}", "", self.name).decode() == self.name:
            self.store.append("failures", f"{max(view.steps)} ")
        steps = [int(step) for step in self.store.get("failures").decode().split()[-MAX_FAILURES:]]
        if len(steps) == MAX_FAILURES and max(steps) == steps[0]:
            return True
        return len(view.members) == self.founders and self._do_all_fail_alike(view)

    def _has_failed_alike_before(self, rank: int, traceback: str) -> bool:
        """Whether nobody trains yet, and the process before this one has failed with the same traceback."""
        if self.store.check(["view/1"]):
            return False
        key = f"failed/0/{rank}"
        before = self.store.get(key).decode() if self.store.check([key]) else ""
        self.store.set(key, traceback)
        return before == traceback

    def _do_all_fail_alike(self, view: View) -> bool:
        keys = [f"failed/{view.number}/{name}" for name in view.members]
        deadline = time.monotonic() + FAILURE_SECONDS
        while not self.store.check(keys):
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_SECONDS)
        return len(set(self.store.multi_get(keys))) == 1

    def leave(self) -> None:
        """Stops taking part; the others see at once that this process is gone."""
        self.is_over.set()
        self.liveness.stop()
