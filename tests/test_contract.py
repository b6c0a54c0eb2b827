# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Every private or fragile thing of torch, torchtitan, torchft and tyro that the code leans on, at
the pinned versions.

When an upgrade breaks something, it should break here first, by name.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib.metadata
import inspect
import os
import socket
import sys
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import torch
import torch.distributed as dist
import tyro

import titan_ft
from titan_ft.host import cpu
from titan_ft.membership import control_pings

cpu.prepare()


def parameters(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)


@pytest.mark.parametrize(
    ("package", "versions"),
    [
        ("torchtitan", ("0.2.2",)),
        ("torchft", ("0.2.0",)),
        ("torch", ("2.13.", "2.14.", "2.15.")),
        ("tyro", ("1.0.16",)),
    ],
    ids=["torchtitan", "torchft", "torch", "tyro"],
)
def test_pinned_versions(package: str, versions: tuple[str, ...]) -> None:
    """The rest of this file holds for these releases."""
    assert importlib.metadata.version(package).startswith(versions)


@dataclasses.dataclass
class Options:
    """Arguments that tyro parses in the test below."""

    place: tyro.conf.Positional[str]
    number: Annotated[int, tyro.conf.arg(aliases=("--count",))]
    choice: Literal["a", "b"] = "a"
    flag: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False

    def __post_init__(self) -> None:
        if self.number < 0:
            raise ValueError("must be >= 0")


@pytest.mark.parametrize(
    ("arguments", "event", "said"),
    [
        ("", "MissingArgs", (["place", "--number"], [])),
        ("x --numbr 1", "MissingArgs", (["--number"], ["--numbr", "1"])),
        ("x --number 1 y --z", "UnrecognizedArgs", ["y", "--z"]),
        ("x --number 1 --flag=yes", "UnrecognizedArgs", ["yes"]),
        ("x --number", "BadValue", ("too_few_values", ["--count", "--number"], int)),
        ("x --number 1 --choice c", "InvalidChoice", ("c", ("a", "b"), ["--choice"])),
        (
            "x --count one",
            "InstantiationFailure",
            ("invalid literal", ["--count", "--number"], int),
        ),
        ("x --number -1", "InstantiationFailure", ("must be >= 0", None, None)),
    ],
)
def test_tyro_says_why_it_refuses(arguments: str, event: str, said: Any) -> None:
    """Its private hook gets each refusal as an object, with all that `titan_ft.usage` makes a line
    of.
    """
    from tyro import _errors

    class RefusedError(Exception):
        pass

    def refuse(found: _errors.ParseErrorEvent) -> None:
        raise RefusedError(found)

    with pytest.raises(RefusedError) as refused, _errors.on_parse_error(refuse):
        tyro.cli(Options, args=arguments.split())
    (found,) = refused.value.args
    assert type(found) is getattr(_errors, event)
    argument = getattr(found, "argument", None)
    names = None if argument is None else list(argument.lowered.name_or_flags)
    match found:
        case _errors.MissingArgs():
            missing = [missing.arg.lowered.name_or_flags[-1] for missing in found.missing_arguments]
            assert (missing, found.unrecognized_tokens) == said
        case _errors.UnrecognizedArgs():
            assert found.tokens == said
        case _errors.BadValue():
            assert (found.reason, names, found.argument.field.type_stripped) == said
        case _errors.InvalidChoice():
            assert (found.value, found.choices, names) == said
        case _errors.InstantiationFailure():
            text, *rest = said
            assert text in found.message
            assert [names, None if argument is None else argument.field.type_stripped] == rest


def test_torchtitan_config_can_be_merged() -> None:
    """ConfigManager takes a config class, and its private _merge_configs keeps fields of both."""
    from torchtitan.config import ConfigManager, JobConfig

    from titan_ft.config import JobConfig as OurJobConfig

    merged = ConfigManager._merge_configs(JobConfig, OurJobConfig)
    assert ConfigManager(merged).config_cls is merged
    names = {field.name for field in dataclasses.fields(merged().fault_tolerance)}
    assert {"enable", "group_size", "digest_every"} <= names


