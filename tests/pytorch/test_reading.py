"""Which module waits for which bucket."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from syncline.pytorch.flatten import flatten, plan_model, trained_parameters
from syncline.pytorch.reading import Reading
from syncline.updates.bucket import Bucket


class Recorder:
    """Waits for nothing, and remembers who was waited for."""

    def __init__(self, model: nn.Module) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        named = trained_parameters(model, optimizer)
        self.buckets: tuple[Bucket, ...] = flatten(named, plan_model(named, bucket_bytes=1))
        self.names = [bucket.plan.slots[0].name for bucket in self.buckets]
        self.waited: list[tuple[str, ...]] = []
        self.reading = Reading(model, self.buckets, self.wait)
        self.model = model

    def wait(self, buckets: tuple[int, ...]) -> None:
        self.waited.append(tuple(self.names[index] for index in buckets))

    def second_call(self, *inputs: torch.Tensor) -> list[tuple[str, ...]]:
        """Return what is waited for, module by module, once everything was found out."""
        self.model(*inputs)
        assert self.waited[0] == tuple(self.names), "at first everything is waited for"
        self.waited.clear()
        self.model(*inputs)
        return self.waited


def test_layers_wait_for_their_own() -> None:
    recorder = Recorder(nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)))
    assert recorder.second_call(torch.ones(1, 2)) == [(), ("0.weight", "0.bias"), (), ("2.weight", "2.bias")]


def test_attention_waits_for_the_projection_that_it_never_calls() -> None:
    recorder = Recorder(nn.MultiheadAttention(4, 2, batch_first=True))
    (waited,) = recorder.second_call(*[torch.ones(1, 3, 4)] * 3)
    assert set(waited) == {"in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias"}


def test_without_gradients_everything_is_waited_for() -> None:
    """A fused layer reads its children's weights without calling them, but not while it is watched."""
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
    recorder = Recorder(layer)
    assert ("linear1.weight", "linear1.bias") in recorder.second_call(torch.ones(1, 3, 4))
    recorder.waited.clear()
    layer.eval()
    with torch.no_grad():
        layer(torch.ones(1, 3, 4))
    assert set(recorder.waited) == {tuple(recorder.names)}


def test_a_functional_read_counts_for_the_module_that_is_called() -> None:
    class Parent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.child = nn.Linear(2, 2)
            self.late = nn.Linear(2, 2)
            self.scales = nn.ParameterList([nn.Parameter(torch.ones(2))])
            self.spare = nn.Parameter(torch.ones(2))

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            hidden = nn.functional.linear(inputs, weight=self.child.weight) * self.scales[0]
            return self.late(hidden)

    recorder = Recorder(Parent())
    root, late = recorder.second_call(torch.ones(1, 2))
    # child.bias was never seen to be read, so the outermost module waits for it
    assert set(root) == {"child.weight", "child.bias", "scales.0", "spare"}
    assert set(late) == {"late.weight", "late.bias"}


def test_a_failed_call_is_not_believed() -> None:
    class Fragile(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, inputs: torch.Tensor, fails: Any) -> torch.Tensor:
            hidden = self.first(inputs)
            if fails:
                raise KeyError
            return nn.functional.linear(hidden, self.second.weight)

    model = Fragile()
    recorder = Recorder(model)
    try:
        model(torch.ones(1, 2), True)
    except KeyError:
        recorder.waited.clear()
    assert "second.weight" in recorder.second_call(torch.ones(1, 2), torch.tensor(False))[0]


def test_hooks_go_away() -> None:
    recorder = Recorder(nn.Sequential(nn.Linear(2, 2)))
    recorder.reading.remove()
    recorder.model(torch.ones(1, 2))
    assert not recorder.waited
