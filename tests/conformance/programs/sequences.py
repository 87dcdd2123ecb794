"""Models of sequences: recurrent ones, attention, embeddings of several kinds, truncated backpropagation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from declarations import program
from torch import nn
from torch.nn import functional

from programs.small import adam, final, mse, sgd, train, trained

if TYPE_CHECKING:
    from neutral_run import Run

Values = dict[str, Any]


class Tagger(nn.Module):
    """A recurrent layer between two others."""

    def __init__(self, kind: type[nn.Module], **options: Any) -> None:
        super().__init__()
        self.recurrent = kind(5, 6, batch_first=True, **options)
        self.head = nn.Linear(12 if options.get("bidirectional") else 6, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(self.recurrent(inputs)[0])


def tagged(run: Run, model: nn.Module, optimizer: Any) -> Values:
    """Train on sequences of seven."""
    return trained(run, model, optimizer, batches=[(run.normal(4, 7, 5), run.normal(4, 7, 3)) for _ in range(4)])


@program("nn.RNN")
def rnn(run: Run) -> Values:
    model = Tagger(nn.RNN)
    return tagged(run, model, sgd(model))


@program("nn.LSTM of two layers, both ways")
def lstm(run: Run) -> Values:
    model = Tagger(nn.LSTM, num_layers=2, bidirectional=True)
    return tagged(run, model, adam(model))


@program("nn.GRU, clipped")
def gru(run: Run) -> Values:
    model = Tagger(nn.GRU)
    model, optimizer = run.wrap(model, sgd(model))
    for _ in range(4):
        optimizer.zero_grad()
        mse(model(run.normal(4, 7, 5)), run.normal(4, 7, 3)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
    return final(run, model)


@program("LSTMCell in a loop over time")
def lstm_cell(run: Run) -> Values:
    class Stepped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.head = nn.LSTMCell(5, 6), nn.Linear(6, 3)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            state = (torch.zeros(len(inputs), 6), torch.zeros(len(inputs), 6))
            outputs = []
            for moment in inputs.unbind(1):
                state = self.cell(moment, state)
                outputs.append(self.head(state[0]))
            return torch.stack(outputs, 1)

    model = Stepped()
    return tagged(run, model, adam(model))


@program("truncated backpropagation: the hidden state is carried over steps, detached")
def truncated(run: Run) -> Values:
    class Carried(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.recurrent, self.head = nn.GRU(5, 6, batch_first=True), nn.Linear(6, 3)

        def forward(self, inputs: torch.Tensor, state: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
            outputs, state = self.recurrent(inputs, state)
            return self.head(outputs), state

    model, state = Carried(), None
    model, optimizer = run.wrap(model, sgd(model))
    for _ in range(4):
        optimizer.zero_grad()
        outputs, state = model(run.normal(4, 3, 5), None if state is None else state.detach())
        mse(outputs, run.normal(4, 3, 3)).backward()
        optimizer.step()
    return final(run, model)


@program("MultiheadAttention, whose out_proj is read without being called")
def attention(run: Run) -> Values:
    class Attentive(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention, self.head = nn.MultiheadAttention(8, 2, batch_first=True), nn.Linear(8, 3)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return self.head(self.attention(inputs, inputs, inputs, need_weights=False)[0])

    model = Attentive()
    return trained(run, model, adam(model), batches=[(run.normal(4, 5, 8), run.normal(4, 5, 3)) for _ in range(4)])


def encoder() -> nn.TransformerEncoder:
    """Two small layers without dropout."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


@program("TransformerEncoder, evaluated in between, where PyTorch takes its fused path", worlds=(2, 3))
def transformer_encoder(run: Run) -> Values:
    model = encoder()
    model, optimizer = run.wrap(model, sgd(model))
    scores = []

    def evaluate(_: int) -> None:
        model.eval()
        with torch.no_grad():
            scores.append(float(model(torch.ones(2, 5, 8)).square().mean()))
        model.train()

    batches = [(run.normal(4, 5, 8), run.normal(4, 5, 8)) for _ in range(3)]
    return final(run, model, losses=train(run, model, optimizer, batches=batches, after_step=evaluate), scores=scores)


@program("nn.Transformer with masks, encoder and decoder")
def transformer(run: Run) -> Values:
    model = nn.Transformer(8, 2, 1, 1, 16, dropout=0.0, batch_first=True)
    model, optimizer = run.wrap(model, sgd(model))
    mask = nn.Transformer.generate_square_subsequent_mask(4)
    for _ in range(3):
        optimizer.zero_grad()
        outputs = model(run.normal(4, 5, 8), run.normal(4, 4, 8), tgt_mask=mask, tgt_is_causal=True)
        mse(outputs, run.normal(4, 4, 8)).backward()
        optimizer.step()
    return final(run, model)


