# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""All connections of one rank to the other replica groups, built and closed together.

Rank i of each group connects to rank i of the other groups. `Links` holds, in this order:

1. The state server. A group that comes back (a joiner) fetches the state of its rank i from it.
2. The membership: heartbeats to the lighthouse, and quorums. A quorum is the lighthouse's list of
   the groups in the next exchange. Within the group, ranks vote over the control tree.
3. The exchange: sums the gradients over the groups of a quorum.
4. The roll call, on rank 0 only: a thread that reports other groups which have fallen silent.

The trainer creates `Links` after the model is built, and calls its public methods, all on the
training thread. The control tree connects the ranks of one group and exists before
(`connect_control`).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Iterable, Sequence
from datetime import timedelta
from functools import partial

import torch
from torch import nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # exported at run time
from torch.distributed.fsdp import FSDPModule

from titan_ft import device, versions
from titan_ft.config import TABLE, ConfigError, FaultTolerance
from titan_ft.device import local_shard
from titan_ft.engine.drain import Drain
from titan_ft.engine.watchdog import end_process
from titan_ft.gradients.exchange import GradientExchange, HookCalls
from titan_ft.host.titan import DEGREES, FORWARD_RUNS_LOSS_BACKWARD, TORCH_DTYPE_MAP, ParallelDims
from titan_ft.membership.control_tree import ControlTree
from titan_ft.membership.group_collectives import GroupCollectives
from titan_ft.membership.membership import Membership
from titan_ft.membership.process_group import build_process_group
from titan_ft.membership.pulse import SILENT_BEATS
from titan_ft.membership.roll_call import RollCall
from titan_ft.protocol.control.node import LostRank
from titan_ft.protocol.errors import LighthouseError, RankSilentError, first_line
from titan_ft.protocol.row import fold48
from titan_ft.protocol.shape import describe_shape
from titan_ft.protocol.strategy import strategy_of
from titan_ft.round_settings import quantizes
from titan_ft.run.error_file import write_error
from titan_ft.run.events import RankSilent, StateServed
from titan_ft.run.lighthouse import LighthouseAddress
from titan_ft.run.log import EventLog
from titan_ft.run.refused import emit_refusal
from titan_ft.system.address import find_source_address, is_loopback, join_address, split_address
from titan_ft.system.refusal import Refusal
from titan_ft.system.threads import call_aside
from titan_ft.system.token import check_token
from titan_ft.training import spec
from titan_ft.training.worker import WorkerSetup
from titan_ft.transfer.reach import Probe
from titan_ft.transfer.state_server import CompletedTransfer, StateServer
from titan_ft.transfer.tls import Certificate


