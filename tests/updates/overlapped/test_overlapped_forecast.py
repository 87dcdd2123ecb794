"""The forecast of a global gradient: near the own one where workers see alike data, near the last global one else."""

import torch

from small_regression import make_adam, make_model, parameters_of
from syncline.pytorch.flatten import flatten, plan_model, trained_parameters
from syncline.updates.overlapped.rebase import Forecast, Pulled, Rebase, stepping_at_once

NUM_WORKERS, SIZE, NUM_TURNS = 8, 200, 40


def learnt(*, noise: float, drift: float) -> tuple[Forecast, float, float]:
    """Return a worker's forecast after many rounds, its mean error and that of the own gradient alone.

    The common gradient moves by ``drift`` from round to round; each worker's differs from it by ``noise``.
    """
    generator = torch.Generator().manual_seed(5)
    common = torch.randn(SIZE, generator=generator)
    forecast, errors, own_errors = Forecast(), 0.0, 0.0
    for _ in range(NUM_TURNS):
        common = common + drift * torch.randn(SIZE, generator=generator)
        gradients = common + noise * torch.randn(NUM_WORKERS, SIZE, generator=generator)
        mean = gradients.mean(0)
        errors += float((forecast.of(gradients[0]) - mean).norm())
        own_errors += float((gradients[0] - mean).norm())
        forecast.learn(mean, gradients[0])
    return forecast, errors / NUM_TURNS, own_errors / NUM_TURNS


def test_where_workers_see_alike_data_the_own_gradient_tells_most() -> None:
    forecast, error, own_error = learnt(noise=0.01, drift=1.0)
    assert forecast.weight > 0.98
    assert error < 1.1 * own_error


def test_where_they_see_different_data_the_last_global_gradient_tells_most() -> None:
    forecast, error, own_error = learnt(noise=5.0, drift=0.1)
    assert forecast.weight < 0.3
    assert error < 0.7 * own_error


def test_before_a_global_gradient_has_come_there_is_but_the_own_one() -> None:
    own = torch.ones(3)
    assert Forecast().of(own) is own


def test_without_an_own_gradient_in_it_a_global_one_is_taken_but_teaches_nothing() -> None:
    forecast = Forecast()
    forecast.learn(torch.ones(3), torch.tensor([1.0, 1.0, 5.0]))
    weight = forecast.weight
    assert 0 < weight < 1
    forecast.learn(torch.full((3,), 2.0), None)
    assert forecast.weight == weight
    assert torch.allclose(forecast.of(torch.zeros(3)), torch.full((3,), 2.0 * (1 - weight)))


def test_at_a_periods_end_own_gradients_are_stepped_on_once_and_leave_no_mark_on_the_state() -> None:
    """Two global gradients, then two own ones by forecast; the state is that of an optimizer which saw the global ones.

    The parameters are what plain own steps on top of the global ones make.
    """
    models = [make_model() for _ in range(3)]
    optimizers = [make_adam(model.parameters()) for model in models]
    generator = torch.Generator().manual_seed(2)
    size = parameters_of(models[0]).numel()
    common, own = (torch.randn(2, size, generator=generator, dtype=torch.float64) for _ in range(2))
    with torch.no_grad():
        every = [
            flatten(named, plan_model(named, bucket_bytes=10**6))
            for named in (trained_parameters(*pair) for pair in zip(models, optimizers, strict=True))
        ]
    (bucket,) = every[0]
    rebase = Rebase(every[0], optimizers[0])
    rebase.begin()
    for change in common:
        rebase.step([Pulled(change.clone(), 1, own[0].clone(), 1)], [[]])
    for number in (1, 2):
        bucket.gradients.copy_(own[number - 1])
        rebase.step([None], [[(one, 1) for one in own[:number]]])
    rebase.finish([[(one, 1) for one in own]])
    for (twin,), optimizer, gradients in zip(every[1:], optimizers[1:], (common, [*common, *own]), strict=True):
        for gradient in gradients:
            twin.gradients.copy_(gradient)
            for slot, tensor in zip(twin.plan.slots, twin.tensors, strict=True):
                tensor.grad = twin.gradient(slot)
            with stepping_at_once(optimizer):
                optimizer.step()
    assert torch.allclose(bucket.parameters, every[2][0].parameters, rtol=1e-12)
    for mine, twin in zip(models[0].parameters(), models[1].parameters(), strict=True):
        for key in ("step", "exp_avg", "exp_avg_sq"):
            assert torch.equal(optimizers[0].state[mine][key], optimizers[1].state[twin][key]), key
