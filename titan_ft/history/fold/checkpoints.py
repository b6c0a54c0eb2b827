# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The checkpoints from which a run can go on."""

from __future__ import annotations

from titan_ft.run import events as ev


class CheckpointsFold:
    """The checkpoints that one launch has made or loaded, by the events so far.

    Attributes:
        saving: torchtitan's step that a leaving group is saving; None after the save.
        save_error: why the run cannot resume from a later step than that of the latest checkpoint;
            empty if no save failed.
    """

    def __init__(self) -> None:
        self.saving: int | None = None
        self.save_error = ""
        self._changed_at = 0.0
        """Unix seconds of the event that `saving` and `save_error` follow from."""
        self._times: dict[int, float] = {}
        """By step, Unix seconds since which the checkpoint was there."""
        self._starts: dict[int, float] = {}
        """By group, Unix seconds of the last start of a worker."""

    @property
    def latest(self) -> int | None:
        """torchtitan's step of the latest checkpoint; None without any."""
        return max(self._times, default=None)

    def observe(self, event: ev.Event) -> None:
        """Take the next event."""
        former = (self.saving, self.save_error)
        self._apply(event)
        if (self.saving, self.save_error) != former:
            self._changed_at = event.time

    def _apply(self, event: ev.Event) -> None:
        match event:
            case ev.WorkerStarted():
                self._starts[event.replica] = event.time
            case ev.CheckpointSaved() if event.model_only:
                self._times.pop(event.step, None)  # it has taken the place of a whole one
                self.saving = None
                self.save_error = f"that of step {event.step} is of the model only"
            case ev.CheckpointSaved():
                self._times[event.step] = event.time
                self.saving = None
                self.save_error = ""
            case ev.CheckpointLoaded():
                self._drop_passed_over(event)
                self._times.setdefault(event.step, event.time)
                self.saving = None
                self.save_error = ""
            case ev.CheckpointWithdrawn() | ev.CheckpointSkipped():
                self._times.pop(event.step, None)
            case ev.CheckpointFailed():
                self.save_error = f"that of step {event.step} could not be written: {event.error}"
            case ev.SavingBeforeLeaving():
                self.saving = event.step
                self.save_error = ""

    def forget_before(self, time: float) -> None:
        """Forget the checkpoints, and the saves, that were there before a time, in Unix seconds."""
        if self._changed_at < time:
            self.saving = None
            self.save_error = ""
        for step, since in list(self._times.items()):
            if since < time:
                del self._times[step]

    def _drop_passed_over(self, event: ev.CheckpointLoaded) -> None:
        """Drop the later checkpoints that a load has passed over: damaged, gone, or turned away
        from.

        A later one that came after the worker's start stays: another group may have loaded the same
        step, trained and saved while this worker was still loading.
        """
        started = self._starts.get(event.replica, event.time)
        for step, since in list(self._times.items()):
            if step > event.step and since <= started:
                del self._times[step]
