"""Networks of which not all is used or trained at all times: experts, exits, growth, masks, adapters, codebooks."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from declarations import program
from torch import nn
from torch.nn.utils import parametrize, prune

from programs.small import adam, final, mse, perceptron, sgd, train, trained

if TYPE_CHECKING:
    from neutral_run import Run

Values = dict[str, Any]
functional = nn.functional


class Experts(nn.Module):
    """Each sample goes to its best expert, with a loss that balances them; some experts get none."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(6, 4)
        self.experts = nn.ModuleList(nn.Linear(6, 3) for _ in range(4))

    def forward(self, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights = self.gate(inputs).softmax(-1)
        best, chosen = weights.max(-1)
        output = inputs.new_zeros(len(inputs), 3)
        for number in chosen.unique().tolist():
            rows = (chosen == number).nonzero().flatten()
            output = output.index_add(0, rows, self.experts[number](inputs[rows]) * best[rows, None])
        return output, weights.mean(0).square().sum()


@program("a mixture of experts: each rank's samples use some experts alone, Adam", worlds=(2, 3), has_union=False)
def experts(run: Run) -> Values:
    model = Experts()
    model, optimizer = run.wrap(model, adam(model), find_unused_parameters=True)
    for inputs, targets in run.pairs(5, size=3):
        optimizer.zero_grad()
        output, balance = model(inputs)
        (mse(output, targets) + 0.1 * balance).backward()
        optimizer.step()
    return final(run, model)


class Depth(nn.Module):
    """Residual blocks that are left out at random, and an exit behind each."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.exits = nn.ModuleList(nn.Linear(6, 3) for _ in range(4))

    def forward(self, inputs: torch.Tensor, kept: list[bool], depth: int) -> torch.Tensor:
        hidden = inputs
        for block, is_kept in zip(self.blocks[:depth], kept, strict=False):
            if is_kept:
                hidden = hidden + torch.tanh(block(hidden))
        return self.exits[depth - 1](hidden)


@program("stochastic depth: blocks left out at random, otherwise on each rank", has_union=False)
def stochastic_depth(run: Run) -> Values:
    model = Depth()
    model, optimizer = run.wrap(model, sgd(model, momentum=0.9), find_unused_parameters=True)
    draw = torch.Generator().manual_seed(run.rank)
    for inputs, targets in run.pairs(5):
        optimizer.zero_grad()
        kept = (torch.rand(4, generator=draw) < 0.6).tolist()
        mse(model(inputs, kept, 4), targets).backward()
        optimizer.step()
    return final(run, model)


@program("early exits: each step trains the network to another depth")
def early_exits(run: Run) -> Values:
    model = Depth()
    model, optimizer = run.wrap(model, adam(model), find_unused_parameters=True)
    for step, (inputs, targets) in enumerate(run.pairs(6)):
        optimizer.zero_grad()
        mse(model(inputs, [True] * 4, 1 + step % 4), targets).backward()
        optimizer.step()
    return final(run, model)


@program("the sandwich rule: widths of one slimmable layer, several backward passes for a step", has_union=False)
def slimmable(run: Run) -> Values:
    class Slim(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(6, 12), nn.Linear(12, 3)

        def forward(self, inputs: torch.Tensor, width: int) -> torch.Tensor:
            hidden = torch.tanh(functional.linear(inputs, self.first.weight[:width], self.first.bias[:width]))
            return functional.linear(hidden, self.last.weight[:, :width], self.last.bias)

    model = Slim()
    model, optimizer = run.wrap(model, adam(model))
    for inputs, targets in run.pairs(3):
        optimizer.zero_grad()
        whole = model(inputs, 12)
        mse(whole, targets).backward()
        for width in (3, 7):
            mse(model(inputs, width), whole.detach()).backward()
        optimizer.step()
    return final(run, model)


@program("a network that grows: a new layer and a new optimizer, distributed again")
def grown(run: Run) -> Values:
    body = nn.Sequential(nn.Linear(6, 9), nn.Tanh())
    model = nn.Sequential(body, nn.Linear(9, 3))
    wrapped, optimizer = run.wrap(model, adam(model))
    losses = train(run, wrapped, optimizer, steps=3)
    grown = nn.Sequential(copy.deepcopy(run.module(wrapped))[0], nn.Linear(9, 9), nn.Tanh(), nn.Linear(9, 3))
    grown[3].load_state_dict(run.module(wrapped)[1].state_dict())
    model, optimizer = run.wrap(grown, adam(grown))
    return final(run, model, losses=losses + train(run, model, optimizer, steps=3))


@program("lottery tickets: pruned by size, weights put back to their first values, trained again with a mask")
def lottery_ticket(run: Run) -> Values:
    model = perceptron()
    first = copy.deepcopy(model.state_dict())
    model, optimizer = run.wrap(model, sgd(model, momentum=0.9))
    masks: dict[str, torch.Tensor] = {}
    losses: list[float] = []

    def mask(_: int) -> None:
        for name, parameter in run.module(model).named_parameters():
            if name in masks:
                parameter.data *= masks[name]

    for _ in range(2):
        losses += train(run, model, optimizer, steps=3, after_step=mask)
        for name, parameter in run.module(model).named_parameters():
            if parameter.ndim > 1:
                limit = parameter.detach().abs().flatten().kthvalue(parameter.numel() // 4).values
                masks[name] = (parameter.detach().abs() > limit).double()
        run.module(model).load_state_dict(first)
        mask(0)
    return final(run, model, losses=losses + train(run, model, optimizer, steps=3, after_step=mask))


@program("torch.nn.utils.prune: a mask in a buffer, made denser in the middle, removed at the end")
def pruned(run: Run) -> Values:
    model = perceptron()
    for layer in (model[0], model[2]):
        prune.l1_unstructured(layer, "weight", amount=0.3)
    model, optimizer = run.wrap(model, adam(model))
    losses = train(run, model, optimizer, steps=3)
    layers = run.module(model)
    smallest = layers[0].weight_orig.detach().abs().flatten().argsort()[:40]
    layers[0].weight_mask.view(-1)[smallest] = 0.0
    losses += train(run, model, optimizer, steps=3)
    copied = copy.deepcopy(layers.state_dict())
    return {"losses": losses, **copied, "zeros": int((layers[0].weight_mask == 0).sum())}


class LowRank(nn.Module):
    """A frozen layer with a trained update of low rank, which is merged into the weight for evaluation."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(requires_grad=False)
        self.down = nn.Parameter(torch.randn(2, base.in_features) * 0.3)
        self.up = nn.Parameter(torch.zeros(base.out_features, 2))
        self.is_merged = False

    def train(self, mode: bool = True) -> LowRank:
        super().train(mode)
        if mode == self.is_merged:
            with torch.no_grad():
                self.base.weight.data += (-1 if mode else 1) * (self.up @ self.down)
            self.is_merged = not mode
        return self

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        output = self.base(inputs)
        return output if self.is_merged else output + inputs @ self.down.t() @ self.up.t()


@program("LoRA that merges its update into the frozen weight in eval(), and takes it out again in train()")
def merged_for_evaluation(run: Run) -> Values:
    model = nn.Sequential(LowRank(nn.Linear(6, 9)), nn.Tanh(), LowRank(nn.Linear(9, 3)))
    model, optimizer = run.wrap(
        model, torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=0.05)
    )
    scores, losses = [], []
    for _ in range(3):
        losses += train(run, model, optimizer, steps=2)
        run.module(model).eval()
        with torch.no_grad():
            scores.append(float(run.mean(run.module(model)(run.normal(4, 6)).square().mean())))
        run.module(model).train()
    return final(run, model, scores=scores, losses=losses)


