"""A right call of each public name that takes parameters: what the tests of misuse change one value of at a time.

Each is given a :class:`World` and returns what is called, with its arguments. Names that are made or called by the
library alone stand in :data:`NOT_CALLED`, with who does.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from functools import cached_property
from typing import Any

import torch
from torch import distributed as dist
from torch.utils.data import DataLoader, TensorDataset

import syncline
import syncline.testing
from syncline import Topology
from syncline.pytorch.fleet import Fleet, enter_fleet
from syncline.pytorch.metrics import publish
from syncline.runtime import communicators_in_memory
from syncline.runtime.reduction import numpy_reduction
from syncline.schedule import Collective, plan_sharded_step, plan_tree
from syncline.topology import DirectedLink

Right = tuple[Callable[..., object], dict[str, Any]]


class World(ExitStack):
    """A fleet of one rank, a model and its optimizer, each made when a call asks for it; closed in the end."""

    @cached_property
    def fleet(self) -> Fleet:
        (communicator,) = communicators_in_memory(1)
        fleet = Fleet(communicator)
        self.callback(fleet.close, is_failing=True)
        enter_fleet(fleet)
        return fleet

    @cached_property
    def pair(self) -> tuple[torch.nn.Module, Any]:
        model = torch.nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        rule = syncline.AllReduce()
        return syncline.distribute(model, optimizer, rule, samples="batch", elastic=True, fleet=self.fleet)

    @property
    def model(self) -> torch.nn.Module:
        return self.pair[0]

    @property
    def optimizer(self) -> Any:
        return self.pair[1]

    def published(self, call: Callable[..., object]) -> Callable[..., object]:
        """Return a call that needs a job which metrics know of."""
        self.callback(publish(self.fleet.statistics, lambda: self.fleet.communicator))
        return call

    def after_backward(self) -> Any:
        self.model(torch.ones(1, 4)).sum().backward()
        return self.optimizer

    @cached_property
    def sampler(self) -> Any:
        return syncline.data.ElasticSampler(DATASET, 2, fleet=self.fleet)

    def saved(self) -> torch.nn.Module:
        model = torch.nn.Linear(4, 2)
        shutil.rmtree("saved", ignore_errors=True)  # where a call before has kept several
        syncline.save_checkpoint("saved", model)
        return model


DATASET = TensorDataset(torch.arange(4.0))
TOPOLOGY = Topology.load("two-racks-5-3")
SCHEDULE = plan_tree(TOPOLOGY, Collective.ALL_REDUCE)
STEP = plan_sharded_step(TOPOLOGY, 1 << 20)
LINK = syncline.topology.Link.unlimited()
RANK = syncline.topology.Rank(rank=0)
HOST = syncline.topology.Host(name="h", link=LINK, ranks=(RANK,))
ALONE = plan_tree(Topology.flat(1), Collective.ALL_REDUCE)
BUFFER, SUM = memoryview(bytearray(8)), numpy_reduction("float32")
PLANNED: dict[str, Any] = {"topology": TOPOLOGY, "collective": Collective.BROADCAST}


def plain() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Linear(4, 2)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def distribute(world: World) -> Right:
    model, optimizer = plain()
    return syncline.distribute, {"model": model, "optimizer": optimizer, "fleet": world.fleet}


def reconfigure(world: World) -> Right:
    world.callback(lambda: dist.destroy_process_group() if dist.is_initialized() else None)
    return syncline.reconfigure, {}


def compress_group(world: World) -> Right:
    dist.init_process_group("syncline", store=dist.HashStore(), rank=0, world_size=1)
    world.callback(dist.destroy_process_group)
    return syncline.compress_group, {}


def load_codec(world: World) -> Right:
    call, given = compress_group(world)
    codec = call(**given)
    return codec.load_state_dict, {"state_dict": codec.state_dict()}


def tensor_call(name: str, *parts: str) -> Callable[[World], Right]:
    return lambda world: (getattr(world.fleet, name), {part: torch.ones(2) for part in parts or ("tensor",)})


def of_optimizer(name: str, **given: Any) -> Callable[[World], Right]:
    return lambda world: (getattr(world.optimizer, name), given)


def of_communicator(call: str, **given: Any) -> Callable[[World], Right]:
    return lambda world: (getattr(world.fleet.communicator, call), given)


def saving(call: Callable[..., object], **given: Any) -> Callable[[World], Right]:
    return lambda world: (call, {"path": "saved", "model": world.saved(), **given})


def connect_fabrics(**given: Any) -> object:
    async def connect() -> object:
        return syncline.fabric.memory_fabrics(**given)

    return asyncio.run(connect())


def planned(name: str, **given: Any) -> Callable[[World], Right]:
    return lambda world: (getattr(syncline.schedule, name), {**PLANNED, **given})


CALLS: dict[str, Callable[[World], Right]] = {
    "syncline.init": lambda world: (lambda **given: world.enter_context(syncline.init(**given)), {}),
    "syncline.launch": lambda world: (syncline.launch, {"function": int, "ranks": 1}),
    "syncline.distribute": distribute,
    "syncline.reconfigure": reconfigure,
    "syncline.compress_group": compress_group,
    "syncline.GroupCodec.load_state_dict": load_codec,
    "syncline.huggingface": lambda world: (syncline.huggingface, {}),
    "syncline.no_sync": lambda world: (syncline.no_sync, {"model": world.model}),
    "syncline.join": lambda world: (syncline.join, {"model": world.model}),
    "syncline.synchronize": lambda world: (syncline.synchronize, {"model": world.model}),
    "syncline.batch_size": lambda world: (syncline.batch_size, {"num_samples": 2, "model": world.model}),
    "syncline.note": lambda world: (world.published(syncline.note), {"loss": 0.5, "samples": 2}),
    "syncline.clip_grad_norm_": lambda world: (
        syncline.clip_grad_norm_,
        {"model": world.after_backward() and world.model, "max_norm": 1.0},
    ),
    "syncline.save_checkpoint": saving(syncline.save_checkpoint, iteration=1),
    "syncline.load_checkpoint": saving(syncline.load_checkpoint),
    "syncline.resume": saving(syncline.resume),
    "syncline.prepare_save": lambda world: (
        syncline.prepare_save,
        {"model": world.model, "optimizer": world.optimizer},
    ),
    "syncline.latest_checkpoint": lambda world: (syncline.latest_checkpoint, {"folder": "saved"}),
    "syncline.CheckpointWork.wait": lambda world: (
        syncline.save_checkpoint("work", world.model, wait=False).wait,
        {},
    ),
    "syncline.data.sampler": lambda world: (syncline.data.sampler, {"dataset": DATASET, "fleet": world.fleet}),
    "syncline.data.ElasticSampler": lambda world: (
        syncline.data.ElasticSampler,
        {"dataset": DATASET, "batch_size": 2, "fleet": world.fleet},
    ),
    "syncline.data.ElasticSampler.follow": lambda world: (
        world.sampler.follow,
        {"optimizer": world.optimizer, "loader": DataLoader(DATASET, batch_sampler=world.sampler)},
    ),
    "syncline.data.ElasticSampler.set_epoch": lambda world: (world.sampler.set_epoch, {"epoch": 1}),
    "syncline.data.ElasticSampler.load_state_dict": lambda world: (
        world.sampler.load_state_dict,
        {"state": world.sampler.state_dict()},
    ),
    "syncline.phase": lambda world: (
        syncline.phase,
        {
            "stages": [torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)],
            "make_optimizer": torch.optim.Adam,
            "loss": torch.nn.MSELoss(),
            "fleet": world.fleet,
        },
    ),
    # settings
    "syncline.AllReduce": lambda world: (syncline.AllReduce, {}),
    "syncline.Sharded": lambda world: (syncline.Sharded, {}),
    "syncline.LocalSteps": lambda world: (syncline.LocalSteps, {}),
    "syncline.Overlapped": lambda world: (syncline.Overlapped, {}),
    "syncline.Clustered": lambda world: (syncline.Clustered, {}),
    "syncline.Nesterov": lambda world: (syncline.Nesterov, {}),
    "syncline.Grace": lambda world: (syncline.Grace, {}),
    "syncline.Elastic": lambda world: (syncline.Elastic, {}),
    "syncline.Elastic.choose": lambda world: (syncline.Elastic.choose, {"value": True}),
    "syncline.Priorities": lambda world: (syncline.Priorities, {}),
    "syncline.BackendOptions": lambda world: (syncline.BackendOptions, {}),
    "syncline.updates.TemporaryServer": lambda world: (syncline.updates.TemporaryServer, {}),
    "syncline.updates.matrix_cost": lambda world: (syncline.updates.matrix_cost, {"shape": (2, 3)}),
    # the fleet
    "syncline.Fleet.all_reduce": tensor_call("all_reduce"),
    "syncline.Fleet.reduce": tensor_call("reduce"),
    "syncline.Fleet.reduce_scatter": tensor_call("reduce_scatter", "output", "source"),
    "syncline.Fleet.all_gather": tensor_call("all_gather", "output", "source"),
    "syncline.Fleet.gather": tensor_call("gather"),
    "syncline.Fleet.broadcast": tensor_call("broadcast"),
    "syncline.Fleet.all_gather_object": lambda world: (world.fleet.all_gather_object, {"value": 1}),
    "syncline.Fleet.gather_object": lambda world: (world.fleet.gather_object, {"value": 1}),
    "syncline.Fleet.broadcast_object": lambda world: (world.fleet.broadcast_object, {"value": 1}),
    "syncline.Fleet.on_close": lambda world: (world.fleet.on_close, {"function": lambda _: None}),
    "syncline.Fleet.close": lambda world: (world.fleet.close, {}),
    # the optimizer
    "syncline.DistributedOptimizer.step": lambda world: (world.after_backward().step, {}),
    "syncline.DistributedOptimizer.zero_grad": of_optimizer("zero_grad"),
    "syncline.DistributedOptimizer.batch_size": of_optimizer("batch_size", num_samples=2),
    "syncline.DistributedOptimizer.clip_grad_norm_": lambda world: (
        world.after_backward().clip_grad_norm_,
        {"max_norm": 1.0},
    ),
    "syncline.DistributedOptimizer.contribute": of_optimizer(
        "contribute", gradients={"bias": torch.ones(2)}, samples=2
    ),
    "syncline.DistributedOptimizer.load_state_dict": lambda world: (
        world.optimizer.load_state_dict,
        {"state_dict": world.optimizer.state_dict()},
    ),
    "syncline.DistributedOptimizer.offer_extra": of_optimizer("offer_extra", function=dict),
    "syncline.DistributedOptimizer.on_membership_change": of_optimizer("on_membership_change", function=print),
    # topologies
    "syncline.Topology": lambda world: (syncline.Topology, {"name": "t", "root": TOPOLOGY.root}),
    "syncline.Topology.flat": lambda world: (Topology.flat, {"num_hosts": 2}),
    "syncline.Topology.flat_on": lambda world: (Topology.flat_on, {"hosts": ["a", "b"]}),
    "syncline.Topology.load": lambda world: (Topology.load, {"path": "two-racks-5-3"}),
    "syncline.Topology.parse": lambda world: (Topology.parse, {"text": TOPOLOGY.to_yaml()}),
    "syncline.Topology.imported": lambda world: (
        Topology.imported,
        {"text": "SwitchName=s Nodes=n[1-4]", "origin": "slurm"},
    ),
    "syncline.Topology.render": lambda world: (TOPOLOGY.render, {}),
    "syncline.Topology.host_of": lambda world: (TOPOLOGY.host_of, {"rank": 0}),
    "syncline.Topology.ranks_of": lambda world: (TOPOLOGY.ranks_of, {"host_name": "h0"}),
    "syncline.Topology.node": lambda world: (TOPOLOGY.node, {"name": "h0"}),
    "syncline.Topology.parent_of": lambda world: (TOPOLOGY.parent_of, {"name": "h0"}),
    "syncline.Topology.bytes_per_s": lambda world: (TOPOLOGY.bytes_per_s, {"link": DirectedLink("h0", "up")}),
    "syncline.Topology.path": lambda world: (TOPOLOGY.path, {"rank": 0}),
    "syncline.Topology.round_trip_s": lambda world: (TOPOLOGY.round_trip_s, {"one": 0, "other": 7}),
    "syncline.Topology.route": lambda world: (TOPOLOGY.route, {"source": 0, "destination": 7}),
    "syncline.Topology.permuted": lambda world: (TOPOLOGY.permuted, {"order": list(range(8))}),
    "syncline.Topology.matched": lambda world: (TOPOLOGY.matched, {"hosts": [f"h{k}" for k in range(8)]}),
    "syncline.Topology.restricted": lambda world: (TOPOLOGY.restricted, {"ranks": [0, 7]}),
    "syncline.Topology.check_world_size": lambda world: (TOPOLOGY.check_world_size, {"world_size": 8}),
    "syncline.topology.Switch": lambda world: (
        syncline.topology.Switch,
        {"name": "s", "link": None, "children": (HOST,)},
    ),
    "syncline.topology.Host": lambda world: (syncline.topology.Host, {"name": "h", "link": LINK, "ranks": (RANK,)}),
    "syncline.topology.Host.with_children": lambda world: (HOST.with_children, {"children": (RANK,)}),
    "syncline.topology.Socket": lambda world: (
        syncline.topology.Socket,
        {"name": "h/s", "link": LINK, "children": (RANK,)},
    ),
    "syncline.topology.Rank": lambda world: (syncline.topology.Rank, {"rank": 0}),
    "syncline.topology.Link": lambda world: (
        syncline.topology.Link,
        {"up_bytes_per_s": 1e6, "down_bytes_per_s": 1e6},
    ),
    "syncline.topology.Link.symmetric": lambda world: (syncline.topology.Link.symmetric, {"bytes_per_s": 1e6}),
    "syncline.topology.Link.bytes_per_s": lambda world: (LINK.bytes_per_s, {"direction": "up"}),
    # schedules
    "syncline.schedule.plan_tree": planned("plan_tree"),
    "syncline.schedule.Planner.plan": lambda world: (syncline.schedule.PLANNERS["tree"].plan, PLANNED),
    "syncline.schedule.choose": planned("choose", num_bytes=1000),
    "syncline.schedule.lower_bound": planned("lower_bound", num_bytes=1000),
    "syncline.schedule.with_gateways_chosen": lambda world: (
        syncline.schedule.with_gateways_chosen,
        {"topology": TOPOLOGY},
    ),
    "syncline.schedule.plan_sharded_step": lambda world: (plan_sharded_step, {"topology": TOPOLOGY, "num_bytes": 1000}),
    "syncline.schedule.predict_sharded_step": lambda world: (
        syncline.schedule.predict_sharded_step,
        {"step": STEP, "topology": TOPOLOGY, "num_bytes": 1000},
    ),
    "syncline.schedule.sharded_step_bound": lambda world: (
        syncline.schedule.sharded_step_bound,
        {"topology": TOPOLOGY, "num_bytes": 1000},
    ),
    "syncline.schedule.layout_of_step": lambda world: (
        syncline.schedule.layout_of_step,
        {"step": STEP, "num_elements": 1000, "slice_elements": 1000},
    ),
    "syncline.schedule.predict": lambda world: (
        syncline.schedule.predict,
        {"schedule": SCHEDULE, "topology": TOPOLOGY, "num_bytes": 1000},
    ),
    "syncline.schedule.verify": lambda world: (syncline.schedule.verify, {"draft": SCHEDULE.draft}),
    "syncline.schedule.CostModel": lambda world: (syncline.schedule.CostModel, {}),
    "syncline.schedule.CostModel.of_emulated_network": lambda world: (
        syncline.schedule.CostModel.of_emulated_network,
        {"num_processors": 2},
    ),
    # what is below the fleet
    "syncline.runtime.Communicator.is_lost": of_communicator("is_lost", rank=0),
    "syncline.runtime.Communicator.plan": of_communicator("plan", collective=Collective.ALL_REDUCE, num_bytes=8),
    "syncline.runtime.Communicator.layout": of_communicator("layout", schedule=ALONE, num_elements=2, itemsize=4),
    "syncline.runtime.Communicator.all_reduce": of_communicator("all_reduce", buffer=BUFFER, reduction=SUM),
    "syncline.runtime.Communicator.reduce_scatter": of_communicator("reduce_scatter", buffer=BUFFER, reduction=SUM),
    "syncline.runtime.Communicator.all_gather": of_communicator("all_gather", buffer=BUFFER),
    "syncline.runtime.Communicator.broadcast": of_communicator("broadcast", buffer=BUFFER),
    "syncline.runtime.Communicator.open_port": of_communicator("open_port", name="p"),
    "syncline.runtime.Communicator.open_group": of_communicator("open_group", ranks=[0], streams=range(8)),
    "syncline.runtime.Communicator.abort": of_communicator("abort", reason="enough"),
    # in memory
    "syncline.testing.run_ranks": lambda world: (syncline.testing.run_ranks, {"ranks": 1, "body": lambda _: None}),
    "syncline.runtime.communicators_in_memory": lambda world: (
        syncline.runtime.communicators_in_memory,
        {"num_ranks": 1},
    ),
    "syncline.fabric.memory_fabrics": lambda world: (connect_fabrics, {"world_size": 1}),
}
RULES = (
    *("syncline.AllReduce", "syncline.Sharded", "syncline.LocalSteps", "syncline.Overlapped", "syncline.Clustered"),
    "syncline.updates.TemporaryServer",
)
NOT_CALLED: dict[str, str] = {
    **dict.fromkeys(
        (
            "syncline.Reconfiguration",
            "syncline.MembershipChange",
            "syncline.Resumption",
            "syncline.runtime.FleetStatistics",
            "syncline.fabric.FabricStatistics",
            "syncline.updates.ShardedStatistics",
            "syncline.schedule.StepPrediction",
            "syncline.schedule.Prediction",
            "syncline.schedule.ShardedStep",
            "syncline.topology.DirectedLink",
        ),
        "a record that calls return",
    ),
    **dict.fromkeys(
        ("syncline.Fleet", "syncline.DistributedOptimizer", "syncline.CheckpointWork"),
        "init(), distribute() and save_checkpoint() make it",
    ),
    "syncline.GroupCodec": "compress_group() makes it",
    "syncline.PhasedTrainer": "phase() makes it; its methods need two ranks, and have a test of their own",
    "syncline.comm_hook": "DistributedDataParallel calls it; its state is tried in test_comm_hook.py",
    **dict.fromkeys(
        (
            "syncline.Fleet.add_update",
            "syncline.DistributedOptimizer.go_on",
            "syncline.CheckpointWork.end",
            "syncline.CheckpointWork.settle",
            "syncline.Priorities.choose",
            "syncline.errors.accusing",
            "syncline.errors.as_told",
            "syncline.errors.escape_text",
            "syncline.errors.name_ranks",
            "syncline.errors.without_teller",
        ),
        "the library's own modules call it",
    ),
    **dict.fromkeys(
        (
            f"{rule}.{name}"
            for rule in RULES
            for name in ("check", "check_within", "start", "kind", "layout", "has_others", "record_schedule")
        ),
        "distribute() calls it",
    ),
    **dict.fromkeys(
        ("syncline.updates.UpdateRule", "syncline.updates.Setting", "syncline.updates.Updater"),
        "what distribute() asks of a rule; a rule of one's own is code of the library's kind",
    ),
    **dict.fromkeys(
        (
            "syncline.schedule.Draft",
            "syncline.schedule.Transfers",
            "syncline.schedule.Planner",
            "syncline.schedule.Schedule",
            "syncline.schedule.draft_with_owners",
        ),
        "what planners make, which verify() judges, and that judges it",
    ),
    **dict.fromkeys(
        ("syncline.fabric.Fabric", "syncline.fabric.FabricListener"),
        "the protocol of a transport, whose calls are the communicator's alone",
    ),
    "syncline.runtime.Communicator": "init() makes it; the library makes those of its calls that are not tried",
}
"""Why users do not make a call, by its name, or that of its class."""
