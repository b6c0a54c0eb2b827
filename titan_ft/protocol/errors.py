# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The known ways in which a group's part in the run ends. Each message says what to do; none is a bug's traceback."""


class ReplicaError(RuntimeError):
    """Base of the errors below."""

    restart = True  # whether an agent may start the group again
    transient = True  # whether it may go by itself; else three in a row are a crash loop
    network = False  # whether the network or the lighthouse is what did not answer


class FinalError(ReplicaError):
    """An error that starting the group again would not mend."""

    restart = False


class Leaving(Exception):  # noqa: N818  # no error, but an end in order
    """This group was told to leave, and all of its ranks have agreed."""


class JobFinished(Exception):  # noqa: N818  # no error, but an end in order
    """The job had made its last step when this group came; there is nothing left to train."""


def first_line(error: BaseException) -> str:
    """Return an error's type and the first line of its message: torch appends stacks of C++ to it."""
    return f"{type(error).__name__}: {error}".split("\n", 1)[0]


class LighthouseError(ReplicaError):
    """The lighthouse cannot be reached."""

    network = True


class GaveUpError(ReplicaError):
    """The exchange kept failing, or too few groups came."""


class HungError(ReplicaError):
    """The training thread made no progress for `hang_timeout_seconds`.

    A deadlock of the code comes back at each start, and so do its ends of `hang_timeout_seconds`.
    """

    transient = False


class RankSilentError(ReplicaError):
    """Other ranks of this group fell silent: their hosts are stopped, frozen or cut off."""


class RankLostError(ReplicaError):
    """Another rank of this group has ended, or cannot be reached. Its end is the cause, and this one follows."""

    network = True


class NonFiniteError(ReplicaError):
    """The gradients of this group are not finite again and again, and those of others are."""


class JobLostError(ReplicaError):
    """No living group holds the job's state."""


class DivergedError(FinalError):
    """The groups' states differ and no majority says which is right."""


class ForeignMemberError(FinalError):
    """Another job was at this lighthouse first."""


class ReplacedError(FinalError):
    """A newer process runs the replica group that this process believes it is."""


class ConfigMismatchError(FinalError):
    """This group runs another config than the others."""


class StateMismatchError(FinalError):
    """A donor's state does not fit this rank's model or optimizer."""


class RefusedError(FinalError):
    """The other end of a transfer does not know this run's token."""