def test_torchtitan_merges_into_a_class_of_another_module() -> None:
    """tyro parses that module once a table, `titan_0_2.build_schema` names a smaller one."""
    from torchtitan.config import ConfigManager, JobConfig

    from titan_ft.config import JobConfig as OurJobConfig
    from titan_ft.host.titan_0_2 import build_schema

    def lines(schema: type) -> int:
        return len(inspect.getsource(sys.modules[schema.__module__]).splitlines())

    assert lines(ConfigManager._merge_configs(JobConfig, OurJobConfig)) > 100
    for flags in ([], ["--job.custom_config_module=titan_ft.config"]):
        _, schema = build_schema(OurJobConfig, flags, {})
        assert lines(schema) < 10
        assert schema().fault_tolerance.__module__ == schema.__module__


def test_torchtitan_names_can_be_looked_up_early() -> None:
    """What a worker's config is checked against before a trainer is built; the merged class gives
    the flags.
    """
    from torchtitan.config import ConfigManager, JobConfig
    from torchtitan.experiments import _supported_experiments
    from torchtitan.hf_datasets.text_datasets import DATASETS, build_text_dataloader
    from torchtitan.models import _supported_models
    from torchtitan.protocols import train_spec

    assert {"llama3"} <= {*_supported_models, *_supported_experiments}
    assert train_spec.get_train_spec("llama3").build_dataloader_fn is build_text_dataloader
    assert "c4_test" in DATASETS
    assert ConfigManager()._maybe_add_custom_config([], {}) is JobConfig


def test_torchtitan_main_builds_its_config_manager_from_a_module_global() -> None:
    """titan_ft.train replaces it by one that hands over the config it has validated."""
    import torchtitan.train

    source = inspect.getsource(torchtitan.train.main)
    assert "config_manager = ConfigManager()" in source
    assert "config_manager.parse_args()" in source


def test_torchtitan_trains_under_record() -> None:
    """titan_ft.train takes `record` off: it returns where a loader of the user's raises
    SystemExit(0).
    """
    from torchtitan.train import Trainer

    bare = inspect.unwrap(Trainer.train)
    assert bare is not Trainer.train
    assert "while self.should_continue_training()" in inspect.getsource(bare)


def test_torchtitan_trainer_has_the_seams() -> None:
    """train() increments the step before train_step, and asks should_continue_training after it."""
    from torchtitan.train import Trainer

    source = inspect.getsource(Trainer.train)
    loop, step, call = (
        "while self.should_continue_training()",
        "self.step += 1",
        "self.train_step(data_iterator)",
    )
    assert source.index(loop) < source.index(step) < source.index(call)
    assert parameters(Trainer.train_step) == ["self", "data_iterator"]
    assert parameters(Trainer.forward_backward_step) == [
        "self",
        "input_dict",
        "labels",
        "global_valid_tokens",
    ]
    assert "self.ntokens_seen += ntokens_batch" in inspect.getsource(Trainer.batch_generator)


def test_torchtitan_s_trainer_is_recorded() -> None:
    """By torch elastic, which writes a file for each exception; what is below that can be
    called.
    """
    from torchtitan.train import Trainer

    for function, names in ((Trainer.__init__, ["self", "job_config"]), (Trainer.train, ["self"])):
        wrapped = inspect.unwrap(function)
        assert (
            function.__globals__["__name__"] == "torch.distributed.elastic.multiprocessing.errors"
        )
        assert wrapped.__globals__["__name__"] == "torchtitan.train"
        assert parameters(wrapped) == names


def test_torchtitan_uses_global_valid_tokens_only_as_a_divisor() -> None:
    """So that the nominal token count, a plain int, can take its place."""
    from torchtitan.train import Trainer

    source = inspect.getsource(Trainer.forward_backward_step)
    uses = [
        line.strip()
        for line in source.splitlines()
        if "global_valid_tokens" in line and "#" not in line
    ]
    assert all(
        "/ global_valid_tokens" in line or line.startswith("global_valid_tokens:") for line in uses
    ), uses


