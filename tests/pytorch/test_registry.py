"""Which models are in training: what is closed is forgotten, and so is its memory."""

import gc
import weakref

import torch

import syncline
from thread_fleets import run_fleets


def test_what_was_trained_on_a_fleet_that_is_closed_is_freed():
    freed = []

    def body(fleet):
        model = torch.nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        _, distributed = syncline.distribute(model, optimizer, syncline.AllReduce(), fleet=fleet)
        model(torch.ones(2, 4)).sum().backward()
        distributed.step()
        freed.extend([weakref.ref(distributed.training), weakref.ref(fleet), weakref.ref(model)])

    run_fleets(2, body)
    gc.collect()
    assert len(freed) == 6
    assert [reference() for reference in freed] == [None] * 6