@program("a second adapter put beside the first in the middle, distributed with an optimizer of its own", has_ddp=False)
def adapter_added(run: Run) -> Values:
    model = nn.Sequential(LowRank(nn.Linear(6, 9)), nn.Tanh(), nn.Linear(9, 3).requires_grad_(requires_grad=False))
    model, optimizer = run.wrap(model, adam(model[0], lr=0.05))
    losses = train(run, model, optimizer, steps=2)
    model[0].down.requires_grad_(requires_grad=False)
    model[0].up.requires_grad_(requires_grad=False)
    outer = nn.Sequential(model, LowRank(nn.Linear(3, 3)))
    outer, optimizer = run.wrap(outer, adam(outer[1], lr=0.05))
    return final(run, outer, losses=losses + train(run, outer, optimizer, steps=2))


class FakeQuantised(nn.Linear):
    """Quantisation-aware training: weights rounded by a straight-through estimator, ranges in buffers."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.register_buffer("largest", torch.tensor(1.0))
        self.register_buffer("count", torch.tensor(0))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.largest.mul_(0.9).add_(inputs.detach().abs().max(), alpha=0.1)
            self.count += 1
        scale = (self.weight.detach().abs().max() / 127).float()
        weight = torch.fake_quantize_per_tensor_affine(self.weight.float(), scale, torch.tensor(0), -128, 127)
        step = self.largest / 127
        rounded = inputs + ((inputs / step).round() * step - inputs).detach()
        return functional.linear(rounded, weight.double(), self.bias)


@program(
    "quantisation-aware training: fake-quantised weights and inputs, ranges in buffers", has_union=False, tolerance=1e-6
)
def fake_quantised(run: Run) -> Values:
    model = nn.Sequential(FakeQuantised(6, 9), nn.Tanh(), FakeQuantised(9, 3))
    found = trained(run, model, adam(model))
    return {name: value for name, value in found.items() if not name.endswith("largest")}  # DDP's are each rank's own


class Quantised(nn.Module):
    """VQ-VAE: codes in a buffer, moved towards the vectors that chose them, which are averaged over ranks."""

    def __init__(self, mean: Any) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(6, 4), nn.Linear(4, 6)
        self.register_buffer("codes", torch.randn(5, 4))
        self.register_buffer("sizes", torch.ones(5))
        self.register_buffer("sums", self.codes.clone())
        self.mean = mean

    def forward(self, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.encoder(inputs)
        chosen = torch.cdist(hidden.detach(), self.codes).argmin(-1)
        picked = self.codes[chosen]
        if self.training:
            hot = functional.one_hot(chosen, 5).double()
            self.sizes.lerp_(self.mean(hot.sum(0) / len(inputs)), 0.2)
            self.sums.lerp_(self.mean(hot.t() @ hidden.detach() / len(inputs)), 0.2)
            self.codes.copy_(self.sums / self.sizes[:, None].clamp(min=1e-3))
        return self.decoder(hidden + (picked - hidden).detach()), mse(hidden, picked)


@program("VQ-VAE: a codebook in buffers, moved by counts and sums that forward averages over ranks")
def vector_quantised(run: Run) -> Values:
    model = Quantised(run.mean)
    model, optimizer = run.wrap(model, adam(model))
    for inputs, _ in run.pairs(5):
        optimizer.zero_grad()
        output, commitment = model(inputs)
        (mse(output, inputs) + 0.25 * commitment).backward()
        optimizer.step()
    return final(run, model)


class Rotary(nn.Module):
    """Keeps a table of positions in a buffer that is not saved, and makes it longer when a longer sequence comes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(6, 6), nn.Linear(6, 3)
        self.register_buffer("table", torch.zeros(0, 6), persistent=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        length = inputs.shape[1]
        if length > len(self.table):
            self.table = torch.outer(torch.arange(length).double(), 0.5 ** torch.arange(6).double()).cos()
        return self.head(torch.tanh(self.inner(inputs) * self.table[:length]))


@program("a table of positions in a buffer, which forward replaces by a longer one as sequences grow")
def buffer_that_grows(run: Run) -> Values:
    model = Rotary()
    batches = [(run.normal(3, length, 6), run.normal(3, length, 3)) for length in (2, 3, 3, 5, 4)]
    return trained(run, model, adam(model), batches=batches)


class ActNorm(nn.Module):
    """Takes its first scale and bias from the first batch that it sees, as normalising flows do."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.bias, self.log_scale = nn.Parameter(torch.zeros(features)), nn.Parameter(torch.zeros(features))
        self.register_buffer("is_set", torch.tensor(False))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if not self.is_set:
            with torch.no_grad():
                self.bias.data.copy_(-inputs.mean(0))
                self.log_scale.data.copy_(-inputs.std(0).log())
                self.is_set.fill_(1)
        return (inputs + self.bias) * self.log_scale.exp()


@program("parameters that the first forward pass sets from its batch, the same on all ranks", has_union=False)
def set_by_the_first_batch(run: Run) -> Values:
    model = nn.Sequential(nn.Linear(6, 9), ActNorm(9), nn.Tanh(), nn.Linear(9, 3))
    model, optimizer = run.wrap(model, adam(model))
    batches = run.pairs(4)
    batches[0] = (torch.randn(4, 6, generator=torch.Generator().manual_seed(1)), batches[0][1])
    return final(run, model, losses=train(run, model, optimizer, batches=batches))


class Positive(nn.Module):
    """A parametrization."""

    def forward(self, raw: torch.Tensor) -> torch.Tensor:
        return functional.softplus(raw)

    def right_inverse(self, value: torch.Tensor) -> torch.Tensor:
        return value.abs().clamp(min=1e-3).expm1().log()


@program("parametrizations computed once for two uses (parametrize.cached), weights set through them", has_ddp=False)
def parametrization_cached(run: Run) -> Values:
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))
    parametrize.register_parametrization(model[0], "weight", Positive())
    model, optimizer = run.wrap(model, adam(model))
    for inputs, targets in run.pairs(4):
        optimizer.zero_grad()
        with parametrize.cached():
            (mse(model(inputs), targets) + mse(model(inputs * 2), targets)).backward()
        optimizer.step()
        with torch.no_grad():
            layer = run.module(model)[0]
            layer.weight = layer.weight * 0.99
    return final(run, model)


@program("weight_norm and spectral_norm of the old kind, whose weight is a plain attribute made by a hook")
def norms_of_the_old_kind(run: Run) -> Values:
    first, second = nn.Linear(6, 9), nn.Linear(9, 3)
    nn.utils.spectral_norm(first)
    model = nn.Sequential(first, nn.Tanh(), second)
    return trained(run, model, adam(model))


@program("weight standardisation, dropped connections, and a weight scaled by its own norm, all in forward")
def weights_made_in_forward(run: Run) -> Values:
    class Standard(nn.Linear):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            weight = self.weight - self.weight.mean(1, keepdim=True)
            weight = weight / (weight.std(1, keepdim=True) + 1e-5)
            keep = (torch.arange(weight.numel()).view_as(weight) % 5 > 0).double()
            return functional.linear(inputs, weight * keep * self.weight.norm().rsqrt(), self.bias)

    model = nn.Sequential(Standard(6, 9), nn.Tanh(), Standard(9, 3))
    return trained(run, model, adam(model))


@program("textual inversion: rows of an embedding that are not trained are put back after each step")
def rows_put_back(run: Run) -> Values:
    model = nn.Sequential(nn.Embedding(12, 6), nn.Linear(6, 12))
    model, optimizer = run.wrap(model, torch.optim.AdamW(model[0].parameters(), lr=0.05))
    table = run.module(model)[0].weight
    first, is_kept = table.detach().clone(), torch.arange(12) < 10

    def put_back(_: int) -> None:
        with torch.no_grad():
            table[is_kept] = first[is_kept]

    batches = [(run.integers(12, 5), run.integers(12, 5)) for _ in range(4)]
    losses = train(run, model, optimizer, batches=batches, loss_of=functional.cross_entropy, after_step=put_back)
    return final(run, model, losses=losses)


@program("Forward-Forward: each layer a model of its own with its own optimizer and loss, nothing flows between")
def layers_trained_apart(run: Run) -> Values:
    layers = []
    for inputs, outputs in ((6, 9), (9, 7), (7, 5)):
        layer = nn.Sequential(nn.Linear(inputs, outputs), nn.ReLU())
        layers.append(run.wrap(layer, adam(layer, lr=0.03)))
    for inputs, _ in run.pairs(3):
        flows = [inputs, run.normal(4, 6)]
        for layer, optimizer in layers:
            goodness = [layer(one).square().mean(1) for one in flows]
            optimizer.zero_grad()
            (functional.softplus(1 - goodness[0]) + functional.softplus(goodness[1] - 1)).mean().backward()
            optimizer.step()
            with torch.no_grad():
                flows = [run.module(layer)(one) for one in flows]
                flows = [one / (one.norm(dim=1, keepdim=True) + 1e-4) for one in flows]
    return {
        f"{number}.{name}": value
        for number, (layer, _) in enumerate(layers)
        for name, value in final(run, layer).items()
    }
