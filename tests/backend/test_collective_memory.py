"""Tensors whose memory is not simply theirs: strided, aliased, given twice, of autograd; and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_group_collectives import check_moves, check_reductions

from syncline.backend.calls import all_reduce_sparse
from syncline.errors import ConfigurationError
from syncline.tensors import collectives as tensor_collectives, memory
from syncline.tensors.collectives import TensorCollectives
from syncline.tensors.work import TensorWork
from syncline.updates.private_torch import tree_leaves

WORLD = 3
SUM = dist.ReduceOp.SUM


def strided(value: float = 0.0) -> torch.Tensor:
    """Six numbers, each second of a row of four, and of a matrix that lies the other way round."""
    return torch.full((4, 3), float(value)).t()[:, ::2]


def test_elements_that_share_memory_are_written_as_one(run_ranks: Any) -> None:
    def body(collectives: TensorCollectives, communicator: Any) -> None:
        rank = communicator.rank
        shared = [torch.full((1,), float(rank)).expand(4) for _ in range(4)]
        collectives.all_reduce(shared[0], SUM).wait()
        collectives.broadcast(shared[1], 2).wait()
        collectives.all_gather([shared[2], torch.empty(4), torch.empty(4)], torch.full((4,), rank + 1.0)).wait()
        collectives.scatter(shared[3], [torch.ones(4)] * WORLD if rank == 0 else None, 0).wait()
        assert [tensor.tolist() for tensor in shared] == [[3.0] * 4, [2.0] * 4, [1.0] * 4, [1.0] * 4]
        collectives.barrier().wait()

    run_ranks(WORLD, body)


def test_strided_inputs_and_outputs(run_ranks: Any) -> None:
    def body(collectives: TensorCollectives, communicator: Any) -> None:
        rank = communicator.rank
        tensor = strided(rank + 1.0)
        collectives.all_reduce(tensor, SUM).wait()
        assert tensor.eq(6).all()
        assert tensor._base is not None
        assert tensor._base.eq(rank + 1).sum() == 6, "what lies between is not touched"
        tensor = strided(rank)
        collectives.broadcast(tensor, 1).wait()
        assert tensor.eq(1).all()
        outputs = [strided() for _ in range(WORLD)]
        collectives.all_gather(outputs, strided(rank)).wait()
        assert [output.unique().tolist() for output in outputs] == [[0], [1], [2]]
        whole = torch.zeros(9, 4)[:, ::2]
        collectives.all_gather_single(whole, strided(rank)).wait()
        assert whole.sum(1).tolist() == [0, 0, 0, 2, 2, 2, 4, 4, 4]
        part = strided()
        collectives.reduce_scatter(part, [strided(k) for k in range(WORLD)], SUM).wait()
        assert part.eq(3 * rank).all()
        collectives.reduce_scatter_single(part, torch.ones(9, 4)[:, ::2], SUM).wait()
        assert part.eq(3).all()
        outputs = [strided() for _ in range(WORLD)]
        collectives.gather(outputs if rank == 0 else None, strided(rank), 0).wait()
        assert rank or [output.unique().tolist() for output in outputs] == [[0], [1], [2]]
        collectives.scatter(part, [strided(k) for k in range(WORLD)] if rank == 0 else None, 0).wait()
        assert part.eq(rank).all()
        outputs = [strided() for _ in range(WORLD)]
        collectives.all_to_all(outputs, [strided(10 * rank + k) for k in range(WORLD)]).wait()
        assert [output.unique().tolist() for output in outputs] == [[rank], [10 + rank], [20 + rank]]
        output = torch.zeros(3, 4)[:, ::2]
        collectives.all_to_all_single(output, torch.full((4, 3), float(rank)).t()[:, ::2]).wait()
        assert output.tolist() == [[0, 0], [1, 1], [2, 2]]

    run_ranks(WORLD, body)


@pytest.mark.parametrize("is_awaited", [False, True])
def test_an_input_that_is_part_of_the_output(is_awaited: bool, run_ranks: Any) -> None:
    def body(collectives: TensorCollectives, communicator: Any) -> None:
        rank = communicator.rank
        whole = torch.full((6,), -1.0)
        own = whole[2 * rank : 2 * rank + 2].fill_(rank)
        collectives.all_gather_single(whole, own, is_awaited=is_awaited).wait()
        assert whole.tolist() == [0, 0, 1, 1, 2, 2]
        outputs = list(torch.full((6,), -1.0).split(2))
        outputs[rank].fill_(rank)
        collectives.all_gather(outputs, outputs[rank], is_awaited=is_awaited).wait()
        assert [output.tolist() for output in outputs] == [[0, 0], [1, 1], [2, 2]]
        outputs = list(torch.full((6,), -1.0).split(2))
        collectives.all_gather(outputs, outputs[(rank + 1) % WORLD].fill_(rank), is_awaited=is_awaited).wait()
        assert [output.tolist() for output in outputs] == [[0, 0], [1, 1], [2, 2]]
        source = torch.arange(6.0)
        own = source[2 * rank : 2 * rank + 2]
        collectives.reduce_scatter_single(own, source, SUM, is_awaited=is_awaited).wait()
        expected = torch.arange(6.0)
        expected[2 * rank : 2 * rank + 2] *= 3
        assert torch.equal(source, expected)
        outputs = [torch.full((20_000,), -1.0) for _ in range(WORLD)]
        outputs[(rank + 1) % WORLD].fill_(rank)
        collectives.gather(outputs if rank == 2 else [], outputs[(rank + 1) % WORLD], 2, is_awaited=is_awaited).wait()
        assert rank != 2 or [output.unique().tolist() for output in outputs] == [[0], [1], [2]]
        inputs = [torch.full((20_000,), float(k)) for k in range(WORLD)]
        collectives.scatter(inputs[0], inputs if rank == 1 else None, 1, is_awaited=is_awaited).wait()
        assert inputs[0].eq(rank).all()

    run_ranks(WORLD, body)


def calls_with_their_tensors(rank: int) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Name every call of two ranks, with what it is given."""
    row, whole = partial(torch.ones, 4), partial(torch.ones, 8)
    yield "all_reduce", (row(), SUM)
    yield "all_reduce_coalesced", ([row(), row()], SUM)
    yield "broadcast", (row(), 0)
    yield "reduce", (row(), 0, SUM)
    yield "all_gather", ([row(), row()], row())
    yield "all_gather_single", (whole(), row())
    yield "all_gather_coalesced", ([[row(), row()], [row(), row()]], [row(), row()])
    yield "all_gather_single_coalesced", ([whole(), whole()], [row(), row()])
    yield "reduce_scatter", (row(), [row(), row()], SUM)
    yield "reduce_scatter_single", (row(), whole(), SUM)
    yield "reduce_scatter_single_coalesced", ([row(), row()], [whole(), whole()], SUM)
    yield "gather", ([row(), row()] if rank == 0 else [], row(), 0)
    yield "scatter", (row(), [row(), row()] if rank == 0 else [], 0)
    yield "all_to_all", ([row(), row()], [row(), row()])
    yield "all_to_all_single", (row(), row())


