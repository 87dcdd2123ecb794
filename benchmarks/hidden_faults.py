"""How often the lookout names the rank at fault first, and how often it accuses one of a healthy job.

    python benchmarks/hidden_faults.py --trials 20 --seed 1 [--group] > faults.jsonl

One job of ranks on this machine runs all the time. Each trial draws a fault and a rank: slow computing, a slow loader,
a stopped process, or nothing at all; as root also a slow processor, a slow disk in a checkpoint (both by cgroups), and
memory on a disk (a file that is mapped, while a cgroup leaves no memory for it). The fault begins when the job has been
well for some seconds, and ends when a line names some rank, or after ``--patience`` seconds. A line is right if it
names that rank; of nothing, if there is none. ``--group``: with process groups in place of ``distribute``.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import queue
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

FLAGS = ("computing", "loader", "memory")
"""Faults that the ranks have by themselves, while there is a file of that name with their number."""
AS_ROOT = ("processor", "disk", "memory")
FAULTS = (*dict.fromkeys((*FLAGS, *AS_ROOT)), "stopped", "nothing")
QUOTA_US, PERIOD_US = 5_000, 100_000
SAVED_BYTES, SAVED_EVERY, DISK_BYTES_PER_S = 1 << 17, 4, 200_000
MAPPED_BYTES, MEMORY_BYTES, TOUCHED_PAGES = 1 << 28, 1 << 26, 400
CGROUPS = Path("/sys/fs/cgroup")
NAMED = re.compile(
    r"syncline: (?:no step was finished.*?: )?(the links? of .*?|rank \d+) .*?(?:holds? the|has told nothing|is behind)"
)
"""A line that accuses; of nobody does one that says who holds nobody up any more."""
WELL_S = 16.0
"""Of a healthy job between two trials: two windows of the lookout."""
ENV = {"SYNCLINE_SILENCE": "120", "SYNCLINE_BEHIND": "8", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


def rank(folder: Path, *, is_group: bool) -> None:
    """Train until the folder is gone; this is what each rank runs."""
    import torch
    import torch.distributed as dist

    import syncline

    model: torch.nn.Module = torch.nn.Sequential(*(torch.nn.Linear(384, 384) for _ in range(6)))
    if is_group:
        dist.init_process_group("syncline")
        number = dist.get_rank()
        model = torch.nn.parallel.DistributedDataParallel(model)
        optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    else:
        number = syncline.init().rank
        model, optimizer = syncline.distribute(model, torch.optim.SGD(model.parameters(), lr=0.01), samples="batch")
    print(f"pid {number} {os.getpid()}", flush=True)
    step, draw = 0, random.Random(number)
    saved = os.open(folder / f"saved-{number}", os.O_RDWR | os.O_CREAT)
    save(saved)
    mapped = memory(folder)
    while (folder / "go").exists():
        has = {name for name in FLAGS if (folder / f"{name}-{number}").exists()}
        time.sleep(0.12 if "loader" in has else 0.002)
        if step % SAVED_EVERY == 0:
            save(saved)
        if "memory" in has:
            sum(mapped[draw.randrange(MAPPED_BYTES)] for _ in range(TOUCHED_PAGES))
        else:
            mapped.madvise(mmap.MADV_DONTNEED)
        loss = model(torch.randn(64, 384))
        for _ in range(3 if "computing" in has else 1):
            slow = model(torch.randn(64, 384)) if "computing" in has else None
            loss = loss if slow is None else loss + 0.0 * slow
        loss.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step % 20 == 0 and not is_group:
            syncline.note(samples=1)
    os._exit(0)


def save(descriptor: int) -> None:
    """Write a checkpoint in place, and to the disk: new blocks would be a matter of the file system's, and of all."""
    os.pwrite(descriptor, os.urandom(SAVED_BYTES), 0)
    os.fdatasync(descriptor)


def memory(folder: Path) -> mmap.mmap:
    """Return a file as memory, of which nothing is in memory yet."""
    with (folder / "mapped").open("a+b") as file:
        mapped = mmap.mmap(file.fileno(), MAPPED_BYTES, access=mmap.ACCESS_READ)
    mapped.madvise(mmap.MADV_RANDOM)
    return mapped


def forget(folder: Path) -> None:
    """Let nothing of the file that is mapped be in memory."""
    with (folder / "mapped").open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@contextmanager
