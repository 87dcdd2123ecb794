"""gather, scatter, all-to-all on tensors: each rank's bytes go to whom they are for, directly."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

import torch

from syncline.backend.checks import check_one_for_each_rank, check_same_size, check_tensors, split_sizes
from syncline.errors import ConfigurationError
from syncline.pytorch.collectives import TensorWork
from syncline.pytorch.host_memory import host_memory_of, landing_memory_of, overlap, put_back, touches
from syncline.runtime.call import BasicSettings
from syncline.runtime.communicator import Communicator
from syncline.runtime.direct import start_direct
from syncline.updates.memory import bytes_of, dtype_name

Tensors = Sequence[torch.Tensor]


class DirectCollectives:
    """The calls of one rank in which each pair of ranks has bytes of its own; every tensor is on any device."""

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._rank, self._num_ranks = communicator.rank, communicator.world_size

    def gather(
        self, outputs: Tensors | None, tensor: torch.Tensor, *, root: int, **settings: Unpack[BasicSettings]
    ) -> TensorWork:
        """Make ``outputs[k]`` of ``root`` the ``tensor`` of rank k; all are of one size. Others give no outputs."""
        about = f"{tensor.nbytes} bytes of {dtype_name(tensor.dtype)} of each rank"
        if self._rank != root:
            _check_none("gather", "gather_list", outputs, root)
            check_tensors("gather", [tensor])
            sends = ((root, bytes_of(host_memory_of(tensor))),)
            work = start_direct(
                self._communicator, "gather", sends=sends, receives=(), about=about, root=root, **settings
            )
            return TensorWork([work], _do_nothing)
        outputs = outputs or ()
        check_one_for_each_rank("gather", "gather_list", outputs, self._num_ranks)
        check_tensors("gather", [tensor, *outputs])
        check_same_size("gather", [tensor, *outputs])
        landing = _landing(outputs)
        put_back(host_memory_of(tensor), landing[root])
        receives = tuple((peer, bytes_of(host)) for peer, host in enumerate(landing) if peer != root)
        work = start_direct(
            self._communicator, "gather", sends=(), receives=receives, about=about, root=root, **settings
        )
        return TensorWork([work], lambda: _put_all(landing, outputs))

    def scatter(
        self, output: torch.Tensor, inputs: Tensors | None, *, root: int, **settings: Unpack[BasicSettings]
    ) -> TensorWork:
        """Make ``output`` of rank k ``inputs[k]`` of ``root``; all are of one size. Others give no inputs."""
        about = f"{output.nbytes} bytes of {dtype_name(output.dtype)} for each rank"
        if self._rank != root:
            _check_none("scatter", "scatter_list", inputs, root)
            check_tensors("scatter", [output])
            host = landing_memory_of(output)
            receives = ((root, bytes_of(host)),)
            work = start_direct(
                self._communicator, "scatter", sends=(), receives=receives, about=about, root=root, **settings
            )
            return TensorWork([work], lambda: put_back(host, output))
        inputs = inputs or ()
        check_one_for_each_rank("scatter", "scatter_list", inputs, self._num_ranks)
        check_tensors("scatter", [output, *inputs])
        check_same_size("scatter", [output, *inputs])
        own = host_memory_of(inputs[root])
        sends = tuple((peer, bytes_of(host_memory_of(one))) for peer, one in enumerate(inputs) if peer != root)
        work = start_direct(self._communicator, "scatter", sends=sends, receives=(), about=about, root=root, **settings)
        return TensorWork([work], lambda: put_back(own, output))  # which may be one of the inputs: they have left

    def all_to_all(self, outputs: Tensors, inputs: Tensors, **settings: Unpack[BasicSettings]) -> TensorWork:
        """Make ``outputs[k]`` what rank k has as its ``inputs`` for this rank; sizes may differ from pair to pair."""
        check_one_for_each_rank("all_to_all", "output_tensor_list", outputs, self._num_ranks)
        check_one_for_each_rank("all_to_all", "input_tensor_list", inputs, self._num_ranks)
        check_tensors("all_to_all", [*outputs, *inputs])
        check_same_size("all_to_all, of what a rank has for itself,", [outputs[self._rank], inputs[self._rank]])
        landing = _landing(outputs)
        work = self._exchange(landing, [host_memory_of(one) for one in inputs], settings)
        return work.then(lambda: _put_all(landing, outputs))

    def all_to_all_single(
        self,
        output: torch.Tensor,
        source: torch.Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        **settings: Unpack[BasicSettings],
    ) -> TensorWork:
        """Do so with tensors of which each rank has the next so many rows; no splits: as many for each."""
        check_tensors("all_to_all_single", [output, source])
        landing = landing_memory_of(output)
        parts = _parts(landing, split_sizes("all_to_all_single, output", output, output_splits, self._num_ranks))
        brought = _parts(
            host_memory_of(source), split_sizes("all_to_all_single, input", source, input_splits, self._num_ranks)
        )
        check_same_size("all_to_all_single, of what a rank has for itself,", [parts[self._rank], brought[self._rank]])
        return self._exchange(parts, brought, settings).then(lambda: put_back(landing, output))

    def _exchange(
        self, landing: list[torch.Tensor], brought: list[torch.Tensor], settings: BasicSettings
    ) -> TensorWork:
        """Let what others have for this rank land, and send them what it has for them."""
        if touches(landing, brought):
            brought = [one.clone() for one in brought]  # what lands must not change what has yet to leave
        others = [peer for peer in range(self._num_ranks) if peer != self._rank]
        work = start_direct(
            self._communicator,
            "all_to_all",
            sends=tuple((peer, bytes_of(brought[peer])) for peer in others),
            receives=tuple((peer, bytes_of(landing[peer])) for peer in others),
            about=f"bytes of {dtype_name(brought[self._rank].dtype)}",
            **settings,
        )
        put_back(brought[self._rank], landing[self._rank])  # meanwhile: of two ranks, that is half of all
        return TensorWork([work], _do_nothing)


def _landing(outputs: Tensors) -> list[torch.Tensor]:
    """Return memory of each output's own: of outputs that overlap, the last one that is put in place counts."""
    hosts = [landing_memory_of(output) for output in outputs]
    if overlap(hosts):
        return [torch.empty(output.shape, dtype=output.dtype) for output in outputs]
    return hosts


def _check_none(call: str, name: str, tensors: Tensors | None, root: int) -> None:
    if tensors:
        raise ConfigurationError(f"{call}: rank {root} alone gives a {name}; give none on the other ranks")


def _put_all(hosts: Tensors, tensors: Tensors) -> None:
    for host, tensor in zip(hosts, tensors, strict=True):
        put_back(host, tensor)


def _parts(whole: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
    return list(torch.split(whole.reshape(-1), list(sizes)))


def _do_nothing() -> None:
    """All is in place already."""