@pytest.mark.parametrize("is_awaited", [False, True])
def test_tensors_can_be_resized_after_every_call(is_awaited: bool, run_ranks: Any) -> None:
    """FSDP frees a parameter so, and takes memory for it anew; who only lent the memory must not prevent that."""

    def body(collectives: TensorCollectives, communicator: Any) -> None:
        if is_awaited:
            communicator.open_segment()
        for name, arguments in calls_with_their_tensors(communicator.rank):
            getattr(collectives, name)(*arguments, is_awaited=is_awaited).wait()
            tensors = [one for one in tree_leaves(arguments) if isinstance(one, torch.Tensor)]
            assert tensors, name
            for tensor in tensors:
                tensor.untyped_storage().resize_(0)
                tensor.untyped_storage().resize_(1024)

    run_ranks(2, body)


ONE_ELEMENT: dict[str, Callable[[], torch.Tensor]] = {
    "of a column": lambda: torch.ones(4, 3)[0:1, 2],
    "of 16 bits": lambda: torch.ones(4, 3, dtype=torch.bfloat16)[0:1, 2],
    "of each second": lambda: torch.ones(4, dtype=torch.int16)[::2][:1],
    "of a turned matrix": lambda: torch.ones(4, 3, dtype=torch.complex64).t()[:1, :1],
}


@pytest.mark.parametrize("name", ONE_ELEMENT)
def test_one_element_may_have_any_stride(name: str, run_ranks: Any) -> None:
    """Torch takes it as contiguous."""

    def body(collectives: TensorCollectives, communicator: Any) -> None:
        tensor = ONE_ELEMENT[name]()
        assert (tensor.is_contiguous(), set(tensor.stride()) != {1}) == (True, True)
        collectives.all_reduce(tensor, SUM).wait()
        assert tensor.flatten().tolist() == [2]
        collectives.broadcast(tensor, 1).wait()
        outputs = [torch.zeros_like(tensor) for _ in range(2)]
        collectives.all_gather(outputs, tensor).wait()
        assert [output.flatten().tolist() for output in outputs] == [[2], [2]]
        sparse = torch.eye(1, dtype=tensor.dtype).to_sparse()
        all_reduce_sparse(collectives, sparse, SUM, num_ranks=2).wait()
        assert sparse.to_dense().tolist() == [[2]]

    run_ranks(2, body)


