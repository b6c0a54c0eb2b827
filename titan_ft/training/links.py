# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The links of one rank to the same rank of the other groups.

They are the quorums, the exchange of gradients, and the state server for joiners.
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
from titan_ft.host.titan import DEGREES, LOSSES_GO_BACKWARD, TORCH_DTYPE_MAP, ParallelDims
from titan_ft.membership.control_tree import ControlTree
from titan_ft.membership.group_collectives import GroupCollectives
from titan_ft.membership.membership import Membership
from titan_ft.membership.process_group import build_process_group
from titan_ft.membership.pulse import SILENT_BEATS
from titan_ft.membership.roll_call import RollCall
from titan_ft.protocol.control.node import Lose
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
    """The open links of this rank to the other groups.

    The trainer builds the links, and closes them, on the training thread. Build them only when
    training can begin: from then on, the other groups wait for this group. `_hear_loss` runs on the
    control tree's thread, `_report_served` on threads of the state server. If the constructor
    fails, the process ends, which closes the links.

    See docs/design.md, "The picture".

    Args:
        exchanged: parameters whose gradients are summed over the groups, in the same order in every
            group.
        fragments, gradient_scale: see `GradientExchange`.
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
        shape = _group_shape(parallel_dims, model_parts, group)
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
            # Listen before this group joins. After the join, the other groups would wait for a
            # frozen rank of this group, and nothing would end their wait.
            control.listen_for_losses(self._hear_loss)
        self.membership = self._join(shape)
        self.exchange = self._build_exchange(
            exchanged, fragments, model_parts, gradient_scale, num_microbatches
        )
        self._roll_call: RollCall | None = None

    def call_roll(self, find_left: Callable[[], Collection[int] | None]) -> None:
        """Begin to report which other groups are lost.

        Args:
            find_left: see `RollCall`.
        """
        if self._setup.rank == 0:
            self._roll_call = RollCall(
                self._config, self._events, self.membership.find_ages, find_left
            )

    def note_commit(self, step: int, slots: Collection[int], num_steps: int) -> None:
        """Note the groups that took part in an update of `num_steps` steps."""
        if self._roll_call is not None:
            self._roll_call.commit(step, slots, num_steps)

    def end_roll_call(self) -> None:
        """Report no more lost groups. After the job's end, the other groups end as well."""
        if self._roll_call is not None:
            self._roll_call.close()

    def close(self) -> None:
        """Leave the other groups. A link that cannot be closed does not keep the others open."""
        self.end_roll_call()
        with contextlib.ExitStack() as rest:
            rest.callback(self.server.close)
            self.membership.close()

    def _join(self, shape: str) -> Membership:
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

    def _hear_loss(self, loss: Lose) -> None:
        """End rank 0 if another rank of the group is silent.

        The connections to a frozen rank stay open, so nothing else would end the group. Runs on the
        control tree's thread.
        """
        if not loss.silent_seconds:
            # The rank's connection has closed. The agent sees the rank's end, and ends the group.
            return
        # A host that fails makes several ranks silent. The message names all of them.
        silent = [found for found in self._control.losses if found.silent_seconds]
        self._end_without(silent)

    def _end_without(self, silent: Sequence[Lose]) -> None:
        """End this process because other ranks of the group are silent.

        The agent then restarts the whole group.
        """
        hosts = {loss.rank: loss.host for loss in sorted(silent, key=lambda loss: loss.rank)}
        seconds = max(loss.silent_seconds for loss in silent)
        text = _describe_silence(self._config, hosts, seconds)
        line = f"titan_ft: {text}\n"
        final_calls: list[Callable[[], object]] = [
            lambda: write_error(RankSilentError(text)),
            lambda: self._events.emit(
                RankSilent(ranks=[*hosts], hosts=[*hosts.values()], seconds=seconds)
            ),
            # A thread that hangs may hold the lock of sys.stderr.
            lambda: os.write(2, line.encode()),
        ]
        # The constructor may still be in `_join`, and then there is no membership.
        if "membership" in vars(self):
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
            self.membership.process_group.rehearse = exchange.rehearse
        return exchange

    def _report_served(self, transfer: CompletedTransfer) -> None:
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

    Raises:
        ConfigError: other hosts reach this rank, and the token is missing or short.
        LighthouseError: the rank's parent in the tree cannot be reached.
    """
    num_ranks = torch.distributed.get_world_size()
    host = config.advertise_address or find_source_address(*setup.store)
    is_local = num_ranks == 1 or is_loopback(join_address(host, 0))
    check_token(setup.token, is_local=is_local)
    store = None
    if num_ranks > 1:
        store = TCPStore(*setup.store, is_master=False, wait_for_workers=False)
    return ControlTree(
        setup.rank,
        num_ranks,
        host=host,
        token=setup.token,
        store=store,
        key=f"titan_ft/control/{config.replica_id}/{setup.attempt}",
        patience=SILENT_BEATS * config.heartbeat_timeout_ms / 1000,
        on_refusal=partial(report_refusal, events, "control tree"),
    )


def report_refusal(events: EventLog, port: str, refusal: Refusal) -> None:
    """Write an event, on a thread of its own: no peer must wait for storage that hangs."""
    # While the process ends, no thread can be started.
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
    """Return how often autograd calls a gradient's hook in one backward."""
    if LOSSES_GO_BACKWARD:
        return HookCalls.COUNTED
    if num_microbatches == 0:
        return HookCalls.ONE
    if isinstance(model_parts[0], FSDPModule):
        # FSDP itself adds up a pipeline's microbatches. It calls the hooks once, when it has
        # reduced this sum.
        return 1
    return num_microbatches


def _group_shape(
    dims: ParallelDims, model_parts: Sequence[nn.Module], group: GroupCollectives
) -> str:
    """Return the shape of this group, the same on all of its ranks. A collective of the group."""
    installed = versions()
    # All ranks' layouts: the stages of a pipeline have different parameters, and the last ranks of
    # a shard have fewer.
    layouts = group.gather(fold48(_layout(model_parts)))
    return describe_shape(
        torch.distributed.get_world_size(),
        {name: getattr(dims, name) for name in DEGREES},
        {name: installed[name] for name in ("torch", "torchtitan", "titan_ft")},
        fold48(str(layouts)),
    )


def _layout(model_parts: Sequence[nn.Module]) -> str:
    """Return a text that determines this rank's buffers in the exchange.

    It has one line for each parameter and each count, in their order.
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