def limited(controller: str, pid: int, first: tuple[str, object], second: tuple[str, object]) -> Iterator[None]:
    """Put a process into a cgroup with a limit within this context: a file and value of version 1, or of version 2."""
    parent = CGROUPS / controller if (CGROUPS / controller).exists() else CGROUPS
    name, value = second if parent == CGROUPS else first
    group = parent / "syncline-hidden-fault"
    group.mkdir(exist_ok=True)
    (group / name).write_text(str(value))
    (group / "cgroup.procs").write_text(str(pid))
    yield
    (parent / "cgroup.procs").write_text(str(pid))
    group.rmdir()


def limits(fault: str, pid: int, folder: Path) -> AbstractContextManager[None]:
    """Return the limit that makes a process slow so."""
    if fault == "processor":
        return limited("cpu", pid, ("cpu.cfs_quota_us", QUOTA_US), ("cpu.max", f"{QUOTA_US} {PERIOD_US}"))
    if fault == "disk":
        number = folder.stat().st_dev
        disk = f"{os.major(number)}:{os.minor(number)}"
        first = "blkio.throttle.write_bps_device", f"{disk} {DISK_BYTES_PER_S}"
        return limited("blkio", pid, first, ("io.max", f"{disk} wbps={DISK_BYTES_PER_S}"))
    if fault == "memory":
        return limited("memory", pid, ("memory.limit_in_bytes", MEMORY_BYTES), ("memory.high", MEMORY_BYTES))
    return nullcontext()


@contextmanager
def broken(fault: str, number: int, pid: int, folder: Path) -> Iterator[None]:
    """Let rank ``number`` have the fault within this context."""
    if fault in (*FLAGS, *AS_ROOT):
        forget(folder)
        flag = folder / f"{fault}-{number}"
        with limits(fault, pid, folder):
            flag.touch()
            yield
            flag.unlink()
    elif fault == "stopped":
        os.kill(pid, signal.SIGSTOP)
        yield
        os.kill(pid, signal.SIGCONT)
    else:
        yield


class Job:
    """The ranks, and what they write."""

    def __init__(self, folder: Path, num_ranks: int, *, is_group: bool) -> None:
        (folder / "go").touch()
        command = [sys.executable, "-m", "syncline.cli.main", "run", "--ranks", str(num_ranks), __file__]
        command += ["--folder", str(folder), *(["--group"] if is_group else [])]
        self.process = subprocess.Popen(
            command, env=os.environ | ENV, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        self.pids: dict[int, int] = {}
        while len(self.pids) < num_ranks:
            line = self._lines.get(timeout=300)
            if found := re.search(r"pid (\d+) (\d+)", line):
                self.pids[int(found[1])] = int(found[2])

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line.rstrip())

    def named(self, seconds: float) -> str:
        """Return the first line within so many seconds that names someone, or nothing."""
        end_s = time.monotonic() + seconds
        while (left_s := end_s - time.monotonic()) > 0:
            try:
                line = self._lines.get(timeout=left_s)
            except queue.Empty:
                break
            if self.process.poll() is not None:
                raise SystemExit(f"the job has ended: {line}")
            if NAMED.search(line):
                return line
        return ""


def main() -> None:
    """Draw faults, and print what was said of each as JSON; at the end how often it was right, to standard error."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--patience", type=float, default=30.0)
    parser.add_argument("--group", action="store_true")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.folder:
        rank(options.folder, is_group=options.group)
    draw = random.Random(options.seed)
    counts: Counter[tuple[str, bool]] = Counter()
    faults = [fault for fault in FAULTS if fault not in AS_ROOT or os.geteuid() == 0]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "mapped").write_bytes(bytes(MAPPED_BYTES))
        job = Job(folder, options.ranks, is_group=options.group)
        try:
            for trial in range(options.trials):
                while job.named(WELL_S):  # what is left of the one before
                    pass
                fault, number = draw.choice(faults), draw.randrange(options.ranks)
                began_s = time.monotonic()
                with broken(fault, number, job.pids[number], folder):
                    line = job.named(options.patience)
                found = NAMED.search(line)
                is_right = not line if fault == "nothing" else found is not None and found[1] == f"rank {number}"
                counts[fault, is_right] += 1
                told = {"trial": trial, "fault": fault, "rank": number, "right": is_right, "line": line}
                load = os.getloadavg()[0]
                print(json.dumps(told | {"after_s": round(time.monotonic() - began_s, 1), "load": load}), flush=True)
        finally:
            (folder / "go").unlink()
            job.process.terminate()
            job.process.wait(timeout=60)
    for fault in faults:
        right, wrong = counts[fault, True], counts[fault, False]
        print(f"{fault}: {right} of {right + wrong} right", file=sys.stderr)


if __name__ == "__main__":
    main()