class Links:
    """The connections of this rank to the other groups.

    Create this object only when training can begin: its heartbeats start here, and from then on the
    other groups wait for this group. If the constructor fails, the process ends, which closes all
    connections.

    `_end_if_silent` runs on the control tree's thread, `_report_served` on threads of the state
    server, and all other methods on the training thread.

    See docs/design.md, "The picture".

    Args:
        exchanged: parameters whose gradients are summed over the groups, in the same order in every
            group.
        fragments: for each of these parameters, the number of its fragment of the model, with
            Streaming DiLoCo; empty without fragments.
        gradient_scale: factor from local gradients to gradients of the reported loss; 1 without a
            pipeline.
        num_microbatches: microbatches of a pipeline's schedule; 0 without a pipeline.

    Attributes:
        host: numeric address at which other groups reach this rank.
        server: serves this rank's state to joiners.
        membership: heartbeats, quorums and votes.
        exchange: sums the gradients over the groups.
    """

    def __init__(
        self,
        config: FaultTolerance,
        setup: WorkerSetup,
        events: EventLog,
        model_parts: Sequence[nn.Module],
        parallel_dims: ParallelDims,
        group: GroupCollectives,
        drain: Drain,
        control: ControlTree,
        *,
        exchanged: Iterable[nn.Parameter],
        fragments: Sequence[int],
        gradient_scale: float,
        num_microbatches: int,
    ) -> None:
        self._config = config
        self._setup = setup
        self._events = events
        self._drain = drain
        self._control = control
        # The groups compare this text when they meet: they can exchange only between equal shards.
        shape = _describe_group(parallel_dims, model_parts, group)
        self.host = config.advertise_address
        if not self.host:
            lighthouse = _find_lighthouse(setup.lighthouse, config)
            self.host = find_source_address(*split_address(lighthouse))
        certificate = None
        if config.transfer_tls:
            certificate = _make_certificate()
        self.server = StateServer(
            self.host,
            setup.token,
            wait_seconds=config.process_group_timeout_ms / 1000,
            on_completed=self._report_served,
            max_mbps=config.transfer_max_mbps,
            certificate=certificate,
            on_refusal=partial(report_refusal, events, "state server"),
        )
        if setup.rank == 0:
            # Listen before the heartbeats start. If a rank of this group froze earlier, this group
            # would send heartbeats but take part in nothing, and the other groups would wait
            # without end.
            control.listen_for_losses(self._end_if_silent)
        self.membership = self._build_membership(shape)
        self.exchange = self._build_exchange(
            exchanged, fragments, model_parts, gradient_scale, num_microbatches
        )
        self._roll_call: RollCall | None = None

    def start_roll_call(self, find_left: Callable[[], Collection[int] | None]) -> None:
        """Start to report other groups that are lost. Reports come from rank 0 of each group.

        Args:
            find_left: returns the slots of the groups that left in order, which are not lost. None
                if this group is leaving: other groups may leave with it, so none is reported.
        """
        if self._setup.rank == 0:
            self._roll_call = RollCall(
                self._config, self._events, self.membership.find_ages, find_left
            )

    def note_commit(self, step: int, slots: Collection[int], num_steps: int) -> None:
        """Note for the roll call which groups took part in an update.

        Args:
            step: number of the update.
            slots: slots of these groups.
            num_steps: local steps in the update. A group is lost only after several usual steps.
        """
        if self._roll_call is not None:
            self._roll_call.commit(step, slots, num_steps)

    def end_roll_call(self) -> None:
        """Report no more lost groups. After the job's end, the other groups end as well."""
        if self._roll_call is not None:
            self._roll_call.close()

    def close(self) -> None:
        """Close all connections to the other groups."""
        self.end_roll_call()
        # Close the server even if the membership cannot be closed.
        with contextlib.ExitStack() as stack:
            stack.callback(self.server.close)
            self.membership.close()

    def _build_membership(self, shape: str) -> Membership:
        config, setup = self._config, self._setup
        address = self.server.address
        timeout = timedelta(milliseconds=config.process_group_timeout_ms)
        return Membership(
            config,
            process_group=build_process_group(config.process_group, timeout, self.host),
            lighthouse=setup.lighthouse,
            host=self.host,
            group_rank=setup.rank,
            group_world_size=torch.distributed.get_world_size(),
            store=setup.store,
            control=self._control,
            config_digest=setup.config_digest,
            address=address,
            token=setup.token,
            events=self._events,
            shape=shape,
            probe=Probe(setup.token, address, setup.rank),
            leave_requested=lambda: self._drain.requested,
        )

    def _end_if_silent(self, lost_rank: LostRank) -> None:
        """End this process, rank 0, if another rank of the group sends no heartbeats.

        The control tree calls this on its thread for each rank that it has lost. A frozen rank
        keeps its connections open, so nothing else would end the group.
        """
        if lost_rank.silent_seconds == 0:
            # The rank was lost in another way, such as a closed connection: its process has ended.
            # The agent of this group sees that, and ends the group.
            return
        # A host that fails makes several ranks silent. The message names all of them.
        silent = [lost for lost in self._control.losses if lost.silent_seconds > 0]
        self._end_without_silent_ranks(silent)

    def _end_without_silent_ranks(self, silent: Sequence[LostRank]) -> None:
        """End this process. The agent then restarts the whole group."""
        hosts = {lost.rank: lost.host for lost in sorted(silent, key=lambda lost: lost.rank)}
        seconds = max(lost.silent_seconds for lost in silent)
        text = _describe_silence(self._config, hosts, seconds)
        line = f"titan_ft: {text}\n"
        # `end_process` calls these in this order, each with a timeout, and then exits.
        final_calls: list[Callable[[], object]] = [
            lambda: write_error(RankSilentError(text)),
            lambda: self._events.emit(
                RankSilent(ranks=[*hosts], hosts=[*hosts.values()], seconds=seconds)
            ),
            # Not sys.stderr: a thread that hangs may hold its lock.
            lambda: os.write(2, line.encode()),
        ]
        has_membership = "membership" in vars(self)  # The constructor may still be building it.
        if has_membership:
            # Stop the heartbeats last. Without them the training thread's vote or request fails,
            # which may end this process before the lines above are written.
            final_calls.append(self.membership.stop_heartbeats)
        end_process(1, *final_calls)

    def _build_exchange(
        self,
        exchanged: Iterable[nn.Parameter],
        fragments: Sequence[int],
        model_parts: Sequence[nn.Module],
        gradient_scale: float,
        num_microbatches: int,
    ) -> GradientExchange:
        config = self._config
        exchange = GradientExchange(
            exchanged,
            self.membership,
            bucket_bytes=int(config.bucket_size_mb * 2**20),
            where=device.exchange_device(config.process_group),
            overlap=strategy_of(config).sums_gradients,
            hook_calls=_find_hook_calls(model_parts, num_microbatches),
            gradient_scale=gradient_scale,
            fragments=fragments,
            quantize=quantizes(config),
            dtype=TORCH_DTYPE_MAP[config.exchange_dtype],
            counts=spec.token_counts(model_parts),
        )
        if config.process_group == "nccl":
            # NCCL connects members at the first use of an algorithm, and cannot be aborted while it
            # connects. So each new communicator makes the collectives of an exchange once, before
            # the exchange needs them.
            self.membership.process_group.rehearse = exchange.rehearse
        return exchange

    def _report_served(self, transfer: CompletedTransfer) -> None:
        """Report that a joiner has fetched this rank's state."""
        self._events.emit(
            StateServed(
                joiner=int(transfer.joiner),
                step=transfer.snapshot.step,
                bytes=transfer.num_bytes,
                copy_seconds=transfer.copy_seconds,
                serve_seconds=transfer.serve_seconds,
            )
        )


