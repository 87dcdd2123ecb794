"""Writes ``docs/conformance.md`` from the declarations: ``python tests/conformance/conformance_page.py``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from declarations import RULES, Program, all_programs

PAGE = Path(__file__).parents[2] / "docs" / "conformance.md"
REMEDIES = {
    "AllReduce": "use `AllReduce()`",
    'align="parameter"': 'use `Sharded(align="parameter")`',
    "add them to the optimizer before": "add groups before `distribute()`",
    "after backward()": "step after `backward()`",
    "backward pass of each step outside no_sync": "let the last pass of a step be synchronised",
    "by assigning the parameter itself": "tie the parameters themselves",
    "give a whole state to optimizer.load_state_dict": "use `load_state_dict()`",
    "give the parameters memory of their own": "`p.data = p.data.clone()` first",
    "write the values with p.data.copy_": "`p.data.copy_()`, or a `clone()` of the vector",
    "give each further optimizer parameters of its own": "one optimizer for each parameter",
    "needs a backward pass": "run a backward pass first",
    "save optimizer.state_dict()": "keep `optimizer.state_dict()`",
    "whose parameters the optimizer was made with": "give the optimizer the model's parameters",
}
INTRODUCTION = """\
# Conformance: a script that is right with DDP is right here

*Written by `python tests/conformance/conformance_page.py` from the programs' declarations; a test holds it to them.*

Each line is a small training script. It is written once, and run on 2 ranks (some on 3 as well) under
`DistributedDataParallel` over gloo and under three update rules of this library, on the same data, which differs by
rank. After training, parameters, buffers, moving averages, losses and whatever else the script computes are compared on
every rank, in double precision to within {tolerance:g}, in single precision and bfloat16 to their rounding.
{num_union} of the {num} programs are also compared with one process that trains on the union of all ranks' batches.

- **equal**: the same as with DDP, to rounding. {num_without} scripts are compared with the one process, because DDP
  cannot run them: a backward pass without a forward pass through the wrapper, a graph that is used twice, SyncBatchNorm
  without a GPU.
- **refused**: the script ends with an error that names what to do instead. None of these scripts is silently different.
  Those that are told to use `Sharded(align="parameter")` are run under it too, and are equal.

Where a script must know a difference:

- Ranks that have run out of data within `syncline.join(model)` count nothing in the mean, as with
  `Join(..., divide_by_initial_world_size=False)`.
- Where batches differ in size between ranks and nothing was said, the mean is DDP's (each rank counts alike), and
  rank 0 warns once: `samples="batch"` would weigh by size.
- Buffers are rank 0's from each `step()` on, on all ranks; DDP leaves each rank its own where a step's last forward
  pass was under `no_grad`. A forward pass under `no_grad` between two steps broadcasts nothing, so that one rank may
  validate alone; with DDP that is to be done with `model.module`. Where a forward pass changes buffers that the next
  of the same step may read, rank 0's are broadcast first, as with DDP, and all ranks must make as many passes.

The scripts are in `tests/conformance/programs/`; `pytest tests/conformance -k NAME` runs one. `ports_language` and
`ports_vision` are the loops of nanoGPT, minGPT and of PyTorch's mnist, imagenet and dcgan examples in their structure.
"""


def page() -> str:
    """Return the page's text."""
    programs = list(all_programs().values())
    introduction = INTRODUCTION.format(
        num=len(programs),
        num_union=sum(one.has_union and one.has_ddp for one in programs),
        num_without=sum(not one.has_ddp for one in programs),
        tolerance=Program.__dataclass_fields__["tolerance"].default,
    )
    return introduction + "\n" + "\n".join(_lines(programs)) + "\n"


def _lines(programs: list[Program]) -> Iterator[str]:
    groups = dict.fromkeys(one.group for one in programs)
    for group in groups:
        yield f"## {group.replace('_', ' ').capitalize()}\n"
        yield "| program | what it does | DDP | AllReduce | Sharded | Sharded, overlapped |"
        yield "|---|---|---|---|---|---|"
        for one in programs:
            if one.group == group:
                yield _row(one)
        yield ""


def _row(program: Program) -> str:
    results = [_result(program, rule) for rule in RULES]
    reference = "reference" if program.has_ddp else "not possible"
    return f"| `{program.name}` | {program.what} | {reference} | {' | '.join(results)} |"


def _result(program: Program, rule: str) -> str:
    refused = program.expected(rule)
    if refused is None:
        return "equal" if program.warns is None else "equal, with a warning"
    return f"refused: {REMEDIES[refused.remedy]}"


if __name__ == "__main__":
    PAGE.write_text(page())
