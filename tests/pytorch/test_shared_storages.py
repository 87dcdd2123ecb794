"""Parameters whose memory others use too: refused by name, as buckets would cut them off; others are left alone."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import syncline
from syncline.errors import UpdateError
from syncline.pytorch.fleet import Fleet
from thread_fleets import run_fleets

Build = Callable[[nn.Sequential], Any]
"""Changes a model of two layers, and returns what the program keeps."""


def two_layers() -> nn.Sequential:
    """Return a model whose parameters have 16 bytes each at most."""
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))


def train(model: nn.Module, fleet: Fleet) -> None:
    """Distribute a model and make a step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, distributed = syncline.distribute(model, optimizer, fleet=fleet)
    sum(parameter.square().sum() for parameter in model.parameters()).backward()
    distributed.step()


def in_one_vector(model: nn.Sequential) -> torch.Tensor:
    """Let all parameters be views of the vector that is returned."""
    flat = nn.utils.parameters_to_vector(model.parameters()).detach()
    nn.utils.vector_to_parameters(flat, model.parameters())
    return flat


def share_weights(model: nn.Sequential) -> None:
    """Let both weights lie in the same memory, as two parameters."""
    model[1].weight.data = model[0].weight.data


def reach_into(model: nn.Sequential) -> None:
    """Let one bias begin within the other layer's weight."""
    model[1].bias.data = model[0].weight.data.view(-1)[1:3]


def lie_in_a_frozen(model: nn.Sequential) -> None:
    """Let a weight that is not trained lie where one that is trained does."""
    share_weights(model)
    model[1].weight.requires_grad_(False)


def name_a_buffer(model: nn.Sequential) -> None:
    """Register a parameter's data as a buffer."""
    model.register_buffer("shown", model[0].bias.data)


def assign(model: nn.Sequential) -> dict[str, torch.Tensor]:
    """Take a state's own tensors as parameters, and keep the state."""
    state = two_layers().state_dict()
    model.load_state_dict(state, assign=True)
    return state


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (in_one_vector, r"'0.weight' is a part \(16 bytes\) of a larger storage \(48 bytes\), .* parameter '0.bias'"),
        (lambda model: model[1].bias.data, "'1.bias' shares its memory with another tensor"),
        (lambda model: model[1].bias.detach(), "'1.bias' shares its memory with another tensor"),
        (lambda model: model[1].bias.data.numpy(), "'1.bias' shares its memory with another tensor"),
        (lambda model: model[1].bias.data[1:], "'1.bias' shares its memory with another tensor"),
        (lambda model: model.state_dict(), "'0.weight' shares its memory with another tensor"),
        (lambda model: torch.utils.dlpack.to_dlpack(model[1].bias.data), "'1.bias' shares its memory with another"),
        (assign, "'0.weight' shares its memory with another tensor"),
        (name_a_buffer, "'0.bias' shares its memory with the buffer 'shown'"),
        (share_weights, "'0.weight' and '1.weight' lie in the same memory"),
        (lie_in_a_frozen, "'0.weight' and '1.weight' lie in the same memory"),
        (reach_into, "'0.weight' and '1.bias' lie in the same memory"),
        (nn.Module.share_memory, "'0.weight' is in memory that processes share"),
    ],
)
def test_memory_that_others_use_is_refused(build: Build, says: str) -> None:
    def body(fleet: Fleet) -> None:
        model = two_layers()
        kept = build(model)
        with pytest.raises(UpdateError, match=f"{says}.*" + re.escape("p.data = p.data.clone()")):
            train(model, fleet)
        del kept
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()
        if hasattr(model, "shown"):
            model.shown = model.shown.clone()
        train(model, fleet)

    run_fleets(1, body)


def flat_and_forgotten(model: nn.Sequential) -> None:
    """Let all parameters be views of a vector that nobody keeps."""
    in_one_vector(model)


def unreachable(model: nn.Sequential) -> None:
    """Leave the data of parameters in a cycle that nobody can reach."""
    cycle: list[Any] = [model[0].weight.data]
    cycle.append(cycle)


def tie(model: nn.Sequential) -> None:
    """Tie two weights as PyTorch's users do."""
    model[1].weight = model[0].weight


def load_mapped(model: nn.Sequential) -> None:
    """Take parameters from a mapped file."""
    path = Path("parameters.pt")
    torch.save(two_layers().state_dict(), path)
    model.load_state_dict(torch.load(path, mmap=True), assign=True)


def train_before(model: nn.Sequential) -> list[torch.Tensor]:
    """Train before, and keep the gradients and the loss."""
    loss = model(torch.ones(3, 2)).square().sum()
    loss.backward()
    return [loss, *(parameter.grad for parameter in model.parameters() if parameter.grad is not None)]


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated:FutureWarning")
@pytest.mark.parametrize(
    "make",
    [
        two_layers,
        lambda: nn.LSTM(3, 4, num_layers=2),
        lambda: nn.MultiheadAttention(4, 2),
        lambda: nn.TransformerEncoderLayer(4, 2),
        lambda: nn.utils.spectral_norm(nn.Linear(2, 2)),
        lambda: nn.utils.weight_norm(nn.Linear(2, 2)),
        lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(2, 2)),
        lambda: nn.utils.parametrizations.orthogonal(nn.Linear(2, 2)),
        lambda: copy.deepcopy(two_layers()),
        lambda: torch.compile(two_layers(), backend="eager"),
        lambda: torch.optim.swa_utils.AveragedModel(two_layers()).module,
    ],
)
def test_what_pytorch_makes_is_taken(make: Callable[[], nn.Module]) -> None:
    run_fleets(1, lambda fleet: train(make(), fleet))


@pytest.mark.parametrize("build", [flat_and_forgotten, unreachable, tie, load_mapped, train_before])
def test_memory_that_nobody_else_uses_is_taken(build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    def body(fleet: Fleet) -> None:
        model = two_layers()
        kept = build(model)
        train(model, fleet)
        del kept

    run_fleets(1, body)


def test_a_lazy_model_is_taken() -> None:
    def body(fleet: Fleet) -> None:
        model = nn.Sequential(nn.LazyLinear(2))
        model(torch.ones(1, 3))
        train(model, fleet)

    run_fleets(1, body)


def test_a_model_is_taken_again_with_what_was_kept_of_its_buckets() -> None:
    model = two_layers()
    run_fleets(1, lambda fleet: train(model, fleet))
    kept = [parameter.data for parameter in model.parameters()]
    run_fleets(1, lambda fleet: train(model, fleet))
    copied = copy.deepcopy(model)
    run_fleets(1, lambda fleet: train(copied, fleet))
    assert len(kept) == 4