def connect_control(config: FaultTolerance, setup: WorkerSetup, events: EventLog) -> ControlTree:
    """Connect this rank to the control tree of its group. A collective of the group.

    The control tree carries votes, heartbeats and notes between the ranks of one group. The trainer
    calls this on the training thread, before it builds the model.

    Raises:
        ConfigError: other hosts reach this rank, and the token is missing or short.
        LighthouseError: the rank's parent in the tree cannot be reached.
    """
    num_ranks = torch.distributed.get_world_size()
    host = config.advertise_address or find_source_address(*setup.store)
    # Processes of other hosts cannot reach a tree without connections, or one on the loopback. Only
    # such a tree may do without the run's secret token.
    is_local = num_ranks == 1 or is_loopback(join_address(host, 0))
    check_token(setup.token, is_local=is_local)
    store = None
    if num_ranks > 1:
        # The ranks publish their addresses in the group's store.
        store = TCPStore(*setup.store, is_master=False, wait_for_workers=False)
    return ControlTree(
        setup.rank,
        num_ranks,
        host=host,
        token=setup.token,
        store=store,
        # A restarted group must not find the addresses of its last attempt.
        key=f"titan_ft/control/{config.replica_id}/{setup.attempt}",
        patience=SILENT_BEATS * config.heartbeat_timeout_ms / 1000,
        on_refusal=partial(report_refusal, events, "control tree"),
    )


def report_refusal(events: EventLog, port: str, refusal: Refusal) -> None:
    """Write an event for a refused connection.

    A new thread writes the event, because the storage may hang. Otherwise a stranger who connects
    could stop the caller's thread, on which peers wait.

    Args:
        port: the service that refused, in words.
    """
    # RuntimeError: while the process ends, no thread can be started.
    with contextlib.suppress(RuntimeError):
        call_aside(partial(emit_refusal, events, port, refusal), "titan_ft_refusal")


