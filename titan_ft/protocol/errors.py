# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The known ways in which a group's part in the run ends, other than by a bug.

The message of each error names the remedy.
"""


class ReplicaError(RuntimeError):
    """Base of the errors below."""

    restart = True  # an agent may start the group again
    transient = True  # the cause may go by itself; if not, three in a row are a crash loop
    network = False  # the network, the lighthouse or another rank did not answer


class FinalError(ReplicaError):
    """An error that a restart of the group would not mend."""

    restart = False


class Leaving(Exception):  # noqa: N818  # no error, but an end in order
    """This group got a leave request, and all of its ranks have agreed to leave."""


class JobFinished(Exception):  # noqa: N818  # no error, but an end in order
    """The job had made its last step when this group came: no step is left to train."""


def first_line(error: BaseException) -> str:
    """Return an error's type and the first line of its message. torch appends C++ stacks to it."""
    return f"{type(error).__name__}: {error}".split("\n", 1)[0]


class LighthouseError(ReplicaError):
    """The lighthouse cannot be reached."""

    network = True


class TokenRefusedError(LighthouseError):
    """The lighthouse's gate has refused this group's token for `start_timeout_seconds`.

    The agent gives the group up (`RestartPolicy`), with an exit status after which a scheduler may
    still start the group again.
    """

    transient = False
    network = False


class GaveUpError(ReplicaError):
    """The exchange kept failing, or too few groups came."""


class HungError(ReplicaError):
    """The training thread made no progress for `hang_timeout_seconds`.

    A deadlock in the code comes back at each start. So this error counts towards a crash loop.
    """

    transient = False


class RankSilentError(ReplicaError):
    """Other ranks of this group are silent: their hosts are stopped, frozen or cut off."""


class RankLostError(ReplicaError):
    """Another rank of this group has ended, or cannot be reached. This rank ends because of it."""

    network = True


class NonFiniteError(ReplicaError):
    """Only this group's gradients were not finite, several times in a row."""


class JobLostError(ReplicaError):
    """No living group holds the job's state."""


class DivergedError(FinalError):
    """The groups' states differ and no majority says which is right."""


class ForeignMemberError(FinalError):
    """Another job was at this lighthouse first."""


class UnknownTokenError(FinalError):
    """This group would train alone: it cannot verify the names of the groups at the lighthouse."""


class ReplacedError(FinalError):
    """A newer process runs the replica group of this process."""


class ConfigMismatchError(FinalError):
    """This group runs another config than the others."""


class StateMismatchError(FinalError):
    """A donor's state does not fit this rank's model or optimizer."""


class RefusedError(FinalError):
    """The other end of a transfer does not know this run's token."""