def test_torchtitan_s_pipelines_go_backward_from_the_sum() -> None:
    """They divide by the tokens only what they tell: `Links` has the exchange make up for it."""
    from torchtitan.distributed.pipeline_parallel import build_pipeline_schedule
    from torchtitan.train import Trainer

    assert "scale_grads=False" in inspect.getsource(build_pipeline_schedule)
    source = inspect.getsource(Trainer.forward_backward_step)
    pipeline = source[
        source.index("if parallel_dims.pp_enabled") : source.index("# Non-PP forward / backward")
    ]
    backward, told = pipeline.split("# accumulate losses across pipeline microbatches")
    assert "self.pp_schedule.step(" in backward
    assert "global_valid_tokens" not in backward
    assert "/ global_valid_tokens" in told


def test_torchtitan_train_specs() -> None:
    """A TrainSpec is a dataclass, and the private table of registered ones wins over the built-in
    models.
    """
    import torchtitan.protocols.train_spec as train_spec

    spec = train_spec.get_train_spec("llama3")
    assert dataclasses.is_dataclass(spec)
    for field in ("parallelize_fn", "build_dataloader_fn", "build_metrics_processor_fn"):
        assert hasattr(spec, field)
    marked = dataclasses.replace(spec, state_dict_adapter=None)
    train_spec._extra_train_specs["llama3"] = marked
    try:
        assert train_spec.get_train_spec("llama3") is marked
    finally:
        del train_spec._extra_train_specs["llama3"]


def test_torchtitan_dist_utils() -> None:
    """The functions that _apply and _heal call as torchtitan's train_step does."""
    from torchtitan.distributed import utils

    assert {"max_norm", "foreach", "pp_mesh", "ep_enabled"} <= set(
        parameters(utils.clip_grad_norm_)
    )
    assert parameters(utils.set_pg_timeouts) == ["timeout", "parallel_dims"]
    assert "barrier(device_ids=" in inspect.getsource(utils.set_pg_timeouts)


def test_a_store_answers_pings() -> None:
    """Its native thread does, in the bytes that `control_pings` sends: no other message needs no
    key and no waiting.
    """
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        store = dist.TCPStore(
            "127.0.0.1",
            port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=os.dup(listener.fileno()),
        )
    with socket.create_connection(("127.0.0.1", port), timeout=5.0) as connection:
        connection.sendall(
            control_pings._VALIDATE + control_pings._PING.pack(control_pings._PING_TYPE, 77)
        )
        assert connection.recv(64) == control_pings._ANSWER.pack(77)
    assert store.port == port


def test_torchft_coordination() -> None:
    """The native classes below torchft.Manager, the private quorum call among them."""
    from torchft.coordination import LighthouseServer, ManagerClient, ManagerServer

    lighthouse = LighthouseServer(
        bind="127.0.0.1:0",
        min_replicas=1,
        join_timeout_ms=100,
        quorum_tick_ms=20,
        heartbeat_timeout_ms=500,
    )
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    address = f"http://127.0.0.1:{lighthouse.address().rsplit(':', 1)[1]}"
    server = ManagerServer(
        replica_id="contract",
        lighthouse_addr=address,
        hostname="127.0.0.1",
        bind="127.0.0.1:0",
        store_addr=f"127.0.0.1:{store.port}",
        world_size=1,
        heartbeat_interval=timedelta(milliseconds=50),
        connect_timeout=timedelta(seconds=5),
        quorum_retries=1000,
    )
    try:
        client = ManagerClient(server.address(), connect_timeout=timedelta(seconds=5))
        quorum = client._quorum(
            group_rank=0,
            step=7,
            checkpoint_metadata="",
            shrink_only=False,
            timeout=timedelta(seconds=5),
            init_sync=False,
            commit_failures=0,
        )
        assert (quorum.replica_rank, quorum.max_step, quorum.replica_ids) == (0, 7, ["contract"])
        assert quorum.store_address == f"127.0.0.1:{store.port}"
        first = quorum.quorum_id
        assert client.should_commit(0, 7, False, timedelta(seconds=5)) is False
        again = client._quorum(
            group_rank=0,
            step=7,
            checkpoint_metadata="",
            shrink_only=False,
            timeout=timedelta(seconds=5),
            init_sync=False,
            commit_failures=1,
        )
        assert again.quorum_id > first, "a commit failure must renew the quorum's id"
    finally:
        server.shutdown()
        lighthouse.shutdown()