def test_all_to_all_in_place(run_ranks: Any) -> None:
    """Rank r brings 10 r + k for rank k, in more bytes than are sent before they are asked for."""

    def body(collectives: TensorCollectives, communicator: Any) -> None:
        rank = communicator.rank
        source = torch.arange(3.0).repeat_interleave(20_000) + 10 * rank
        collectives.all_to_all_single(source, source).wait()
        assert source.unique().tolist() == [rank, 10 + rank, 20 + rank]
        tensors = [torch.full((20_000,), 10.0 * rank + k) for k in range(WORLD)]
        collectives.all_to_all(tensors[::-1], tensors).wait()
        assert [tensor.unique().tolist() for tensor in tensors[::-1]] == [[rank], [10 + rank], [20 + rank]]

    run_ranks(WORLD, body)


def test_outputs_that_are_given_twice_hold_one_rank_whole(run_ranks: Any) -> None:
    def body(collectives: TensorCollectives, communicator: Any) -> list[list[float]]:
        rank = communicator.rank
        source = torch.full((20_000,), float(rank))
        gathered, received, collected = (torch.empty(20_000) for _ in range(3))
        collectives.all_gather([gathered] * WORLD, source).wait()
        collectives.gather([collected] * WORLD if rank == 0 else [], source, 0).wait()
        collectives.all_to_all([received] * WORLD, [source] * WORLD).wait()
        return [gathered.unique().tolist(), received.unique().tolist(), collected.unique().tolist() if not rank else []]

    assert run_ranks(WORLD, body) == [[[2.0], [2.0], [2.0]], [[2.0], [2.0], []], [[2.0], [2.0], []]]


def test_lists_of_neighbouring_memory_need_no_copy(run_ranks: Any) -> None:
    """The parts land where they belong, as an all-gather of objects has them; one that is not in order is copied."""

    def body(collectives: TensorCollectives, communicator: Any) -> None:
        whole = torch.zeros(8)
        parts = list(whole[1:7].split(2))
        collectives.all_gather(parts, torch.full((2,), communicator.rank + 1.0)).wait()
        assert whole.tolist() == [0, 1, 1, 2, 2, 3, 3, 0]
        collectives.all_gather(parts[::-1], torch.full((2,), communicator.rank + 1.0)).wait()
        assert whole.tolist() == [0, 3, 3, 2, 2, 1, 1, 0]
        output = torch.empty(2)
        collectives.reduce_scatter(output, parts, SUM).wait()
        assert output.tolist() == [9.0 - 3 * communicator.rank] * 2
        assert whole.tolist() == [0, 3, 3, 2, 2, 1, 1, 0], "the input stays as it is"

    run_ranks(WORLD, body)


def test_tensors_of_autograd(run_ranks: Any) -> None:
    def body(collectives: TensorCollectives, communicator: Any) -> None:
        leaf = torch.full((3,), communicator.rank + 1.0, requires_grad=True)
        collectives.all_reduce(leaf, SUM).wait()
        assert leaf.tolist() == [6, 6, 6]
        assert leaf.requires_grad
        outputs = [torch.empty(3) for _ in range(WORLD)]
        collectives.all_gather(outputs, leaf * 2).wait()
        assert not outputs[0].requires_grad
        part = torch.empty(1, requires_grad=True)
        collectives.reduce_scatter_single(part, leaf, SUM).wait()
        assert part.item() == 18

    run_ranks(WORLD, body)


def test_tensors_of_an_inference(run_ranks: Any) -> None:
    """Their works may be ended where no inference goes on, as by a thread of their own."""

    def body(collectives: TensorCollectives, communicator: Any) -> None:
        rank, average = communicator.rank, dist.ReduceOp.AVG
        with torch.inference_mode():
            whole, row, source, part, rows = (torch.ones(3), strided(1), torch.ones(3), torch.zeros(1), torch.zeros(3))
            outputs = [torch.zeros(1) for _ in range(WORLD)]

        def begin() -> list[TensorWork]:
            return [
                collectives.all_reduce(whole, average),
                collectives.all_reduce(row, average),
                collectives.reduce_scatter_single(part, source, average),
                collectives.all_gather_single(rows, source[:1]),
                collectives.all_gather(outputs, source[:1]),
                collectives.all_to_all_single(rows, source),
                collectives.gather(outputs if rank == 0 else None, source[:1], 0),
            ]

        with torch.inference_mode():
            works = begin()
        for work in works:
            work.wait()
        for work in begin():
            work.wait()
        for tensor in (whole, row, source, part, rows, *outputs):
            assert tensor.eq(1).all()

    run_ranks(WORLD, body)


def test_conjugates_are_what_they_stand_for(run_ranks: Any) -> None:
    def body(collectives: TensorCollectives, communicator: Any) -> None:
        memory = torch.full((2,), complex(1, communicator.rank + 1))
        collectives.all_reduce(memory.conj(), SUM).wait()
        assert memory.tolist() == [3 + 6j, 3 + 6j]
        collectives.broadcast(memory.imag.neg() if communicator.rank else memory.conj().imag, 0).wait()

    run_ranks(WORLD, body)