def _describe_silence(config: FaultTolerance, hosts: dict[int, str], seconds: float) -> str:
    """Return one line with the silent ranks and the remedy."""
    ranks = ", ".join(f"rank {rank} on {host}" for rank, host in hosts.items())
    return (
        f"no heartbeat from {ranks} for {seconds:.1f} s: stopped, frozen or cut off. This group "
        "ends, so that it starts again and the other groups need not wait for it; if ranks may be "
        "silent so long, raise fault_tolerance.heartbeat_timeout_ms "
        f"({config.heartbeat_timeout_ms}); if they are silent from the start, check that the hosts "
        "of a group reach each other at any port"
    )


def _make_certificate() -> Certificate:
    """Make the certificate of this rank's state server.

    Raises:
        ConfigError: this host cannot make a certificate.
    """
    try:
        return Certificate.make()
    except OSError as error:
        rule = f"{TABLE}.transfer_tls needs the command openssl"
        raise ConfigError(
            f"{rule}, got {first_line(error)}; install it, or set transfer_tls to false"
        ) from error


def _find_hook_calls(model_parts: Sequence[nn.Module], num_microbatches: int) -> int | HookCalls:
    """Return how often autograd calls the hook of a gradient in the backward of one step.

    A gradient is complete, and may travel, after the last of these calls.
    """
    if FORWARD_RUNS_LOSS_BACKWARD:
        # torchtitan 0.3 computes the loss in chunks, and each chunk goes backward by itself. The
        # parameters of the output layer get more calls than the other parameters.
        return HookCalls.COUNTED
    has_pipeline = num_microbatches > 0
    if not has_pipeline:
        return HookCalls.ONE
    if isinstance(model_parts[0], FSDPModule):
        # FSDP itself adds up a pipeline's microbatches. It calls the hooks once, when it has
        # reduced this sum.
        return 1
    return num_microbatches


def _describe_group(
    dims: ParallelDims, model_parts: Sequence[nn.Module], group: GroupCollectives
) -> str:
    """Return the facts in which all groups must agree, as one text. A collective of the group.

    The text is the same on all ranks of the group. It has the parallel degrees, the versions and a
    hash of the buffers of all ranks.
    """
    installed = versions()
    # Not this rank's buffers alone: ranks differ, for example in the stages of a pipeline.
    layouts = group.gather(fold48(_describe_buffers(model_parts)))
    return describe_shape(
        torch.distributed.get_world_size(),
        {name: getattr(dims, name) for name in DEGREES},
        {name: installed[name] for name in ("torch", "torchtitan", "titan_ft")},
        fold48(str(layouts)),
    )


def _describe_buffers(model_parts: Sequence[nn.Module]) -> str:
    """Return a text by which two ranks can compare their buffers in the exchange.

    It has one line for each parameter, and for each buffer in which the model counts the tokens of
    its experts. The order of the lines is the order in the exchange.
    """
    lines = []
    for part in model_parts:
        for name, parameter in part.named_parameters():
            shape = tuple(local_shard(parameter).shape)
            lines.append(f"{name} {shape} {parameter.dtype} {parameter.requires_grad}")
    counts = spec.token_counts(model_parts)
    lines += [f"count {tuple(local_shard(count).shape)}" for count in counts]
    return "\n".join(lines)


def _find_lighthouse(lighthouse: str, config: FaultTolerance) -> str:
    """Return the lighthouse's http://host:port; wait for its announcement if needed.

    Raises:
        LighthouseError: no address is announced within `start_timeout_seconds`.
    """
    try:
        return LighthouseAddress(lighthouse).wait(config.start_timeout_seconds)
    except TimeoutError as error:
        raise LighthouseError(
            f"{error} (fault_tolerance.start_timeout_seconds); check that the lighthouse's job "
            "runs, and with this file"
        ) from error
