"""The training loop of a run that continues when processes are lost, and takes in those that come back."""

from contextlib import suppress
from typing import TYPE_CHECKING

from mingpt.errors import UserError
from mingpt.monitoring.logging import logger
from mingpt.monitoring.profiler import profile_steps
from mingpt.progress import StepResult
from mingpt.survive.catch_up import NO_STATE, MemberState, catch_up, list_to_result, result_to_list
from mingpt.survive.context import SurvivingContext
from mingpt.survive.membership import MembershipChanged, View
from mingpt.survive.supervisor import TRAINED, tell_supervisor

if TYPE_CHECKING:
    from trainer import Trainer


class SurvivingLoop:
    """Repeats what `Trainer.advance` does, in one view of the membership after another.

    A step has two parts: `train_step`, after which the step counts, and `after_step`, which writes what is due. A view
    may end in either. The first is then repeated, since nothing has changed yet; of the second, what was written is
    removed and written again.

    Attributes:
        logged: the newest step after which all that was due is written; NO_STATE: this process has the weights of no
            step of this run, and gets them from a member
        result: what the newest `train_step` returned; None: there was no step since the start
        must_save: the process that wrote snapshots is dead, and its last one is missing
    """

    def __init__(self, trainer: "Trainer", context: SurvivingContext) -> None:
        self.trainer = trainer
        self.context = context
        self.logged = NO_STATE if context.is_joining else trainer.progress.step
        self.result: StepResult | None = None
        self.must_save = False

    def train(self) -> int:
        """Trains as `Trainer.train` does, and continues when other processes are lost. Returns the exit status."""
        trainer = self.trainer
        if self.is_complete():
            return trainer.already_trained()
        trace = trainer.run_dir / f"trace-{self.context.launch_rank}.json"
        with profile_steps(trainer.config.trainer.profile_steps, trace) as step_profiler, trainer.signals:
            try:
                while True:
                    try:
                        while not trainer.stop_signal and not self.is_complete():
                            self.advance()
                            step_profiler()
                        return self.finish()
                    except MembershipChanged:
                        self.regroup()
            finally:
                trainer.close()

    def is_complete(self) -> bool:
        return self.logged >= self.trainer.last_step and not self.trainer.is_eval_pending()

    def finish(self) -> int:
        """Ends the run as the trainer does; processes that do not take part in that get the same status."""
        try:
            status = self.trainer.finish()
        except UserError:  # the last snapshot is not saved
            self.context.membership.end_run(2)
            raise
        self.context.membership.end_run(status)
        return status

    def advance(self) -> None:
        """Makes one step and what is due after it, or only the second part if a view has ended in it."""
        trainer = self.trainer
        if trainer.progress.step == self.logged and trainer.is_eval_pending():
            trainer.run_pending_eval()
            return
        save_now = self.must_save or trainer.is_save_overdue()
        flags = self.context.all_reduce_flags(trainer.signals.signal, int(save_now))
        if trainer.progress.step == self.logged:
            self.result = trainer.train_step()
            tell_supervisor(TRAINED)
        save_now = trainer.read_flags(flags)
        trainer.after_step(self.result, save_now)  # type: ignore[arg-type]  # None only before the first step
        self.logged = trainer.progress.step
        self.must_save = False

    @property
    def step(self) -> int:
        """The step of this process's state."""
        return NO_STATE if self.logged == NO_STATE else self.trainer.progress.step

    def regroup(self) -> None:
        """Becomes a member of the next view, with the newest state of its members."""
        while True:
            with suppress(MembershipChanged):
                view = self.context.regroup(self.step)
                self._enter(view)
                return

    def _enter(self, view: View) -> None:
        trainer = self.trainer
        trainer.guard.check(trainer.progress.step)  # a process that joins does not know of gradients before
        if view.steps[self.context.rank] == NO_STATE:  # the members continue from their state, whatever this rank has
            self.logged = NO_STATE
            self.result = None
            trainer.log.close()
        result = result_to_list(self.result) if self.result is not None else None
        mine = MemberState(self.step, trainer.progress.state_dict(), result, self.logged, trainer.log.is_open)
        now, has_writer = catch_up(trainer.strategy, mine)
        trainer.progress.load_state_dict(now.progress)
        self.logged = now.logged
        self.result = list_to_result(now.result) if now.result is not None else None
        if not has_writer:
            self._become_writer()
        if self.context.rank == 0:
            self._log_view(view)
        # What an earlier view has agreed on is void: the process that was told to stop may be dead.
        trainer.read_flags(self.context.all_reduce_flags(trainer.signals.signal, 0))

    def _become_writer(self) -> None:
        """Called by all members of a view whose rank 0 has not written the run's files so far."""
        trainer = self.trainer
        if self.result is None:
            trainer.start_log()
        elif self.context.rank == 0:
            trainer.log.open(trainer.config, self.logged, trainer.last_step)
        if self.context.rank == 0:
            last_due = self.logged - self.logged % trainer.config.trainer.save_every
            self.must_save = trainer.snapshots.is_missing(last_due)

    def _log_view(self, view: View) -> None:
        """Writes and shows who takes part from now on."""
        self.trainer.log.write(
            "view",
            self.logged,
            view=view.number,
            members=view.members,
            left=view.left,
            joined=view.joined,
            reason=view.reason,
        )
        if view.number > 1:
            left = [f"{name} has left" for name in view.left]
            joined = [f"{name} has joined" for name in view.joined]
            text = "; ".join([*left, *joined, view.reason])
            logger.info(f"step {self.logged}: {text}; ranks now: {len(view.members)} (view {view.number})")
