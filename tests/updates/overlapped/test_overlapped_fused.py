"""Steps in one kernel for all parameters, where torch has one and the user left the choice to it."""

from collections.abc import Callable

import pytest
import torch

from small_regression import make_adam, make_model
from syncline.updates.overlapped.rebase import stepping_at_once


def stepped(make: Callable[..., torch.optim.Optimizer], *, num_fused: int) -> list[torch.Tensor]:
    """Make five steps on made-up gradients, the last ``num_fused`` at once."""
    model = make_model()
    optimizer = make(model.parameters())
    generator = torch.Generator().manual_seed(1)
    gradients = [
        [torch.randn(p.shape, generator=generator, dtype=p.dtype) for p in model.parameters()] for _ in "12345"
    ]

    def step(number: int) -> None:
        for parameter, gradient in zip(model.parameters(), gradients[number], strict=True):
            parameter.grad = gradient
        optimizer.step()

    for number in range(5 - num_fused):
        step(number)
    with stepping_at_once(optimizer):
        for number in range(5 - num_fused, 5):
            step(number)
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize(
    "make",
    [
        make_adam,
        lambda parameters: torch.optim.AdamW(parameters, lr=0.1, weight_decay=0.1, amsgrad=True),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
        lambda parameters: torch.optim.Adagrad(parameters, lr=0.1),
    ],
)
@pytest.mark.parametrize("num_fused", [2, 5])
def test_fused_steps_are_the_same_but_for_rounding(make: Callable[..., torch.optim.Optimizer], num_fused: int) -> None:
    for fused, plain in zip(stepped(make, num_fused=num_fused), stepped(make, num_fused=0), strict=True):
        assert torch.allclose(fused, plain, rtol=1e-12, atol=1e-12)


def test_parameters_get_their_momentum_one_after_the_other() -> None:
    """One has a gradient that another has not; there is no kernel for both."""
    model = make_model()
    first, *others = model.parameters()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for gradients in ([first], [first, *others]):
        for parameter in gradients:
            parameter.grad = torch.ones_like(parameter)
        with stepping_at_once(optimizer):
            optimizer.step()
    assert torch.equal(optimizer.state[first]["momentum_buffer"], torch.full_like(first, 1.9))
    assert all(torch.equal(optimizer.state[one]["momentum_buffer"], torch.ones_like(one)) for one in others)


def test_only_where_the_user_left_the_choice_and_torch_knows_the_class() -> None:
    class Mine(torch.optim.Adam):
        pass

    parameters = list(make_model().parameters())
    open_choice = torch.optim.Adam(parameters)
    closed = [
        torch.optim.Adam(parameters, foreach=True),
        torch.optim.Adam(parameters, foreach=False),
        torch.optim.Adam(parameters, fused=False),
        torch.optim.Adam(parameters, lr=torch.tensor(0.1)),
        Mine(parameters),
        torch.optim.Adamax(parameters),
    ]
    for optimizer in closed:
        before = [dict(group) for group in optimizer.param_groups]
        with stepping_at_once(optimizer):
            assert [group.get("fused") for group in optimizer.param_groups] == [g.get("fused") for g in before]
    with stepping_at_once(open_choice):
        assert open_choice.param_groups[0]["fused"] is True
    assert open_choice.param_groups[0]["fused"] is None


def test_half_precision_is_left_to_the_steps_that_are_right() -> None:
    for dtype, is_fused in ((torch.bfloat16, None), (torch.float16, None), (torch.float32, True)):
        optimizer = torch.optim.SGD(make_model().to(dtype).parameters(), lr=0.1)
        with stepping_at_once(optimizer):
            assert optimizer.param_groups[0]["fused"] is is_fused


def test_an_error_gives_the_choice_back() -> None:
    optimizer = torch.optim.Adam(list(make_model().parameters()))
    with pytest.raises(RuntimeError, match="mine"), stepping_at_once(optimizer):
        raise RuntimeError("mine")
    assert optimizer.param_groups[0]["fused"] is None


def test_steps_that_are_counted_in_float64_are_left_alone() -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        optimizer = torch.optim.Adam(list(make_model().parameters()))
        with stepping_at_once(optimizer):
            assert optimizer.param_groups[0]["fused"] is None
    finally:
        torch.set_default_dtype(before)
