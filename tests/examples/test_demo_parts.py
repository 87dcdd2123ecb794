"""The demo's parts that need no second rank: the text, the model, the display."""

import torch

from syncline.demo.display import LINE_INTERVAL_S, Lines, Moment, choose_display
from syncline.demo.gpt import GPT, GPTShape, load_corpus, nats_per_byte, sample

SMALL = GPTShape(width=32, num_layers=2, num_heads=2, context_length=16)


def write_library(folder):
    for k in range(60):
        (folder / f"module{k}.py").write_text(f"# module {k}\n" * 20)
    (folder / "test").mkdir()
    (folder / "test" / "left_out.py").write_text("x" * 1000)


def test_the_split_depends_on_paths_alone_and_leaves_tests_out(tmp_path):
    write_library(tmp_path)
    corpus = load_corpus(tmp_path)
    training, validation = (bytes(part.numpy()) for part in (corpus.training, corpus.validation))
    assert b"xxx" not in training + validation
    assert all(f"# module {k}\n".encode() in training + validation for k in range(60))
    assert validation
    assert not set(validation.splitlines()) & set(training.splitlines())
    again = load_corpus(tmp_path)
    assert torch.equal(again.training, corpus.training)
    assert torch.equal(again.validation, corpus.validation)


def test_targets_are_the_inputs_one_byte_later(tmp_path):
    write_library(tmp_path)
    corpus = load_corpus(tmp_path)
    inputs, targets = corpus.batch(num_sequences=4, context_length=16, seed=7)
    assert inputs.shape == targets.shape == (4, 16)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert torch.equal(inputs, corpus.batch(num_sequences=4, context_length=16, seed=7)[0])
    assert not torch.equal(inputs, corpus.batch(num_sequences=4, context_length=16, seed=8)[0])


def test_the_default_model_has_one_to_three_million_parameters():
    assert 1_000_000 <= GPT(GPTShape()).num_parameters <= 3_000_000


def test_the_model_never_looks_ahead():
    torch.manual_seed(0)
    model = GPT(SMALL)
    for parameter in model.parameters():  # also the ones that begin as zeros
        torch.nn.init.normal_(parameter, std=0.5)
    symbols = torch.randint(256, (1, 16))
    changed = symbols.clone()
    changed[0, 9] = (changed[0, 9] + 1) % 256
    before, after = model(symbols), model(changed)
    assert torch.equal(before[:, :9], after[:, :9])
    assert not torch.equal(before[:, 9:], after[:, 9:])


def test_an_untrained_model_knows_nothing_and_learns():
    torch.manual_seed(0)
    model = GPT(SMALL)
    text = torch.tensor(list(b"for x in range(10): pass\n" * 4))
    inputs, targets = text[None, :16], text[None, 1:17]
    assert abs(nats_per_byte(model, inputs, targets).item() - 5.545) < 0.1
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(40):
        loss = nats_per_byte(model, inputs, targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.5


def test_a_sample_is_as_long_as_asked_and_the_seed_decides():
    model = GPT(SMALL)
    drawn = sample(model, b"def ", num_bytes=30, temperature=1.0, seed=3)
    assert len(drawn) == 30
    assert drawn == sample(model, b"def ", num_bytes=30, temperature=1.0, seed=3)


def test_lines_come_every_few_seconds_and_at_the_end():
    now_s, written = [0.0], []
    lines = Lines(first_step=0, num_steps=100, clock=lambda: now_s[0], write=written.append)

    def show(step, at_s):
        now_s[0] = at_s
        lines.show(Moment(step=step, loss=2.5, tokens_per_s=12345.6, waiting=0.125))

    show(1, 0.1)
    show(5, 1.0)
    assert written == []
    show(50, LINE_INTERVAL_S)
    assert written == ["step 50/100  loss 2.500  12,346 tokens/s  waiting 12%  5 s left"]
    show(60, LINE_INTERVAL_S + 0.1)
    assert len(written) == 1
    show(100, LINE_INTERVAL_S + 0.2)
    assert len(written) == 2


def test_only_rank_0_has_something_to_show(capsys):
    with choose_display(1, first_step=0, num_steps=1) as display:
        display.show(Moment(step=1, loss=0.0, tokens_per_s=0.0, waiting=0.0))
        display.note("x")
    assert capsys.readouterr().out == ""
