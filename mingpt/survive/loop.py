"""The training loop of a run that goes on when processes are lost, and takes in those that come back."""

import signal
from contextlib import suppress
from typing import Any

from mingpt.monitoring.logging import logger
from mingpt.monitoring.metrics import NullMetricsLogger, StepTimer
from mingpt.monitoring.profiler import profile_steps
from mingpt.report import StepResult
from mingpt.signals import EXIT_STATUS, SignalHandler
from mingpt.survive.catch_up import NO_STATE, Progress, catch_up
from mingpt.survive.context import SurvivingContext
from mingpt.survive.membership import MembershipChanged, View


def train_surviving(trainer: Any) -> int:
    """Trains as `Trainer.train` does, and goes on when other processes are lost. Returns the exit status."""
    return SurvivingLoop(trainer).train()


class SurvivingLoop:
    """Repeats what `Trainer.advance` does, in one view of the membership after another.

    A step has two parts: `train_step`, after which the step counts, and `after_step`, which writes what is due. A view
    may end in either. The first is then repeated, since nothing has changed yet; of the second, what was written is
    removed and written again.

    Attributes:
        has_state: this process has the weights of some step; otherwise it gets them from a member
        logged: the newest step after which all that was due is written
        result: what the newest `train_step` returned; None: there was no step since the start
        must_save: the process that wrote snapshots is gone, and its last one is missing

    Args:
        trainer: a Trainer
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.context: SurvivingContext = trainer.context
        self.has_state = not self.context.is_joining
        self.logged = NO_STATE
        self.result: StepResult | None = None
        self.must_save = False

    def train(self) -> int:
        """Trains to the last step, or until a signal stops the run. Returns the exit status."""
        trainer = self.trainer
        if self.has_state:
            trainer.resume()
            if trainer.is_done() and not trainer.lacks_evaluation:
                trainer.report.already_trained()
                trainer.snapshots.writer.wait()
                return 0
            self.logged = trainer.step
        else:
            trainer.build({})
        trace = trainer.run_dir / f"trace-{self.context.launch_rank}.json"
        steps = trainer.config.trainer.profile_steps
        with profile_steps(steps, trace) as step_profiler, SignalHandler() as trainer.signals:
            try:
                while True:
                    try:
                        while not self.is_done():
                            self.advance()
                            step_profiler()
                        return self.finish()
                    except MembershipChanged:
                        self.regroup()
            finally:
                trainer.close()

    def is_complete(self) -> bool:
        return self.logged >= self.trainer.last_step and not self.trainer.lacks_evaluation

    def is_done(self) -> bool:
        return bool(self.trainer.stop_signal) or self.is_complete()

    def finish(self) -> int:
        """Ends the run as the trainer does; members whose view is over before they know it get the same status."""
        if not self.is_complete():
            self.context.exit_status = EXIT_STATUS[signal.Signals(self.trainer.stop_signal)]
        return self.trainer.finish()

    def advance(self) -> None:
        """Makes one step and what is due after it, or only the second part if a view has ended in it."""
        trainer = self.trainer
        if trainer.lacks_evaluation:
            trainer.make_up_evaluation()
            return
        save_now = self.must_save or trainer.is_save_overdue()
        flags = self.context.all_reduce_flags(trainer.signals.signal, int(save_now))
        if trainer.step == self.logged:
            self.result = trainer.train_step()
        trainer.stop_signal, save_now = flags.wait()
        trainer.after_step(self.result, bool(save_now))
        self.logged = trainer.step
        self.must_save = False

    def regroup(self) -> None:
        """Becomes a member of the next view, with the newest state of its members."""
        self.trainer.stop_signal = 0  # flags are reduced again, and the process that was told to stop may be dead
        while True:
            with suppress(MembershipChanged):
                step = self.trainer.step if self.has_state else NO_STATE
                view = self.context.regroup(step)
                self._enter(view)
                return

    def _enter(self, view: View) -> None:
        trainer = self.trainer
        report = trainer.report
        if view.steps[self.context.rank] == NO_STATE:  # the members go on from their state, whatever this rank has
            self.has_state = False
            self.result = None
            report.metrics.close()
            report.metrics = NullMetricsLogger()
        mine = Progress(
            trainer.step if self.has_state else NO_STATE,
            trainer.samples,
            self.result,
            trainer.val_loss,
            trainer.snapshots.best,
            self.logged,
            trainer.lacks_evaluation,
            report.metrics.is_open,
            report.device_of_this_rank(),
        )
        now, had = catch_up(trainer.strategy, mine)
        trainer.step = now.step
        trainer.samples = now.samples
        trainer.val_loss = now.val_loss
        trainer.snapshots.best = now.best
        trainer.lacks_evaluation = now.lacks_evaluation
        report.epoch = trainer.samples // len(trainer.train_data)
        if not self.has_state or self.result is None:  # the first step of this process is still to come
            report.timer = StepTimer(trainer.samples)
        self.has_state = True
        self.logged = now.logged
        self.result = None
        if now.result is not None:
            self.result = StepResult(*now.result)
        if not had[0].is_writer:
            self._become_writer([progress.device for progress in had])
        if self.context.rank == 0:
            self._log_view(view)

    def _become_writer(self, devices: list[str]) -> None:
        """Called by all members of a view whose rank 0 has not written the run's files so far."""
        trainer = self.trainer
        if self.result is None:
            trainer.report.show_start(devices)
        if self.context.rank == 0:
            trainer.report.open_files(self.logged)
            if self.result is None:
                trainer.report.start_row()
            last_due = self.logged - self.logged % trainer.config.trainer.save_every
            self.must_save = trainer.snapshots.is_missing(last_due)

    def _log_view(self, view: View) -> None:
        """Writes and shows who takes part from now on."""
        self.trainer.report.metrics.log(
            "view",
            self.logged,
            view=view.number,
            members=view.members,
            left=view.left,
            joined=view.joined,
            reason=view.reason,
        )
        changes = []
        if view.left:
            changes.append(f"{', '.join(view.left)} is gone")
        if view.joined:
            changes.append(f"{', '.join(view.joined)} has joined")
        changes.append(view.reason)
        if view.number > 1:
            text = "; ".join(changes)
            logger.info(f"step {self.logged}: {text}; ranks now: {len(view.members)} (view {view.number})")