@program("scaled_dot_product_attention, causal, in a GPT block with tied weights")
def causal_attention(run: Run) -> Values:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.places = nn.Embedding(11, 8), nn.Parameter(torch.zeros(6, 8))
            self.norm, self.mix, self.out = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 8)
            self.head = nn.Linear(8, 11, bias=False)
            self.tokens.weight = self.head.weight

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            hidden = self.tokens(tokens) + self.places
            q, k, v = (one.unflatten(-1, (2, 4)).transpose(1, 2) for one in self.mix(self.norm(hidden)).chunk(3, -1))
            mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            return self.head(hidden + self.out(mixed.transpose(1, 2).flatten(2)))

    model = Block()
    model, optimizer = run.wrap(model, adam(model))
    for _ in range(4):
        tokens = run.integers(11, 4, 7)
        optimizer.zero_grad()
        functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()
    return final(run, model)


def embedded(run: Run, table: nn.Module, optimizer_of: Any = sgd, **options: Any) -> Values:
    """Train a table of vectors and a head on bags of tokens."""
    model = nn.Sequential(table, nn.Linear(5, 3))
    model, optimizer = run.wrap(model, optimizer_of(model), **options)
    for _ in range(5):
        optimizer.zero_grad()
        outputs = model(run.integers(13, 6, 2))
        outputs.flatten(1).square().mean().backward()
        optimizer.step()
    return final(run, model)


@program("a dense embedding with a padding index")
def embedding(run: Run) -> Values:
    return embedded(run, nn.Embedding(13, 5, padding_idx=0), adam)


@program("a sparse embedding, SGD", refused_by_sharded="AllReduce")
def embedding_sparse(run: Run) -> Values:
    return embedded(run, nn.Embedding(13, 5, sparse=True))


@program("a sparse embedding and a dense head, each with its optimizer", refused_by_sharded="AllReduce")
def embedding_sparse_and_dense(run: Run) -> Values:
    model = nn.Sequential(nn.Embedding(13, 5, sparse=True), nn.Linear(5, 3))
    parts = [torch.optim.SparseAdam(model[0].parameters(), lr=0.05), adam(model[1])]
    model, optimizers = run.wrap(model, parts)
    for _ in range(4):
        model(run.integers(13, 6)).square().mean().backward()
        for one in optimizers:
            one.step()
            one.zero_grad()
    return final(run, model)


@program("EmbeddingBag")
def embedding_bag(run: Run) -> Values:
    return embedded(run, nn.EmbeddingBag(13, 5, mode="mean"))


@program("an embedding with max_norm, which the forward pass renormalises in place")
def embedding_max_norm(run: Run) -> Values:
    model = nn.Sequential(nn.Embedding(13, 5, max_norm=1.0), nn.Linear(5, 3))
    model, optimizer = run.wrap(model, sgd(model))
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.arange(13)).square().mean().mul(1.0 + run.normal(3, 1).square().mean()).backward()
        optimizer.step()
    return final(run, model)


@program("word vectors trained with negative samples: two tables, rows by index")
def negative_sampling(run: Run) -> Values:
    class SkipGram(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.centers, self.contexts = nn.Embedding(13, 5), nn.Embedding(13, 5)

        def forward(self, center: torch.Tensor, context: torch.Tensor, wrong: torch.Tensor) -> torch.Tensor:
            vectors = self.centers(center)
            right = functional.logsigmoid((vectors * self.contexts(context)).sum(-1))
            others = functional.logsigmoid(-(self.contexts(wrong) @ vectors[:, :, None]).squeeze(-1)).sum(-1)
            return -(right + others).mean()

    model = SkipGram()
    model, optimizer = run.wrap(model, adam(model))
    for _ in range(5):
        optimizer.zero_grad()
        model(run.integers(13, 6), run.integers(13, 6), run.integers(13, 6, 3)).backward()
        optimizer.step()
    return final(run, model)


@program("sequences packed by length, lengths differing by rank", has_union=False)
def packed_sequences(run: Run) -> Values:
    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.recurrent = nn.LSTM(5, 6, batch_first=True)

        def forward(self, inputs: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
            packed = nn.utils.rnn.pack_padded_sequence(inputs, lengths, batch_first=True, enforce_sorted=False)
            return self.recurrent(packed)[1][0][-1]

    model = Packed()
    model, optimizer = run.wrap(model, adam(model))
    for _ in range(4):
        optimizer.zero_grad()
        model(run.normal(4, 6, 5), run.integers(5, 4) + 1).square().mean().backward()
        optimizer.step()
    return final(run, model)


@program("CTC loss over a convolution", has_union=True)
def connectionist(run: Run) -> Values:
    model = nn.Sequential(nn.Conv1d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv1d(8, 6, 1))
    model, optimizer = run.wrap(model, adam(model))
    for _ in range(3):
        optimizer.zero_grad()
        inputs = run.normal(4, 3, 9)
        labels = run.integers(5, 4, 3) + 1
        logits = model(inputs).permute(2, 0, 1).log_softmax(-1)
        full, short = torch.full((len(inputs),), 9), torch.full((len(inputs),), 3)
        functional.ctc_loss(logits, labels, full, short, reduction="sum").div(len(inputs)).backward()
        optimizer.step()
    return final(run, model)