def test_coordination_alone_is_used_of_torchft() -> None:
    """The rest of its package changes from release to release."""
    modules = set()
    for path in Path(titan_ft.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                modules |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                modules.add(node.module or "")
    assert {name for name in modules if name.partition(".")[0] == "torchft"} == {
        "torchft.coordination"
    }


def test_fsdp_calls_post_accumulate_hooks_on_sharded_parameters() -> None:
    """The exchange hears of finished gradients through them; FSDP2 calls them itself, after its
    reduce-scatter.
    """
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives

    source = inspect.getsource(_fsdp_collectives.foreach_reduce)
    assert source.index("fsdp_param.sharded_param.grad =") < source.index(
        '"_post_accumulate_grad_hooks"', source.index("fsdp_param.sharded_param.grad =")
    )
    assert "hook(fsdp_param.sharded_param)" in source


def test_torchtitan_checkpoints() -> None:
    """The manager is a module global of torchtitan.train, built with keywords; these methods of it
    are overridden.
    """
    import torchtitan.train
    from torchtitan.components.checkpoint import DATALOADER, TRAIN_STATE, CheckpointManager

    assert torchtitan.train.CheckpointManager is not None
    assert "self.checkpointer = CheckpointManager(\n            dataloader=" in inspect.getsource(
        torchtitan.train.Trainer
    )
    assert (DATALOADER, TRAIN_STATE) == ("dataloader", "train_state")
    assert parameters(CheckpointManager.save) == ["self", "curr_step", "last_step"]
    assert parameters(CheckpointManager.load) == ["self", "step"]
    assert parameters(CheckpointManager.dcp_load) == [
        "self",
        "state_dict",
        "checkpoint_id",
        "from_hf",
        "from_quantized",
    ]
    assert parameters(CheckpointManager.dcp_save)[:4] == [
        "self",
        "state_dict",
        "checkpoint_id",
        "async_mode",
    ]
    for name in (
        "_should_save",
        "_async_wait",
        "_find_load_step",
        "_purge_stale_checkpoints",
        "_create_checkpoint_id",
    ):
        assert callable(getattr(CheckpointManager, name)), name


def test_torchtitan_loader_is_a_stateful_data_loader() -> None:
    """Its own state is a pickle of torchdata's, which the ledger takes without it."""
    from torchdata.stateful_dataloader import StatefulDataLoader
    from torchtitan.components.dataloader import ParallelAwareDataloader

    assert issubclass(ParallelAwareDataloader, StatefulDataLoader)
    assert "pickle.dumps(super().state_dict())" in inspect.getsource(
        ParallelAwareDataloader.state_dict
    )


def test_torchft_native_module_loads_alone() -> None:
    """A lighthouse starts in milliseconds because it needs nothing of the package around it."""
    from titan_ft.launch.lighthouse import _native_torchft

    assert hasattr(_native_torchft(), "LighthouseServer")


def test_torch_privates() -> None:
    """Private names of torch itself."""
    from torch.distributed.fsdp import FSDPModule

    assert hasattr(torch._utils, "_get_available_device_type")
    assert callable(FSDPModule.set_force_sum_reduction_for_comms)
    assert torch.nn.Linear(1, 1)._non_persistent_buffers_set == set()
    assert "device_ids" in parameters(dist.distributed_c10d.barrier)


def test_torch_merges_files_of_hugging_faces_format_between_collectives() -> None:
    """What is made to fail on all ranks or none is called by these names, before the others are
    waited for.
    """
    from torch.distributed.checkpoint import _consolidate_hf_safetensors as merging

    source = inspect.getsource(merging.consolidate_safetensors_files_on_every_rank)
    calls = (
        "_consolidate_safetensors_files(",
        "dist.gather_object(",
        "_write_overall_metadata_file(",
        "dist.barrier(",
    )
    places = [source.index(call) for call in calls]
    assert places == sorted(places)


def test_launch_seams_of_torch_elastic() -> None:
    """Workers meet at the agent's store because of a variable that torchrun's agent sets."""
    assert "TORCHELASTIC_USE_AGENT_STORE" in inspect.getsource(
        dist.rendezvous.__globals__["_create_c10d_store"]
    ) or ("TORCHELASTIC_USE_AGENT_STORE" in inspect.getsource(inspect.getmodule(dist.rendezvous)))