class FakeDevice:
    """Stands in for tensors on a device: none can be sent or written as it is."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_copied = 0
        for module in (memory, tensor_collectives):
            monkeypatch.setattr(module, "is_plain", lambda _: False)
            monkeypatch.setattr(module, "host_memory_of", self.copy)

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        self.num_copied += 1
        return tensor.detach().clone().contiguous()


@pytest.mark.parametrize("is_awaited", [False, True])
def test_tensors_on_a_device_go_through_host_memory(
    is_awaited: bool, monkeypatch: pytest.MonkeyPatch, run_ranks: Any
) -> None:
    device = FakeDevice(monkeypatch)

    def body(collectives: TensorCollectives, communicator: Any) -> None:
        rank = communicator.rank
        check_moves(collectives, rank, torch.float32, (2, 3))
        check_reductions(collectives, rank, "AVG", torch.float64)
        source, output = torch.arange(3.0) + 10 * rank, torch.empty(3)
        collectives.all_to_all_single(output, source, is_awaited=is_awaited).wait()
        assert output.tolist() == [rank, 10 + rank, 20 + rank]
        whole = torch.empty(9)
        collectives.all_gather_single(whole, source, is_awaited=is_awaited).wait()
        assert whole.tolist() == [0, 1, 2, 10, 11, 12, 20, 21, 22]

    run_ranks(WORLD, body)
    assert device.num_copied > 0


def refused() -> dict[str, tuple[Callable[[TensorCollectives], object], str]]:
    some, other = torch.ones(2), torch.ones(2, dtype=torch.int32)
    eight_bits = torch.ones(2).to(torch.float8_e5m2)
    return {
        "sparse": (lambda c: c.all_reduce(torch.ones(2).to_sparse(), SUM), "dense tensors, not sparse_coo.*to_dense"),
        "meta": (lambda c: c.broadcast(torch.ones(2, device="meta"), 0), "meta tensor"),
        "two types": (
            lambda c: c.all_gather([some, other], some),
            "one number type, not of torch.float32, torch.int32",
        ),
        "sum of 8 bits": (lambda c: c.all_reduce(eight_bits, SUM), "float8_e5m2 cannot be summed.*convert"),
        "mean of bool": (lambda c: c.all_reduce(other.bool(), dist.ReduceOp.AVG), "ReduceOp.AVG of torch.bool"),
        "factor of integers": (
            lambda c: c.all_reduce(other, dist._make_nccl_premul_sum(2.0)),
            "ReduceOp.PREMUL_SUM of torch.int32.*convert",
        ),
        "no factor": (lambda c: c.all_reduce(some, dist.ReduceOp.PREMUL_SUM), "needs a factor"),
        "bits of floats": (lambda c: c.all_reduce(some, dist.ReduceOp.BAND), "no band of torch.float32"),
        "order of complex": (lambda c: c.all_reduce(some + 1j, dist.ReduceOp.MAX), "no order"),
        "no op": (lambda c: c.all_reduce(some, None), "must be a torch.distributed.ReduceOp: SUM, .*, not None"),  # type: ignore[arg-type]
        "one list short": (lambda c: c.all_gather([some], some), "one tensor for each of 2 ranks, not 1"),
        "no list": (lambda c: c.gather(None, some, 0), "one tensor for each of 2 ranks, not 0"),
        "own part": (lambda c: c.all_gather([torch.ones(3), torch.ones(3)], some), "one size, not of 2, 3 elements"),
        "whole": (lambda c: c.all_gather_single(torch.ones(3), some), "2 .ranks. times the part"),
        "splits": (lambda c: c.all_to_all_single(some, some, [1, 2], [1, 1]), "2 numbers of rows, 2 together"),
        "no equal splits": (lambda c: c.all_to_all_single(torch.ones(3), torch.ones(3)), "3 rows, which 2 ranks"),
        "root": (lambda c: c.scatter(some, None, 2), "root must be a rank, 0 to 1, not 2"),
        "lists": (lambda c: c.all_gather_single_coalesced([some], []), "as many outputs as inputs, not 1 and 0"),
    }


def test_what_cannot_be_done_is_refused_and_spoils_nothing(run_ranks: Any) -> None:
    def body(collectives: TensorCollectives, communicator: Any) -> float:
        if communicator.rank == 0:
            for begin, message in refused().values():
                with pytest.raises(ConfigurationError, match=message):
                    begin(collectives)
        tensor = torch.ones(1)
        collectives.all_reduce(tensor, SUM).wait()
        return tensor.item()

    assert run_ranks(2, body) == [2, 2]
